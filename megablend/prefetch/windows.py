"""Divide the coming reads of a loader into windows whose blocks fit into memory.

A *window* is a range of steps (of one loader, or of one of its workers) whose distinct blocks are
all in memory at the same time, and are read once each. After its window, a block is kept if the
next window uses it, or if some of its tokens have not been used yet: the lane that uses them will
continue there, perhaps several windows later. If memory runs out, the blocks that have not been
used for the longest time are dropped first. (In document order, no block is kept for its unused
tokens.)

A long window reads many blocks of a file together and costs less to plan. The first windows are
short, so that the first step is ready soon. A window takes up to half of the memory for blocks. The
other half is for reading ahead and for blocks that are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.errors import ConfigError
from megablend.prefetch.memory_budget import BlockNeed, Budget, format_bytes, least_memory
from megablend.prefetch.read_schedule import (
    ReadSchedule,
    StepSequence,
    locate_steps,
    schedule_reads,
)
from megablend.run.run import Run

FIRST_SAMPLES = 1 << 8
"""Number of samples in the first window. The first step has to wait for all of them to be planned,
so they are few; each window is twice as long as the previous one."""
WINDOW_SAMPLES = 1 << 14
"""Maximum number of samples in a window."""
_SPAN_BYTES = 640
"""Bytes of memory for planning, per span of a window. This covers three windows that exist at the
same time, and the arrays from which one of them is made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A read schedule whose blocks are all in memory at the same time."""

    schedule: ReadSchedule
    reads: Int64s
    """int64 [...], indices in `schedule.ids` of the blocks to read, by first use; the other blocks
    are already in memory."""
    keeps: npt.NDArray[np.bool_]
    """bool [num_blocks], whether each block is kept after the last step of the window that uses
    it."""
    forgets: Int64s
    """int64 [...], numbers of the blocks of earlier windows that are dropped when this window
    begins."""
    max_bytes: int
    """Limit for blocks in memory, including those being read, during this window's reads."""


def plan_windows(
    run: Run, sequence: StepSequence, budget: Budget, first_samples: int = FIRST_SAMPLES
) -> Iterator[Window]:
    """Plan the windows in which a process reads its coming steps.
    Raises: ConfigError if memory is too small."""
    return make_windows(run, make_schedules(run, sequence, budget, first_samples), budget)


def make_schedules(
    run: Run, sequence: StepSequence, budget: Budget, first_samples: int = FIRST_SAMPLES
) -> Iterator[ReadSchedule]:
    """Divide all steps into schedules whose blocks take up to half of the memory for blocks. A
    schedule of a single step may take all of this memory.

    Raises: ConfigError if the blocks of a single step take more.
    """
    plannable_spans = budget.planning / _SPAN_BYTES
    num_samples = min(first_samples, int(plannable_spans / _estimate_spans_per_sample(run)))
    step = 0
    while True:
        num_steps = max(1, num_samples // sequence.micro_batch_size)
        samples, step_offsets = sequence.samples(step, num_steps)
        if not len(samples):
            return
        located = locate_steps(run, samples, step_offsets)
        schedule = schedule_reads(run, located)
        plannable_samples = int(plannable_spans * len(samples) / len(schedule.span_blocks))
        num_samples = min(2 * num_samples, WINDOW_SAMPLES, plannable_samples)
        num_fitting = _count_fitting_steps(schedule, _block_budget(schedule, budget) // 2)
        if num_fitting < schedule.num_steps:
            schedule = schedule_reads(run, located.until(num_fitting))
            # Samples that do not fit were located in vain: the next window may be longer by a few
            # steps
            num_samples = min(num_samples, len(schedule.samples) + len(schedule.samples) // 16)
        need = _need_at_once(schedule)
        if not need.fits(budget):
            raise refuse_step(run, schedule, budget, least_memory(run, need, budget))
        yield schedule
        step += schedule.num_steps


def _estimate_spans_per_sample(run: Run) -> float:
    """Estimate the mean number of blocks that contain a sample's tokens."""
    num_blocks = int((run.data.parts["stop_block"] - run.data.parts["first_block"]).sum())
    return 1 + run.sequence_length * num_blocks / max(1, int(run.data.parts["tokens"].sum()))


def _count_fitting_steps(schedule: ReadSchedule, max_bytes: int) -> int:
    """Return the number of first steps whose blocks together take at most `max_bytes`; at least
    1."""
    by_first_use = np.argsort(schedule.first_use, kind="stable")
    totals = np.cumsum(schedule.sizes[by_first_use])
    num_blocks = int(np.searchsorted(totals, max_bytes, side="right"))
    if num_blocks == len(totals):
        return schedule.num_steps
    return max(1, int(schedule.first_use[by_first_use[num_blocks]]))


def _need_at_once(schedule: ReadSchedule) -> BlockNeed:
    """Return the memory that a schedule's blocks need if all are in memory at the same time."""
    size = int(schedule.sizes.sum())
    return BlockNeed(size, size + int(schedule.reading.max()))


def refuse_step(run: Run, schedule: ReadSchedule, budget: Budget, least: int) -> ConfigError:
    """Return an error for a step whose blocks do not fit into memory. It says that a `memory` of
    `least` bytes would be enough."""
    largest = int(schedule.reading.argmax())
    number = int(run.store.snapshot.file_of(schedule.ids[largest : largest + 1])[0])
    return ConfigError(
        f"memory: found {format_bytes(run.runtime.memory)}, expected {format_bytes(least, up=True)} or more "
        f"(blocks of a step of {len(schedule.samples)} samples: {format_bytes(schedule.sizes.sum())}, reading the "
        f"largest, of {run.store.snapshot.path(number, run.store.roots)}: {format_bytes(schedule.reading[largest])}, "
        f"batches and block orders: {format_bytes(budget.batches + budget.orders)}); raise `memory`, or lower "
        "`micro_batch_size`"
    )


def _block_budget(schedule: ReadSchedule, budget: Budget) -> int:
    """Return the number of bytes for blocks while those of a schedule are read. It is less than
    usual if reading the largest block exceeds the memory for reads."""
    return budget.blocks - max(0, int(schedule.reading.max()) - budget.reads)


def make_windows(run: Run, schedules: Iterator[ReadSchedule], budget: Budget) -> Iterator[Window]:
    """Decide which blocks to read for each schedule and which to keep after it, so that both fit
    into the memory for blocks together."""
    nothing = np.zeros(0, np.int64)
    kept = _KeptBlocks(nothing, nothing, nothing, nothing, nothing)
    for number, (now, after) in enumerate(pairwise(chain(schedules, [None]))):
        assert now is not None
        max_bytes = _block_budget(now, budget)
        reads = np.flatnonzero(~np.isin(now.ids, kept.ids))
        reads = reads[np.argsort(now.first_use[reads], kind="stable")]
        forgets, kept = kept.drop_oldest(now, max_bytes)
        kept = kept.with_used(now, number)
        is_kept = np.zeros(len(kept.ids), np.bool_)
        if after is not None:
            is_kept |= np.isin(kept.ids, after.ids)
        # In document order, a block may be needed again at any time, so the memory is better used
        # for reading ahead
        if run.consumes_whole_blocks:
            is_kept |= kept.used < run.store.num_tokens(kept.ids)
            is_kept |= kept.pending_boundary_tokens > 0
        kept = kept.select(is_kept)
        keeps = np.isin(now.ids, kept.ids)
        yield Window(schedule=now, reads=reads, keeps=keeps, forgets=forgets, max_bytes=max_bytes)


class _KeptBlocks(NamedTuple):
    """Blocks that are kept between windows. The fields are arrays of int64 [n]."""

    ids: Int64s
    """Numbers of the blocks in the index, ascending."""
    sizes: Int64s
    """Bytes that each block takes in memory."""
    used: Int64s
    """Number of tokens of each block that samples have used."""
    pending_boundary_tokens: Int64s
    """See ReadSchedule; the sum over all windows."""
    last_window: Int64s
    """Number of the last window that used each block."""

    def select(self, mask: npt.NDArray[np.bool_]) -> _KeptBlocks:
        """Return the blocks where `mask`, bool [n], is true."""
        return _KeptBlocks(*(column[mask] for column in self))

    def drop_oldest(self, now: ReadSchedule, max_bytes: int) -> tuple[Int64s, _KeptBlocks]:
        """Drop the blocks that do not fit into memory together with those of a window, starting
        with the blocks that have not been used for the longest time.

        Returns: the numbers of the dropped blocks, int64 [...]; and the remaining blocks.
        """
        is_needed = np.isin(self.ids, now.ids)
        available = max_bytes - int(now.sizes.sum())
        newest_first = np.lexsort((-self.last_window, ~is_needed))
        totals = np.cumsum(np.where(is_needed, 0, self.sizes)[newest_first])
        is_dropped = np.zeros(len(self.ids), np.bool_)
        is_dropped[newest_first] = totals > available
        is_dropped &= ~is_needed
        return self.ids[is_dropped], self.select(~is_dropped)

    def with_used(self, now: ReadSchedule, number: int) -> _KeptBlocks:
        """Return these blocks and those of window `number`. The tokens that the window uses are
        added to `used`."""
        ids = np.union1d(self.ids, now.ids)
        old = np.searchsorted(ids, self.ids)
        new = np.searchsorted(ids, now.ids)
        sizes, used, pending, last_window = (np.zeros(len(ids), np.int64) for _ in range(4))
        sizes[old] = self.sizes
        used[old] = self.used
        pending[old] = self.pending_boundary_tokens
        last_window[old] = self.last_window
        sizes[new] = now.sizes
        used[new] += now.used
        pending[new] += now.pending_boundary_tokens
        last_window[new] = number
        return _KeptBlocks(ids, sizes, used, pending, last_window)
