"""Splits of sources in several snapshots of a run:
documents that were there before keep their split, and new files are divided by themselves.

Files are recognised by their content. The files of a source that came with the same snapshot are a
*cohort*, whose documents the shares divide; so a split of a later snapshot has a range of documents
of each cohort, without those of files that are gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megablend.index.blocks.block_store import BlockStore
from megablend.index.blocks.splits import (
    PART_DTYPE,
    VERSION,
    cut_documents,
    find_document,
    parts_of,
)
from megablend.index.tables.sealed_numbers import ComputedNumbers

Ranges = npt.NDArray[np.void]
"""PART_DTYPE [num_ranges]: a source's documents of one split."""


@dataclass(frozen=True)
class SplitRanges:
    """The splits of a snapshot's sources."""

    numbers: Mapping[str, int]
    """The number of each source, by its name."""
    num_splits: int
    rows: Ranges
    """PART_DTYPE [num_rows]: the ranges of all splits of the first source, then those of the
    next."""
    edges: npt.NDArray[np.int64]
    """int64 [num_sources * num_splits + 1]: where each split begins in `rows`."""

    def ranges(self, source: int, split: int) -> Ranges:
        """The documents of a source, by its number, that belong to a split: a view of `rows`."""
        start, stop = self.edges[source * self.num_splits + split :][:2].tolist()
        return self.rows[start:stop]

    def joined(self, sources: npt.NDArray[np.int64], split: int) -> Ranges:
        """The range of each source from the start of its first part to the end of its last one,
        by the source's number: PART_DTYPE [n]."""
        places = sources * self.num_splits + split
        starts = self.edges[places]
        joined: Ranges = self.rows[starts]
        for i in np.flatnonzero(self.edges[places + 1] - starts > 1).tolist():
            joined[i] = _merge(self.ranges(int(sources[i]), split))[0]
        return joined


def _merge(ranges: Ranges) -> Ranges:
    merged: Ranges = ranges[:1].copy()
    for name in ("stop_block", "keep"):
        merged[name] = ranges[name][-1]
    for name in ("documents", "tokens"):
        merged[name] = ranges[name].sum()
    return merged


class _Documents(NamedTuple):
    """The documents of a file, as their cohort counts them."""

    cohort: int
    first: int
    size: int


def find_split_ranges(
    stores: Sequence[BlockStore], shares: Sequence[Fraction], *, keep: bool = False
) -> list[SplitRanges]:
    """The splits of all sources in each snapshot of a run, in order;
    from the cache if a build stored them.

    Args:
        stores: of the snapshots, in the run's order.
        keep: store them in the cache.

    Raises: as `parts_of` does.
    """
    found = list[SplitRanges]()
    for number, store in enumerate(stores):
        if number and max(shares) < 1:  # else every document is in the same split
            found.append(_grown(stores[: number + 1], shares, keep=keep))
            continue
        parts = parts_of(store, shares, keep=keep).reshape(-1)
        numbers = store.snapshot.sources.numbers
        found.append(SplitRanges(numbers, len(shares), parts, np.arange(parts.size + 1)))
    return found


def _grown(stores: Sequence[BlockStore], shares: Sequence[Fraction], *, keep: bool) -> SplitRanges:
    """The splits of the last snapshot's sources."""
    last = stores[-1].snapshot
    digests = [each.snapshot.digest for each in stores]
    request = ["grown", VERSION, digests, [str(share) for share in shares], stores[-1].source_eods]
    stored = ComputedNumbers(last.store.folder, last.digest, request)
    num_counts = len(last.sources) * len(shares)
    # How many ranges each split has, and then those of all splits
    numbers = stored.find(np.dtype(np.int64))
    if numbers is None:
        names = last.sources.names
        found = [
            _find_ranges(stores, name, shares, i) for name in names for i in range(len(shares))
        ]
        rows = np.concatenate(found)
        numbers = np.concatenate([np.array([len(ranges) for ranges in found]), rows.view(np.int64)])
        if keep:
            stored.keep(numbers)
    edges = np.concatenate([[0], np.cumsum(numbers[:num_counts])])
    return SplitRanges(
        last.sources.numbers, len(shares), numbers[num_counts:].view(PART_DTYPE), edges
    )


def _find_ranges(
    stores: Sequence[BlockStore], name: str, shares: Sequence[Fraction], split: int
) -> Ranges:
    """The ranges of a split of a source in the last snapshot."""
    files = _trace_files([store for store in stores if _number(store, name) is not None], name)
    store = stores[-1]
    sizes = _cohort_sizes(files)
    low = sum(shares[:split], Fraction(0))
    high = sum(shares[: split + 1], Fraction(0))
    bounds = {cohort: (round(low * size), round(high * size)) for cohort, size in sizes.items()}
    documents = list[tuple[int, int]]()
    before = 0
    for file in files[-1]:
        first, stop = bounds[file.cohort]
        begin = max(first - file.first, 0)
        end = min(stop - file.first, file.size)
        if begin < end:
            if documents and documents[-1][1] == before + begin:
                documents[-1] = documents[-1][0], before + end
            else:
                documents.append((before + begin, before + end))
        before += file.size
    if not documents:
        return np.zeros(1, PART_DTYPE)
    source = _number(store, name)
    assert source is not None
    edges = _file_edges(store, source)
    borders = [
        tuple(edges.get(each) or find_document(store, source, each) for each in pair)
        for pair in documents
    ]
    return cut_documents(store, source, documents, borders)  # type: ignore[arg-type]


def _trace_files(stores: Sequence[BlockStore], name: str) -> list[list[_Documents]]:
    """The files of a source in each of the snapshots that have it."""
    known = dict[str, list[_Documents]]()
    found = list[list[_Documents]]()
    for cohort, store in enumerate(stores):
        source = _number(store, name)
        assert source is not None
        entry = store.snapshot.sources[source]
        listed = list[_Documents]()
        total = 0
        left = {key: list(files) for key, files in known.items()}
        for key, count in zip(
            store.snapshot.files.keys(entry), _count_documents(store, source), strict=True
        ):
            if left.get(key):
                listed.append(left[key].pop(0))
                continue
            listed.append(_Documents(cohort, total, count))
            known.setdefault(key, []).append(listed[-1])
            total += count
        found.append(listed)
    return found


def _cohort_sizes(files: Sequence[Sequence[_Documents]]) -> dict[int, int]:
    """Documents of each cohort."""
    distinct = sorted({file for listed in files for file in listed})
    return {
        cohort: sum(file.size for file in each)
        for cohort, each in groupby(distinct, lambda file: file.cohort)
    }


def _count_documents(store: BlockStore, source: int) -> list[int]:
    """Documents of each file of a source."""
    snapshot = store.snapshot
    entry = store.snapshot.sources[source]
    return [snapshot.file(number).rows for number in entry.files]


def _file_edges(store: BlockStore, source: int) -> dict[int, tuple[int, int]]:
    """Where the documents begin with which files begin, by number in the source:
    known without reading blocks."""
    snapshot = store.snapshot
    entry = store.snapshot.sources[source]
    edges = dict[int, tuple[int, int]]()
    before = 0
    for number in entry.files:
        file = snapshot.file(number)
        edges.setdefault(before, (file.first_block, 0))
        before += file.rows
    return edges


def _number(store: BlockStore, name: str) -> int | None:
    return store.snapshot.sources.numbers.get(name)
