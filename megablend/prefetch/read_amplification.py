"""Compute the read amplification without reading: the stored bytes that all processes read, divided
by the stored bytes of the blocks that they use.

In document order, which reads single documents out of blocks, only part of a block counts as used,
in proportion to its tokens that are used. A dictionary counts as read whenever it is no longer
cached, and as used once. Reads that open files are not counted.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.prefetch.memory_budget import batches_of, plan_budget
from megablend.prefetch.read_schedule import ReadSchedule, StepSequence
from megablend.prefetch.windows import plan_windows
from megablend.run.run import Run


def read_amplification(
    run: Run,
    *,
    micro_batch_size: int,
    data_parallel_size: int,
    num_workers: int,
    first: int,
    stop: int,
) -> float:
    """Compute the read amplification of samples [first, stop).

    Args:
        micro_batch_size: samples per step of a rank.
        data_parallel_size: number of ranks.
        num_workers: loader workers per rank; 0 if the rank's own process reads.

    Raises: ConfigError if memory is too small.
    """
    future = StepSequence(
        first=first,
        micro_batch_size=micro_batch_size,
        stride=micro_batch_size * data_parallel_size * max(1, num_workers),
        stop=stop,
    )
    budget = plan_budget(
        run, micro_batch_size=micro_batch_size, num_batches=batches_of(num_workers)
    )
    read_bytes = 0
    useful_bytes = 0.0
    used_blocks = list[Int64s]()  # for each window, [2, num_blocks]: epochs and blocks
    all_dictionaries: dict[int, int] = {}
    for begin in future.begins:
        dictionaries = Dictionaries(budget.dictionaries)
        for window in plan_windows(run, replace(future, first=begin), budget):
            schedule = window.schedule
            read_bytes += _sum_stored(run, schedule.ids[window.reads])
            numbers, sizes = run.store.dictionaries(_list_in_order(run, schedule, window.reads))
            read_bytes += dictionaries.read(numbers, sizes)
            if run.consumes_whole_blocks:
                # A block that several windows use in an epoch counts once: the windows' blocks are
                # merged below
                spans = schedule.spans
                used_blocks.append(np.unique(np.stack([spans.epochs, spans.blocks]), axis=1))
            else:
                used_parts = schedule.used / run.store.num_tokens(schedule.ids)
                useful_bytes += float(_stored_sizes(run, schedule.ids) @ used_parts)
        all_dictionaries |= dictionaries.seen
    if used_blocks:
        _, blocks = np.unique(np.concatenate(used_blocks, axis=1), axis=1)
        useful_bytes = _sum_stored(run, blocks)
    return read_bytes / (useful_bytes + sum(all_dictionaries.values()))


class Dictionaries:
    """A simulation of the dictionary cache (megablend.formats.parquet.decoding.dictionaries).

    Args:
        max_bytes: maximum size of the cached dictionaries, in stored bytes; a single one may exceed
            it.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[int, int] = OrderedDict()
        self._bytes = 0
        self.seen: dict[int, int] = {}
        """Stored bytes of each requested dictionary, by number."""
        self.num_read = 0
        """Number of times that dictionaries were read."""

    def resize(self, max_bytes: int) -> None:
        """Change the limit."""
        self._max_bytes = max_bytes

    def read(self, numbers: Int64s, sizes: Int64s) -> int:
        """Request dictionaries one after another. Return the stored bytes of those that are not
        cached, and so are read.

        Args:
            numbers: int64 [n], numbers of the dictionaries.
            sizes: int64 [n], stored bytes of each dictionary; 0 stands for no dictionary.
        """
        total = 0
        # Repeated requests for the same dictionary change nothing
        changes = np.flatnonzero(np.diff(numbers, prepend=-1) != 0)
        for number, size in zip(numbers[changes].tolist(), sizes[changes].tolist(), strict=True):
            if number in self._kept:
                self._kept.move_to_end(number)
            elif size:
                total += size
                self.num_read += 1
                self.seen[number] = size
                self._kept[number] = size
                self._bytes += size
                while self._bytes > self._max_bytes and len(self._kept) > 1:
                    _, evicted_size = self._kept.popitem(last=False)
                    self._bytes -= evicted_size
        return total


def _list_in_order(run: Run, schedule: ReadSchedule, reads: Int64s) -> Int64s:
    """List the blocks that a window reads, approximately in the order in which they are read: by
    file, then by first use (int64 [n])."""
    ids = schedule.ids[reads]
    return ids[np.argsort(run.store.snapshot.file_of(ids), kind="stable")]


def _sum_stored(run: Run, ids: Int64s) -> int:
    """Return the sum of the stored bytes of blocks."""
    return int(_stored_sizes(run, ids).sum(dtype=np.int64))


def _stored_sizes(run: Run, ids: Int64s) -> npt.NDArray[np.uint32]:
    """Return the stored bytes of each block, uint32 [n]."""
    stored: npt.NDArray[np.uint32] = run.store.snapshot.blocks(ids)["stored_bytes"]
    return stored
