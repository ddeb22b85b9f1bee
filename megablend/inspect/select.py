"""Select and sort the sources that a description shows, such as the few important ones among
thousands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from megablend.config.numbers import whole_number
from megablend.errors import ConfigError, did_you_mean
from megablend.inspect.description import FilesDescription, RunDescription

SORTS: dict[str, tuple[str, ...]] = {
    "name": ("name",),
    "tokens": ("tokens", "bytes"),
    "share": ("actual_share",),
    "samples": ("samples",),
    "epochs": ("epochs",),
}
"""For each value of `sort`, the attributes to sort by; the first attribute that a source has is
used. Names are in ascending, numbers in descending order."""


def select_sources(
    described: FilesDescription | RunDescription,
    *,
    top: int | None = None,
    sort: str | None = None,
    match: str | None = None,
) -> FilesDescription | RunDescription:
    """Return a description with only the selected sources. Totals still cover all sources, and
    `sources_left_out` is the number of sources that are missing from a list.

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

    def select(listed: Sequence[Any]) -> dict[str, Any]:
        """Return the selected sources of a list, sorted, and the number of sources that were left
        out."""
        sources = [source for source in listed if match is None or fnmatchcase(source.name, match)]
        if sort is not None and sources:
            _sort(sources, SORTS[sort])
        sources = sources[: top or None]
        return {"sources": tuple(sources), "sources_left_out": len(listed) - len(sources) or None}

    if isinstance(described, FilesDescription):
        selected = select(described.files)
        return replace(
            described, files=selected["sources"], sources_left_out=selected["sources_left_out"]
        )
    return replace(
        described,
        index=replace(described.index, **select(described.index.sources)),
        splits={
            name: replace(split, **select(split.sources))
            for name, split in described.splits.items()
        },
    )


def _list_names(described: FilesDescription | RunDescription) -> list[str]:
    """Return the names of the sources in all lists of a description."""
    if isinstance(described, FilesDescription):
        return [source.name for source in described.files]
    of_index = [source.name for source in described.index.sources]
    return of_index + [
        source.name for split in described.splits.values() for source in split.sources
    ]


def _sort(sources: list[Any], names: Sequence[str]) -> None:
    """Sort sources in place, by the first attribute of `names` that they have."""
    for name in names:
        if hasattr(sources[0], name):
            sources.sort(key=lambda source: getattr(source, name), reverse=name != "name")
            return
