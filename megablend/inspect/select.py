"""Select the few important ones among thousands of sources that a description shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from megablend.inspect.description import FilesDescription, RunDescription


def select_sources(
    described: FilesDescription | RunDescription, top: int
) -> FilesDescription | RunDescription:
    """Return a description with at most `top` sources in each list: those with the largest shares
    of a split, and the first ones of other lists. Totals still cover all sources, and
    `sources_left_out` is the number of sources that are missing from a list."""
    if isinstance(described, FilesDescription):
        left_out = _count_left_out(described.files, top)
        return replace(described, files=described.files[:top], sources_left_out=left_out)
    index = described.index
    left_out = _count_left_out(index.sources, top)
    splits = {}
    for name, split in described.splits.items():
        sources = split.sources
        if len(sources) > top:
            sources = tuple(sorted(sources, key=attrgetter("actual_share"), reverse=True)[:top])
        splits[name] = replace(
            split, sources=sources, sources_left_out=_count_left_out(split.sources, top)
        )
    return replace(
        described,
        index=replace(index, sources=index.sources[:top], sources_left_out=left_out),
        splits=splits,
    )


def _count_left_out(sources: Sequence[Any], top: int) -> int | None:
    """Return the number of sources after the first `top`; None if there are none."""
    return max(0, len(sources) - top) or None
