"""Select the sources of a description that are shown, and sort them: the few that matter of
thousands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from megablend.config.numbers import whole_number
from megablend.errors import ConfigError, did_you_mean
from megablend.inspect.description import FilesDescription, RunDescription

Described = TypeVar("Described", FilesDescription, RunDescription)

SORTS: dict[str, tuple[str, ...]] = {
    "name": ("name",),
    "tokens": ("tokens", "bytes"),
    "share": ("actual_share",),
    "samples": ("samples",),
    "epochs": ("epochs",),
}
"""The attributes by which each `sort` may sort; the first one that a source has is used. Names are
in ascending, numbers in descending order."""


def select_sources(
    described: FilesDescription | RunDescription,
    *,
    top: int | None = None,
    sort: str | None = None,
    match: str | None = None,
) -> FilesDescription | RunDescription:
    """A description with only the selected sources; totals still cover all sources, and
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
    is_matched = False

    def select(listed: Sequence[Any]) -> dict[str, Any]:
        nonlocal is_matched
        sources = [each for each in listed if match is None or fnmatchcase(each.name, match)]
        is_matched |= bool(sources)
        if sort is not None:
            key = next(
                (name for name in SORTS[sort] if sources and hasattr(sources[0], name)), None
            )
            sources.sort(key=lambda each: getattr(each, key) if key else 0, reverse=key != "name")
        sources = sources[: top or None]
        return {"sources": tuple(sources), "sources_left_out": len(listed) - len(sources) or None}

    selected: FilesDescription | RunDescription
    if isinstance(described, FilesDescription):
        changes = select(described.files)
        selected = replace(
            described, files=changes["sources"], sources_left_out=changes["sources_left_out"]
        )
    else:
        selected = replace(
            described,
            index=replace(described.index, **select(described.index.sources)),
            splits={
                name: replace(split, **select(split.sources))
                for name, split in described.splits.items()
            },
        )
    if match is not None and not is_matched:
        raise ConfigError(
            f"match {match!r} matches no source; patterns may contain * and ?, such as 'web-*'"
        )
    return selected
