"""Divide the blocks of a window into reads: blocks that are read and decoded together."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from megablend.arrays import Int64s
from megablend.formats.base import Array
from megablend.formats.decoded import DecodedBlocks
from megablend.formats.fetch import FileRead
from megablend.prefetch.memory_budget import Budget
from megablend.prefetch.windows import Window
from megablend.run.run import Run

READ_BYTES = 4 << 20
"""Maximum number of decoded bytes in one read, unless a single block has more."""
LEAST_READ_BYTES = 256 << 10
"""Files that respond at once are read in portions of at least this size, even if the window is so
short that threads then do not all take part: starting a read costs more than decoding less."""
READS_AHEAD = 16
"""Approximate minimum number of reads in a longer window, so that threads can share it."""
_MEMORY_PART = 8
"""A read takes at most 1 / _MEMORY_PART of the memory for reads, so that several reads are in
flight even if memory is scarce."""
RangeKey = tuple[str, int]
"""Path and offset of a range that several reads need."""


@dataclass(slots=True, eq=False)
class Read:
    """A read of blocks of one or more files, and its progress."""

    indices: Int64s
    """int64 [n], indices of the blocks in `ids` of the window's schedule, ascending."""
    ids: Int64s
    """int64 [n], numbers of the blocks in the index, ascending."""
    rows: Array
    """PLACED_BLOCK_DTYPE [n], rows of the blocks in the block table."""
    size: int
    """Bytes that the blocks take in memory."""
    reading: int
    """Additional bytes that are needed while the blocks are read."""
    first_use: int
    """The first step of the window that uses one of the blocks."""
    file: int
    """Number of the first block's file. If storages do not respond at once, all blocks are in this
    file."""
    blocks: Future[DecodedBlocks | None] = field(default_factory=Future)
    """A future of the decoded blocks; its result is None if the interpreter is shutting down."""
    file_reads: list[FileRead] = field(default_factory=list)
    """The reads of single files, while this read is in flight."""
    shared: list[RangeKey] = field(default_factory=list)
    """Ranges that this read fetches for other reads as well."""


def split_reads(run: Run, window: Window, budget: Budget) -> list[Read]:
    """Split a window's blocks into reads, by first use.

    If storages respond at once, as local disks do, portions of several files are read together,
    since adding a file to a read costs less than another read. Otherwise each read has one portion,
    since a read has to wait for its slowest request.
    """
    sizes = window.schedule.sizes
    window_bytes = int(sizes[window.reads].sum())
    least_bytes = LEAST_READ_BYTES if run.store.is_synchronous else 1
    read_bytes = min(READ_BYTES, max(least_bytes, window_bytes // READS_AHEAD))
    read_bytes = max(1, min(read_bytes, budget.reads // _MEMORY_PART))
    reads = list[Read]()
    together = list[Int64s]()
    num_bytes = 0
    for portion in _split_files(run, window, read_bytes):
        portion_bytes = int(sizes[portion].sum())
        is_full = num_bytes + portion_bytes > read_bytes
        if together and (is_full or not run.store.is_synchronous):
            reads.append(_make_read(run, window, together))
            together = []
            num_bytes = 0
        together.append(portion)
        num_bytes += portion_bytes
    if together:
        reads.append(_make_read(run, window, together))
    return reads


def _split_files(run: Run, window: Window, max_bytes: int) -> list[Int64s]:
    """Split the blocks that a window reads into portions of at most about `max_bytes`. Each portion
    is in one file, and portions are ordered by first use.

    Returns: for each portion, the indices of its blocks in `ids` of the window's schedule, by first
        use (int64 [n]).
    """
    now = window.schedule
    files = run.store.snapshot.file_of(now.ids[window.reads])
    by_file = np.argsort(files, kind="stable")  # within a file they remain sorted by first use
    indices = window.reads[by_file]
    files = files[by_file]
    sizes = now.sizes[indices]
    totals = np.cumsum(sizes)
    begins_file = np.diff(files, prepend=-1) != 0
    bytes_of_files_before = np.maximum.accumulate(np.where(begins_file, totals - sizes, 0))
    # Number of the portion within its file
    portion_numbers = (totals - bytes_of_files_before - 1) // max_bytes
    begins_portion = begins_file | (np.diff(portion_numbers, prepend=-1) != 0)
    bounds = [*np.flatnonzero(begins_portion).tolist(), len(indices)]
    portions = [indices[start:stop] for start, stop in pairwise(bounds)]
    return sorted(portions, key=lambda portion: int(now.first_use[portion[0]]))


def _make_read(run: Run, window: Window, portions: list[Int64s]) -> Read:
    """Make the read of the blocks of portions; the first portion is the one that is used first."""
    now = window.schedule
    indices = np.sort(np.concatenate(portions))
    return Read(
        indices=indices,
        ids=now.ids[indices],
        rows=now.rows[indices],
        size=int(now.sizes[indices].sum()),
        reading=int(now.reading[indices].sum()),
        first_use=int(now.first_use[portions[0][0]]),
        file=int(run.store.snapshot.file_of(now.ids[indices[:1]])[0]),
    )
