"""Select the sources of a description that are shown, and sort them: the few that matter of
thousands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeVar

from megablend.config.numbers import whole_number
from megablend.errors import ConfigError, did_you_mean
from megablend.inspect.description import (
    FilesDescription,
    IndexDescription,
    RunDescription,
    SplitDescription,
)

SORTS: dict[str, tuple[str, ...]] = {
    "name": ("name",),
    "tokens": ("tokens", "bytes"),
    "share": ("actual_share",),
    "samples": ("samples",),
    "epochs": ("epochs",),
}
"""The attributes by which each `sort` may sort; the first one that a source has is used. Names are
in ascending, numbers in descending order."""
_Listing = TypeVar("_Listing", IndexDescription, SplitDescription)


def select_sources(
    described: FilesDescription | RunDescription,
    *,
    top: int | None = None,
    sort: str | None = None,
    match: str | None = None,
) -> FilesDescription | RunDescription:
    """Return a description with only the selected sources. Totals still cover all sources, and
    `sources_left_out` is the number of sources that a list lacks.

    Args:
        top: number of sources to keep in each list; None or 0 for all.
        sort: a key of SORTS; by default the config's order.
        match: a pattern for names of sources, such as `web-*`.

    Raises: ConfigError if `sort` is unknown, `top` is negative, or `match` matches no source.
    """
    if sort is not None and sort not in SORTS:
        hint = did_you_mean(sort, SORTS, before="; ")
        raise ConfigError(f"found sort {sort!r}, expected one of {', '.join(SORTS)}{hint}")
    top = None if top is None else whole_number("top", top, least=0)
    names = _list_names(described)
    if match is not None and not any(fnmatchcase(name, match) for name in names):
        raise ConfigError(
            f"match {match!r} matches no source; patterns may contain * and ?, such as 'web-*'"
        )
    selection = _Selection(top, sort, match)
    if isinstance(described, FilesDescription):
        files = selection.apply(described.files)
        num_left_out = len(described.files) - len(files)
        return replace(described, files=files, sources_left_out=num_left_out or None)
    return replace(
        described,
        index=selection.apply_to(described.index),
        splits={name: selection.apply_to(split) for name, split in described.splits.items()},
    )


def _list_names(described: FilesDescription | RunDescription) -> list[str]:
    """Return the names of the sources in all lists of a description."""
    if isinstance(described, FilesDescription):
        return [source.name for source in described.files]
    of_index = [source.name for source in described.index.sources]
    return of_index + [
        source.name for split in described.splits.values() for source in split.sources
    ]


class _Selection(NamedTuple):
    """See the arguments of `select_sources`."""

    top: int | None
    sort: str | None
    match: str | None

    def apply(self, listed: Sequence[Any]) -> tuple[Any, ...]:
        """Return the selected sources of a list, sorted."""
        sources = [
            source
            for source in listed
            if self.match is None or fnmatchcase(source.name, self.match)
        ]
        if self.sort is not None and sources:
            _sort(sources, SORTS[self.sort])
        return tuple(sources[: self.top or None])

    def apply_to(self, described: _Listing) -> _Listing:
        """Return the description of an index or a split with only the selected sources."""
        sources = self.apply(described.sources)
        num_left_out = len(described.sources) - len(sources)
        return replace(described, sources=sources, sources_left_out=num_left_out or None)


def _sort(sources: list[Any], names: Sequence[str]) -> None:
    """Sort sources by the first of these attributes that they have."""
    for name in names:
        if hasattr(sources[0], name):
            sources.sort(key=lambda source: getattr(source, name), reverse=name != "name")
            return
