"""Ranges of bytes in files: requested, fetched, and merged into larger reads. Pure functions:
nothing is read here."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megablend.arrays import Int64s
from megablend.kernels.file_ranges import join_ranges
from megablend.storage.base import Bytes, ReadLimits


class FileRanges(NamedTuple):
    """Ranges of one file that are needed at the same time."""

    path: str
    offsets: Int64s
    """int64 [n], in bytes, in any order."""
    sizes: Int64s
    """int64 [n], in bytes."""
    owners: Int64s | None = None
    """int64 [n]: which block keeps a range's bytes after decoding. Ranges of different owners are
    in separate memory, so that one block does not keep another's bytes alive. None if the bytes are
    released after decoding."""
    is_shared: bool = False
    """Other blocks in flight are likely to need exactly the same ranges: they are fetched once for
    all."""


@dataclass(slots=True)  # frozen, each would take twice as long to make
class FetchedRanges:
    """The bytes of ranges of one file, in one or several buffers."""

    ranges: FileRanges
    """The requested ranges."""
    buffers: list[Bytes]
    """uint8 [...] each, which contain the ranges; a single one if the ranges have no owners."""
    buffer_of: Int64s
    """int64 [n], for each range the buffer that contains it."""
    begins: Int64s
    """int64 [n], where each range begins in its buffer."""

    def __getitem__(self, i: int) -> Bytes:
        """Return bytes of range i: uint8 [size], not copied."""
        begin = int(self.begins[i])
        return self.buffers[int(self.buffer_of[i])][begin : begin + int(self.ranges.sizes[i])]

    def __len__(self) -> int:
        return len(self.begins)


class MergedRanges(NamedTuple):
    """Ranges that are read together."""

    starts: Int64s
    """int64 [num_runs], first byte of each run, ascending."""
    stops: Int64s
    """int64 [num_runs], the byte after each run's last."""
    runs: Int64s
    """int64 [n], the run that each range is in."""


def merge_ranges(
    offsets: Int64s, sizes: Int64s, limits: ReadLimits, loads: Int64s | None = None
) -> MergedRanges:
    """Merge ranges with at most `max_gap_bytes` between them, up to `max_merged_bytes` in total.

    Args:
        offsets, sizes: int64 [n], in bytes, in any order.
        limits: those of the storage.
        loads: int64 [n], what each range counts towards `max_merged_bytes`; its size if absent.
    """
    order = None
    loads = sizes if loads is None else loads
    if (offsets[1:] < offsets[:-1]).any():
        order = np.argsort(offsets, kind="stable")
        offsets = offsets[order]
        sizes = sizes[order]
        loads = loads[order]
    joined = np.empty((3, len(offsets)), np.int64)
    num_runs = join_ranges(
        offsets, sizes, loads, limits.max_gap_bytes, limits.max_merged_bytes, joined
    )
    starts, stops, runs = joined
    if order is not None:
        runs = np.empty(len(order), np.int64)
        runs[order] = joined[2]
    return MergedRanges(starts[:num_runs], stops[:num_runs], runs)


def portions(sizes: Int64s, max_bytes: int) -> list[slice]:
    """Split items of `sizes` int64 [n] into consecutive batches
    of about `max_bytes`, or one larger item."""
    total = sizes.cumsum(dtype=np.int64)
    if len(total) and total[-1] <= max_bytes:
        return [slice(0, len(total))]
    numbers = (total - 1) // max_bytes
    bounds = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(sizes)]
    return [slice(begin, end) for begin, end in itertools.pairwise(bounds) if end > begin]
