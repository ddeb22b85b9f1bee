"""What is read and decoded together: some blocks of a window, of a file or of several."""

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
"""Decoded bytes of the blocks that are read and decoded together, or one block; less where memory
is scarce."""
READS_AHEAD = 16
"""The fewest reads per window, so that threads can share even a short one."""
RangeKey = tuple[str, int]
"""Path and offset of a range that several reads need."""


@dataclass(slots=True, eq=False)
class Read:
    """Blocks that are read together, from plan to decoded blocks."""

    indices: Int64s
    """int64 [n], into `ids` of their window's schedule, ascending."""
    ids: Int64s
    """int64 [n], their numbers in the index, ascending."""
    rows: Array
    """PLACED_BLOCK_DTYPE [n], their rows of the block table."""
    size: int
    """Bytes that they take in memory."""
    reading: int
    """Additional bytes needed while they are read."""
    first_use: int
    """Step of the window that first uses one of them."""
    file: int
    """Number of the file of the first of them; of all where storages do not answer at once."""
    dictionaries: tuple[int, int] = (0, 0)
    """How many dictionaries are read with them, and their bytes, where it is planned what a run
    requests."""
    blocks: Future[DecodedBlocks | None] = field(default_factory=Future)
    """The blocks, once the read was submitted; None where the interpreter is shutting down."""
    file_reads: list[FileRead] = field(default_factory=list)
    """What is fetched of each file, while it is in flight."""
    shared: list[RangeKey] = field(default_factory=list)
    """Ranges that it fetches for other reads as well."""


def split_reads(run: Run, window: Window, budget: Budget) -> list[Read]:
    """Split a window's blocks into reads, by first use.

    Blocks of one file that are used after each other make a portion. If storages answer at once,
    as local disks do, portions of several files are read together, since a read costs more than a
    file of it; elsewhere a read waits for its slowest request.
    """
    now = window.schedule
    files = run.store.snapshot.file_of(now.ids[window.reads])
    most = max(1, min(READ_BYTES, budget.reads // 8))
    read_bytes = max(1, min(most, int(now.sizes[window.reads].sum()) // READS_AHEAD))
    order = np.argsort(files, kind="stable")  # within a file they remain sorted by first use
    indices = window.reads[order]
    files = files[order]
    total = np.cumsum(now.sizes[indices])
    begins = np.diff(files, prepend=-1) != 0
    # Bytes of the files in front
    before = np.maximum.accumulate(np.where(begins, total - now.sizes[indices], 0))
    edges = begins | (np.diff((total - before - 1) // read_bytes, prepend=-1) != 0)
    firsts = np.flatnonzero(edges)
    portions = [indices[start:stop] for start, stop in pairwise([*firsts.tolist(), len(indices)])]
    sizes = np.add.reduceat(now.sizes[indices], firsts) if len(firsts) else firsts
    found = list[Read]()
    together = list[Int64s]()
    size = 0
    for i in np.argsort(now.first_use[indices[firsts]], kind="stable").tolist():
        if together and (size + sizes[i] > read_bytes or not run.store.is_synchronous):
            found.append(_read_of(run, window, together))
            together = []
            size = 0
        together.append(portions[i])
        size += int(sizes[i])
    return [*found, _read_of(run, window, together)] if together else found


def _read_of(run: Run, window: Window, portions: list[Int64s]) -> Read:
    """The read of these blocks, by their indices in a window's schedule."""
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
