"""What a loader will read, divided into windows whose blocks fit into memory.

A *window* is a range of steps (of one loader, or of one of its workers) whose distinct blocks are
all in memory at once, each read once. A block is kept after its window if the next window uses it,
or if some of its tokens are still unused: its lane will continue there, perhaps several windows
later. If memory runs out, blocks that have been unused the longest are dropped first. (In document
order no block is kept for its unused tokens.)

Long windows read many blocks of a file together and cost less to plan; the first ones are short, so
that the first step is ready soon. A window takes up to half of the memory for blocks: the other
half is for reading ahead and for blocks that are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, pairwise

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
WINDOW_SAMPLES = 1 << 14
"""Samples of the first and of the longest window; each window is twice as long as the previous
one."""
STRETCH_BYTES = 640
"""Memory for planning per span of a window: three windows exist at once, and the arrays from which
one is made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A read schedule whose blocks are all in memory at once."""

    schedule: ReadSchedule
    reads: Int64s
    """int64 [...], positions in `schedule.ids` of the blocks to read, by first use; the others are
    already in memory."""
    keeps: npt.NDArray[np.bool_]
    """bool [num_blocks], whether the block is kept after its last step of the window."""
    forgets: Int64s
    """int64 [...], block numbers of kept blocks that are dropped when the window begins."""
    max_bytes: int
    """Limit for blocks in memory, including those being read, while this window's blocks are
    read."""


def plan_windows(
    run: Run, future: StepSequence, budget: Budget, first_samples: int = FIRST_SAMPLES
) -> Iterator[Window]:
    """Plan the windows in which a process reads its coming steps.
    Raises: ConfigError if memory is too small."""
    return make_windows(run, make_schedules(run, future, budget, first_samples), budget)


def make_schedules(
    run: Run, future: StepSequence, budget: Budget, first_samples: int = FIRST_SAMPLES
) -> Iterator[ReadSchedule]:
    """Divide all steps into schedules whose blocks take up to half of the memory for blocks; single
    steps may take all of it.

    Raises: ConfigError if the blocks of a single step take more.
    """
    plannable = int(budget.planning / STRETCH_BYTES / estimate_spans_per_sample(run))
    step = 0
    samples = min(first_samples, plannable)
    while len((numbers := future.samples(step, max(1, samples // future.micro_batch_size)))[0]):
        steps = locate_steps(run, *numbers)
        schedule = schedule_reads(run, steps)
        plannable = int(
            budget.planning / STRETCH_BYTES * len(schedule.samples) / len(schedule.span_blocks)
        )
        samples = min(2 * samples, WINDOW_SAMPLES, plannable)
        max_bytes = block_budget(schedule, budget)
        order = np.argsort(schedule.first_use, kind="stable")
        fitting = int(
            np.searchsorted(np.cumsum(schedule.sizes[order]), max_bytes // 2, side="right")
        )
        if fitting < len(order) and schedule.num_steps > 1:
            schedule = schedule_reads(
                run, steps.until(max(1, int(schedule.first_use[order[fitting]])))
            )
            # What does not fit was located in vain: the next window may be longer by a few steps
            samples = min(samples, len(schedule.samples) + len(schedule.samples) // 16)
        if not (need := step_need(schedule)).fits(budget):
            raise refuse_step(run, schedule, budget, least_memory(run, need, budget))
        yield schedule
        step += schedule.num_steps


def estimate_spans_per_sample(run: Run) -> float:
    """The approximate mean number of blocks that hold a sample's tokens."""
    num_blocks = int((run.data.parts["stop_block"] - run.data.parts["first_block"]).sum())
    return 1 + run.sequence_length * num_blocks / max(1, int(run.data.parts["tokens"].sum()))


def step_need(schedule: ReadSchedule) -> BlockNeed:
    """What the blocks of a schedule need if all are in memory at once."""
    size = int(schedule.sizes.sum())
    return BlockNeed(size, size + int(schedule.reading.max()))


def refuse_step(run: Run, schedule: ReadSchedule, budget: Budget, least: int) -> ConfigError:
    """The error for a step whose blocks do not fit into memory, of which `least` bytes would do."""
    largest = int(schedule.reading.argmax())
    number = int(run.store.snapshot.file_of(schedule.ids[largest : largest + 1])[0])
    return ConfigError(
        f"memory: found {format_bytes(run.runtime.memory)}, expected {format_bytes(least, up=True)} or more: the "
        f"blocks of a step of {len(schedule.samples)} samples take {format_bytes(schedule.sizes.sum())} (from sample "
        f"{schedule.samples[0]:,} on), reading the largest of them (of "
        f"{run.store.snapshot.path(number, run.store.roots)}) takes {format_bytes(schedule.reading[largest])} more, "
        f"and batches and the sources' block orders take {format_bytes(budget.batches + budget.orders)}; raise "
        "`memory`, or lower micro_batch_size or the sources' block sizes"
    )


def block_budget(schedule: ReadSchedule, budget: Budget) -> int:
    """Bytes for blocks while a schedule's are read: less if reading its largest block exceeds
    the memory for reads."""
    return budget.blocks - max(0, int(schedule.reading.max()) - budget.reads)


def make_windows(run: Run, schedules: Iterator[ReadSchedule], budget: Budget) -> Iterator[Window]:
    """Decide what to read for each schedule and what to keep,
    so that together they fit the memory for blocks."""
    kept = _KeptBlocks(*(np.zeros(0, np.int64) for _ in range(5)))
    for number, (now, after) in enumerate(pairwise(chain(schedules, [None]))):
        assert now is not None
        max_bytes = block_budget(now, budget)
        in_memory = np.isin(now.ids, kept.ids)
        reads = np.flatnonzero(~in_memory)
        reads = reads[np.argsort(now.first_use[reads], kind="stable")]
        forgets, kept = kept.drop_oldest(now, max_bytes)
        kept = kept.with_used(now, number)
        ahead = np.zeros(0, np.int64) if after is None else after.ids
        unfinished = (kept.used < run.store.num_tokens(kept.ids)) | (
            kept.pending_boundary_tokens > 0
        )
        # May be needed again at any time: the memory is for reading ahead
        if not run.consumes_whole_blocks:
            unfinished[:] = False
        kept = kept.select(unfinished | np.isin(kept.ids, ahead))
        keeps = np.isin(now.ids, kept.ids)
        yield Window(schedule=now, reads=reads, keeps=keeps, forgets=forgets, max_bytes=max_bytes)


@dataclass(frozen=True, slots=True)
class _KeptBlocks:
    """Blocks that are kept between windows; int64 [n] each."""

    ids: Int64s
    sizes: Int64s
    used: Int64s
    """Tokens that samples have used."""
    pending_boundary_tokens: Int64s
    """See ReadSchedule."""
    window: Int64s
    """Number of the last window that used the block."""

    def select(self, mask: npt.NDArray[np.bool_]) -> _KeptBlocks:
        columns = self.ids, self.sizes, self.used, self.pending_boundary_tokens, self.window
        return _KeptBlocks(*(column[mask] for column in columns))

    def drop_oldest(self, now: ReadSchedule, max_bytes: int) -> tuple[Int64s, _KeptBlocks]:
        """Drop blocks that do not fit in memory next to a window: the numbers of the dropped ones,
        and the remaining blocks."""
        needed = np.isin(self.ids, now.ids)
        available = max_bytes - int(now.sizes.sum())
        newest_first = np.lexsort((-self.window, ~needed))
        cumulative = np.cumsum(np.where(needed, 0, self.sizes)[newest_first])
        dropped = np.zeros(len(self.ids), np.bool_)
        dropped[newest_first] = cumulative > available
        dropped &= ~needed
        return self.ids[dropped], self.select(~dropped)

    def with_used(self, now: ReadSchedule, number: int) -> _KeptBlocks:
        """Add the blocks of window `number` and the tokens that it uses."""
        ids = np.union1d(self.ids, now.ids)
        old = np.searchsorted(ids, self.ids)
        new = np.searchsorted(ids, now.ids)
        sizes, used, pending, window = (np.zeros(len(ids), np.int64) for _ in range(4))
        sizes[old] = self.sizes
        used[old] = self.used
        window[old] = self.window
        pending[old] = self.pending_boundary_tokens
        sizes[new] = now.sizes
        window[new] = number
        used[new] += now.used
        pending[new] += now.pending_boundary_tokens
        return _KeptBlocks(ids, sizes, used, pending, window)
