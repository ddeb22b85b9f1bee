"""Splits of sources that grow between the snapshots of a run: documents of an earlier snapshot keep
their split, and the documents of new files are divided separately.

Files are recognised by their content. The files of a source that were added by the same snapshot
are a *cohort*. The documents of each cohort are divided by the shares, so a split of a later
snapshot consists of a range of documents of each cohort. Documents of files that no longer exist
are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megablend.arrays import running_totals
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
"""PART_DTYPE [num_ranges]: the ranges of a source's documents that belong to a split."""


@dataclass(frozen=True)
class SplitRanges:
    """The splits of all sources of a snapshot."""

    numbers: Mapping[str, int]
    """The number of each source, by its name."""
    num_splits: int
    rows: Ranges
    """The ranges of all splits of the first source, then those of the second source, and so on:
    PART_DTYPE [num_rows]."""
    edges: npt.NDArray[np.int64]
    """Index in `rows` at which the ranges of each source and split begin: int64 [num_sources *
    num_splits + 1]."""

    def ranges(self, source: int, split: int) -> Ranges:
        """Return the ranges of a source's documents that belong to a split, as a view of `rows`.
        The source is given by its number."""
        number = source * self.num_splits + split
        return self.rows[self.edges[number] : self.edges[number + 1]]

    def joined(self, sources: npt.NDArray[np.int64], split: int) -> Ranges:
        """Return one range for each source, from the start of its first range in a split to the end
        of its last range.

        Args:
            sources: int64 [n], numbers of the sources.

        Returns: PART_DTYPE [n].
        """
        splits = sources * self.num_splits + split
        starts = self.edges[splits]
        joined: Ranges = self.rows[starts]
        for i in np.flatnonzero(self.edges[splits + 1] - starts > 1).tolist():
            joined[i] = _merge(self.ranges(int(sources[i]), split))[0]
        return joined


def _merge(ranges: Ranges) -> Ranges:
    """Join ascending ranges into one, from the start of the first to the end of the last."""
    merged: Ranges = ranges[:1].copy()
    for name in ("stop_block", "keep"):
        merged[name] = ranges[name][-1]
    for name in ("documents", "tokens"):
        merged[name] = ranges[name].sum()
    return merged


class _Documents(NamedTuple):
    """The documents of a file."""

    cohort: int
    """Number of the snapshot in which the file first appeared."""
    first: int
    """Number of the file's first document within the cohort."""
    size: int
    """Number of the file's documents."""


def find_split_ranges(
    stores: Sequence[BlockStore], shares: Sequence[Fraction], *, keep: bool = False
) -> list[SplitRanges]:
    """Return the splits of all sources in each snapshot of a run, in order. They are read from the
    cache if a build stored them there, and computed otherwise.

    Args:
        stores: the stores of the snapshots, in the run's order.
        keep: whether to store computed splits in the cache.

    Raises: see `parts_of`.
    """
    splits = list[SplitRanges]()
    for number, store in enumerate(stores):
        is_first = number == 0
        # With a share of 1, every document is in the same split
        if is_first or max(shares) >= 1:
            parts = parts_of(store, shares, keep=keep).reshape(-1)
            numbers = store.snapshot.sources.numbers
            edges = np.arange(parts.size + 1)
            splits.append(SplitRanges(numbers, len(shares), parts, edges))
        else:
            splits.append(_split_later(stores[: number + 1], shares, keep=keep))
    return splits


def _split_later(
    stores: Sequence[BlockStore], shares: Sequence[Fraction], *, keep: bool
) -> SplitRanges:
    """Return the splits of the sources in the last of several snapshots."""
    last = stores[-1].snapshot
    digests = [store.snapshot.digest for store in stores]
    request = ["grown", VERSION, digests, [str(share) for share in shares], stores[-1].source_eods]
    stored = ComputedNumbers(last.store.folder, last.digest, request)
    num_counts = len(last.sources) * len(shares)
    # The number of ranges of each split, then the ranges of all splits
    numbers = stored.find(np.dtype(np.int64))
    if numbers is None:
        splits = [
            ranges for name in last.sources.names for ranges in _find_ranges(stores, name, shares)
        ]
        counts = np.array([len(ranges) for ranges in splits])
        numbers = np.concatenate([counts, np.concatenate(splits).view(np.int64)])
        if keep:
            stored.keep(numbers)
    edges = running_totals(numbers[:num_counts])
    rows = numbers[num_counts:].view(PART_DTYPE)
    return SplitRanges(last.sources.numbers, len(shares), rows, edges)


def _find_ranges(
    stores: Sequence[BlockStore], name: str, shares: Sequence[Fraction]
) -> Iterator[Ranges]:
    """Yield, for each split, the ranges of a source's documents in the last snapshot."""
    having = [store for store in stores if name in store.snapshot.sources.numbers]
    files, cohort_sizes = _trace_files(having, name)
    store = stores[-1]
    source = store.snapshot.sources.numbers[name]
    edges = _file_edges(store, source)
    for low, high in pairwise(accumulate(shares, initial=Fraction(0))):
        # In each cohort, the first document of the split and the document after the last one
        bounds = [(round(low * size), round(high * size)) for size in cohort_sizes]
        documents = _find_documents(files, bounds)
        borders = [
            tuple(
                edges.get(document) or find_document(store, source, document) for document in ends
            )
            for ends in documents
        ]
        if documents:
            yield cut_documents(store, source, documents, borders)  # type: ignore[arg-type]
        else:
            yield np.zeros(1, PART_DTYPE)


def _find_documents(
    files: Sequence[_Documents], bounds: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Return the ranges of documents in a split. Documents are numbered within the source.

    Args:
        files: the documents of each file of the source, in order.
        bounds: for each cohort, the first document of the split and the document after the last
            one.
    """
    documents = list[tuple[int, int]]()
    num_before = 0
    for file in files:
        first, stop = bounds[file.cohort]
        begin = max(first - file.first, 0)
        end = min(stop - file.first, file.size)
        if begin < end:
            continues_last = bool(documents) and documents[-1][1] == num_before + begin
            if continues_last:
                documents[-1] = documents[-1][0], num_before + end
            else:
                documents.append((num_before + begin, num_before + end))
        num_before += file.size
    return documents


def _trace_files(stores: Sequence[BlockStore], name: str) -> tuple[list[_Documents], list[int]]:
    """Return the documents of each of a source's files in the last snapshot, and the number of
    documents in each cohort. All snapshots must have the source."""
    files_of_key = dict[str, list[_Documents]]()
    cohort_sizes = list[int]()
    for cohort, store in enumerate(stores):
        snapshot = store.snapshot
        entry = snapshot.sources[snapshot.sources.numbers[name]]
        files = list[_Documents]()
        num_new = 0
        # Several files may have the same content: each file of an earlier snapshot is matched only
        # once
        unmatched = {key: list(earlier) for key, earlier in files_of_key.items()}
        for key, number in zip(snapshot.files.keys(entry), entry.files, strict=True):
            if unmatched.get(key):
                files.append(unmatched[key].pop(0))
                continue
            files.append(_Documents(cohort, num_new, snapshot.files.entry(number).rows))
            files_of_key.setdefault(key, []).append(files[-1])
            num_new += files[-1].size
        cohort_sizes.append(num_new)
    return files, cohort_sizes


def _file_edges(store: BlockStore, source: int) -> dict[int, tuple[int, int]]:
    """Return the position at which each file of a source begins, without reading blocks. The result
    is a dict: number of the file's first document in the source -> what `find_document` returns for
    that document."""
    snapshot = store.snapshot
    entry = snapshot.sources[source]
    edges = dict[int, tuple[int, int]]()
    num_before = 0
    for number in entry.files:
        file = snapshot.files.entry(number)
        edges.setdefault(num_before, (file.first_block, 0))
        num_before += file.rows
    return edges
