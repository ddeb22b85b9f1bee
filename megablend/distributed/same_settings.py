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
"""The maximum number of settings that a message names."""


def check_same_settings(launch: Communicator, settings: Mapping[str, Any]) -> None:
    """Check that all ranks have the same settings. Collective.

    Args:
        settings: the settings of this rank, by name. Values that are mappings or lists are compared
            item by item.

    Raises: ConfigError, on all ranks, if settings differ. The message names settings and
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
    """Describe how the settings of ranks differ, for a message: for each of the first settings that
    differ, the value of rank 0, and that of the first rank with another value.

    Args:
        all_settings: the settings of each rank, in rank order.
    """
    different = list[str]()
    for name in dict.fromkeys(name for settings in all_settings for name in settings):
        values = [settings.get(name, "not set") for settings in all_settings]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), 0)
        if other:
            different.append(
                f"{name} is {values[0]:.100} on rank 0, {values[other]:.100} on rank {other}"
            )
    named = "; ".join(different[:_MAX_NAMED])
    return f"the ranks have different settings: {named}; start all ranks with the same config, flags and version"
