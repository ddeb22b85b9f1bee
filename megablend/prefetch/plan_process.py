"""Plan the windows and the reads of one process of a run's loaders, without reading."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megablend.arrays import Int64s
from megablend.prefetch.memory_budget import plan_budget
from megablend.prefetch.read_schedule import StepSequence
from megablend.prefetch.reads import Read, split_reads
from megablend.prefetch.windows import FIRST_SAMPLES, Window, plan_windows
from megablend.run.run import Run


@dataclass(frozen=True, slots=True, eq=False)
class PlannedRead:
    """A read that loaders will make."""

    read: Read
    num_dictionaries: int
    """Number of dictionaries that are read along with the blocks, because they are not cached at
    that time."""
    dictionary_bytes: int
    """Stored bytes of these dictionaries."""

    @property
    def stored_bytes(self) -> int:
        """Stored size of the blocks in bytes."""
        return int(self.read.rows["stored_bytes"].sum(dtype=np.int64))


def plan_process(
    run: Run,
    sequence: StepSequence,
    begin: int,
    num_batches: int,
    first_samples: int = FIRST_SAMPLES,
) -> Iterator[tuple[Run, Window, list[PlannedRead]]]:
    """Plan the windows of a process from sample `begin` on.

    Args:
        sequence: the size of a step, its distance from the next one, and the end of the run.
        begin: the first sample of a step of the process.
        num_batches: see `plan_budget`.
        first_samples: number of samples in the first window of each section.

    Returns: for each window, a view of the run in its section, the window, and its reads.
    Raises: ConfigError if memory is too small.
    """
    dictionaries = _Dictionaries()
    for section in run.sections:
        view = run.view(section)
        budget = plan_budget(
            view, micro_batch_size=sequence.micro_batch_size, num_batches=num_batches
        )
        dictionaries.max_bytes = budget.dictionaries
        for window in plan_windows(view, sequence.within(section, begin), budget, first_samples):
            numbers, sizes = view.store.dictionaries(window.schedule.ids)
            reads = list[PlannedRead]()
            for read in split_reads(view, window, budget):
                num_before = dictionaries.num_read
                size = dictionaries.read(numbers[read.indices], sizes[read.indices])
                reads.append(PlannedRead(read, dictionaries.num_read - num_before, size))
            yield view, window, reads


class _Dictionaries:
    """A simulation of the dictionary cache (megablend.formats.parquet.decoding.dictionaries)."""

    def __init__(self) -> None:
        self.max_bytes = 0
        """Maximum size of the cached dictionaries, in stored bytes; a single one may exceed it."""
        self._kept: OrderedDict[int, int] = OrderedDict()
        self._bytes = 0
        self.num_read = 0
        """Number of times that dictionaries were read."""

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
                self._kept[number] = size
                self._bytes += size
                while self._bytes > self.max_bytes and len(self._kept) > 1:
                    _, evicted_size = self._kept.popitem(last=False)
                    self._bytes -= evicted_size
        return total
