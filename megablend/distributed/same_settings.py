"""Checks that all ranks of a job have the same settings. Each rank reads its own config file and
command-line flags, so they could differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megablend.distributed.base import Communicator
from megablend.errors import ConfigError
from megablend.system.digest import hex_digest

_MAX_NAMED = 3
"""The maximum number of settings, and of ranges of ranks, that a message names."""
_MAX_CHARACTERS = 100
"""The maximum number of characters of a value that a message shows."""


def check_same_settings(launch: Communicator, settings: Mapping[str, Any]) -> None:
    """Check that all ranks have the same settings. Collective.

    Args:
        settings: the settings of this rank, by name. Values that are mappings or lists are compared
            item by item.

    Raises: ConfigError, on all ranks, if settings differ. The message names these settings and the
        ranks.
    """
    if launch.size > 1:
        compare_settings(launch, settings, launch.allgather(digest_settings(settings)))


def digest_settings(settings: Mapping[str, Any]) -> str:
    """Return a digest of settings. Equal settings have equal digests."""
    return hex_digest(json.dumps(sorted(_flatten(settings, ""))))


def compare_settings(
    launch: Communicator, settings: Mapping[str, Any], digests: Sequence[str]
) -> None:
    """Check that all ranks have the same settings, given digests that have already been exchanged.
    Collective only if the digests differ. Raises: see `check_same_settings`.

    Args:
        settings: the settings of this rank, by name.
        digests: the result of `digest_settings` on each rank, in rank order.
    """
    if len(set(digests)) > 1:
        raise ConfigError(_describe_differences(launch.allgather(dict(_flatten(settings, "")))))


def _flatten(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield each leaf of nested settings as a pair of its name, such as `sources.train[1].weight`,
    and its value as text."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _flatten(item, f"{name}[{number}]")
    elif value is not None:
        yield name, str(value)


def _describe_differences(all_settings: Sequence[Mapping[str, str]]) -> str:
    """Describe how the settings of ranks differ, for a message.

    Args:
        all_settings: the settings of each rank, in rank order.
    """
    names = dict.fromkeys(name for settings in all_settings for name in settings)
    values = {name: [settings.get(name) for settings in all_settings] for name in names}
    different = [name for name in names if len(set(values[name])) > 1]
    listed = [_describe_setting(name, values[name]) for name in different[:_MAX_NAMED]]
    more = len(different) - len(listed)
    if more > 0:
        listed.append(f"{more} more")
    return f"the ranks have different settings: {'; '.join(listed)}; start all ranks with the same config and flags"


def _describe_setting(name: str, values: Sequence[str | None]) -> str:
    """Return a text that describes which ranks have which value of a setting."""
    ranks = dict[str | None, list[int]]()
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return f"{name} is " + ", ".join(
        f"{_shorten(value)} on {_list_ranks(which)}" for value, which in ranks.items()
    )


def _shorten(value: str | None) -> str:
    """Return a value as text for a message, cut to _MAX_CHARACTERS; "not set" for None."""
    if value is None:
        return "not set"
    return value if len(value) <= _MAX_CHARACTERS else f"{value[: _MAX_CHARACTERS - 3]}..."


def _list_ranks(ranks: Sequence[int]) -> str:
    """Return a list of ranks as text, such as "rank 3", "ranks 0 to 2, 5" or "ranks 1, 3, 5 and
    others"."""
    runs = list[list[int]]()
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    listed = [
        str(first) if first == last else f"{first} to {last}" for first, last in runs[:_MAX_NAMED]
    ]
    more = " and others" if len(runs) > _MAX_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(listed)}{more}"
