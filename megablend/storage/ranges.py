"""Ranges of bytes in files: requested ranges, fetched ranges, and ranges merged into larger reads.
This module reads nothing."""

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
    """The offset of each range in bytes, in any order (int64 [n])."""
    sizes: Int64s
    """The size of each range in bytes (int64 [n])."""
    owners: Int64s | None = None
    """The number of the block that keeps each range's bytes after decoding (int64 [n]); None if the
    bytes are released after decoding. Ranges of different owners are in separate memory, so that
    one block does not keep another's bytes alive."""
    is_shared: bool = False
    """Whether other blocks in flight are likely to need exactly the same ranges. If so, the ranges
    are fetched once for all blocks."""


@dataclass(slots=True)  # not frozen, which would double the time to make one
class FetchedRanges:
    """The bytes of ranges of one file, in one or several buffers."""

    ranges: FileRanges
    """The requested ranges."""
    buffers: list[Bytes]
    """Arrays that contain the ranges (uint8); only one array if the ranges have no owners."""
    buffer_of: Int64s
    """The number of the buffer that contains each range (int64 [n])."""
    begins: Int64s
    """The offset in its buffer at which each range starts (int64 [n])."""

    def __getitem__(self, i: int) -> Bytes:
        """Return the bytes of range i, without a copy (uint8 [size])."""
        begin = int(self.begins[i])
        return self.buffers[int(self.buffer_of[i])][begin : begin + int(self.ranges.sizes[i])]


class MergedRanges(NamedTuple):
    """Ranges that are merged into runs. Each run is read at once."""

    starts: Int64s
    """The offset of the first byte of each run, ascending (int64 [num_runs])."""
    stops: Int64s
    """The offset after the last byte of each run (int64 [num_runs])."""
    runs: Int64s
    """The number of the run that contains each range (int64 [n])."""


def merge_ranges(
    offsets: Int64s, sizes: Int64s, limits: ReadLimits, loads: Int64s | None = None
) -> MergedRanges:
    """Merge ranges with at most `max_gap_bytes` between them into runs of up to `max_merged_bytes`.

    Args:
        offsets, sizes: the offset and size of each range in bytes, in any order (int64 [n]).
        limits: the limits of the storage.
        loads: the number of bytes with which each range counts towards `max_merged_bytes` (int64
            [n]); None to count its size.
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
    """Split a sequence of items into consecutive portions of about `max_bytes`. A larger item is a
    portion of its own.

    Args:
        sizes: the size of each item in bytes (int64 [n]).

    Returns: the slice of the items in each portion.
    """
    ends = sizes.cumsum(dtype=np.int64)
    if len(ends) and ends[-1] <= max_bytes:
        return [slice(0, len(ends))]
    numbers = (ends - 1) // max_bytes  # number of the portion in which each item ends
    bounds = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(sizes)]
    return [slice(begin, end) for begin, end in itertools.pairwise(bounds) if end > begin]
