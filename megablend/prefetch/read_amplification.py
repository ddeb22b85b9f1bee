"""Read amplification, computed without reading: stored bytes that all processes read / stored bytes
of the blocks used.

In document order, which reads single documents out of blocks, a block counts as used in proportion
to its tokens used. Dictionaries count as read whenever they are no longer cached, and as used once.
Reads to open files are not counted.
"""

from __future__ import annotations

from collections import OrderedDict

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
        num_workers: loader workers per rank; 0 reads in the rank's own process.

    Raises: ConfigError if memory is too small.
    """
    step_samples = micro_batch_size * data_parallel_size
    processes = max(1, num_workers)
    stride = step_samples * processes
    budget = plan_budget(
        run, micro_batch_size=micro_batch_size, num_batches=batches_of(num_workers)
    )
    read = 0
    useful = 0.0
    used = list[Int64s]()
    all_dictionaries: dict[int, int] = {}
    for begin in range(first, min(first + stride, stop), micro_batch_size):
        future = StepSequence(
            first=begin, micro_batch_size=micro_batch_size, stride=stride, stop=stop
        )
        dictionaries = Dictionaries(budget.dictionaries)
        for window in plan_windows(run, future, budget):
            schedule = window.schedule
            read += _sum_stored(run, schedule.ids[window.reads])
            read += dictionaries.read(
                *run.store.dictionaries(_in_reading_order(run, schedule, window.reads))
            )
            if not run.consumes_whole_blocks:
                used_parts = schedule.used / run.store.num_tokens(schedule.ids)
                useful += float(_stored_sizes(run, schedule.ids) @ used_parts)
            else:
                # A block that several windows use counts once: they are joined below
                used.append(
                    np.unique(np.stack([schedule.spans.epochs, schedule.spans.blocks]), axis=1)
                )
        all_dictionaries |= dictionaries.seen
    if used:
        _, blocks = np.unique(np.concatenate(used, axis=1), axis=1)
        useful = _sum_stored(run, blocks)
    return read / (useful + sum(all_dictionaries.values()))


class Dictionaries:
    """Simulates the least-recently-used cache of megablend.formats.parquet.decoding.dictionaries.

    Args:
        max_bytes: limit for the cached dictionaries, in stored bytes; a single one may exceed it.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[int, int] = OrderedDict()
        self._bytes = 0
        self.seen: dict[int, int] = {}
        """Stored bytes of each requested dictionary, by number."""
        self.num_read = 0

    def resize(self, max_bytes: int) -> None:
        """Change the limit."""
        self._max_bytes = max_bytes

    def read(self, numbers: Int64s, sizes: Int64s) -> int:
        """Bytes read when dictionaries with these numbers and sizes, int64 [n] each, are requested
        in turn; size 0: none."""
        total = 0
        changes = np.flatnonzero(np.diff(numbers, prepend=-1) != 0)
        for number, size in zip(numbers[changes].tolist(), sizes[changes].tolist(), strict=True):
            if number in self._kept:
                self._kept.move_to_end(number)
            elif size:
                total += size
                self.num_read += 1
                self.seen[number] = self._kept[number] = size
                self._bytes += size
                while self._bytes > self._max_bytes and len(self._kept) > 1:
                    self._bytes -= self._kept.popitem(last=False)[1]
        return total


def _in_reading_order(run: Run, schedule: ReadSchedule, reads: Int64s) -> Int64s:
    """The blocks that a window reads, approximately in the order in which they are read: by file,
    then by first use."""
    ids = schedule.ids[reads]
    return ids[np.argsort(run.store.snapshot.file_of(ids), kind="stable")]


def _sum_stored(run: Run, ids: Int64s) -> int:
    """Stored bytes of blocks in all."""
    return int(_stored_sizes(run, ids).sum(dtype=np.int64))


def _stored_sizes(run: Run, ids: Int64s) -> npt.NDArray[np.uint32]:
    """Stored bytes of each block, uint32 [n]."""
    stored: npt.NDArray[np.uint32] = run.store.snapshot.blocks(ids)["stored_bytes"]
    return stored
