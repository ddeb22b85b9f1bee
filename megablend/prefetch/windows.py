"""What a loader will read, cut into windows whose blocks fit into memory.

A *window* is a stretch of steps (of one loader, or of one of its workers) whose distinct blocks are all held at once, each read
once. A block stays for the window after its own where that uses it, or where it is not used up: a lane goes on in the block it
stands in, perhaps some windows later. Those that wait the longest go first where memory ends. (In row order a block is left after
each document.)

Long windows read many blocks of a file at a time, and cost less to plan; the first ones are short, so that the first step is
there soon. A window takes up to half of the memory for blocks: the other half is for what is read ahead and what waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt

from megablend.errors import ConfigError
from megablend.plan.run import Run
from megablend.prefetch.memory_budget import Budget, format_bytes
from megablend.prefetch.read_schedule import ReadSchedule, StepSequence, forecast, located

Int64s = npt.NDArray[np.int64]

FIRST_SAMPLES, WINDOW_SAMPLES = 1 << 8, 1 << 14
"""Samples of the first window, and of the longest: windows double."""
STRETCH_BYTES = 640
"""Of memory for planning, a stretch of a window: three windows exist at once, and what one is made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A forecast whose blocks are all held at once."""

    forecast: ReadSchedule
    reads: Int64s
    """int64 [...], places of the blocks to read, by first use; the others are there already."""
    keeps: npt.NDArray[np.bool_]
    """bool [num_blocks]: the block stays when its last step here is over."""
    forgets: Int64s
    """int64 [...], numbers of blocks, kept so far, that go when the window begins."""
    max_bytes: int
    """Of blocks that are held or on their way while this window's are read."""


def plan_windows(run: Run, future: StepSequence, budget: Budget) -> Iterator[Window]:
    """The windows in which a process reads its future. Raises: ConfigError where memory is too small."""
    return windows(run, forecasts(run, future, budget), budget)


def forecasts(run: Run, future: StepSequence, budget: Budget) -> Iterator[ReadSchedule]:
    """All of the future, in forecasts whose blocks take up to half of the memory for blocks; or in steps that take up to all.

    Raises: ConfigError where the blocks of a single step take more.
    """
    plannable = int(budget.planning / STRETCH_BYTES / stretches_of_a_sample(run))
    step, samples = 0, min(FIRST_SAMPLES, plannable)
    while len((given := future.samples(step, max(1, samples // future.micro_batch_size)))[0]):
        places = located(run, *given)
        found = forecast(run, places)
        plannable = int(budget.planning / STRETCH_BYTES * len(found.samples) / len(found.places))
        samples = min(2 * samples, WINDOW_SAMPLES, plannable)
        max_bytes = block_budget(found, budget)
        order = np.argsort(found.first_use, kind="stable")
        fitting = int(np.searchsorted(np.cumsum(found.sizes[order]), max_bytes // 2, side="right"))
        if fitting < len(order) and found.num_steps > 1:
            found = forecast(run, places.until(max(1, int(found.first_use[order[fitting]]))))
        if (needed := int(found.sizes.sum())) > (max_bytes := block_budget(found, budget)):
            largest = int(found.reading.argmax())
            raise ConfigError(
                f"memory: the blocks of a step of {len(found.samples)} samples take {needed} bytes of the {max(0, max_bytes)} "
                f"that {format_bytes(run.config.memory)} leave for blocks (most for block {found.ids[largest]}: "
                f"{found.sizes[largest]}, and {found.reading[largest]} while it is read); raise memory, or lower "
                "micro_batch_size or the sources' block sizes"
            )
        yield found
        step += found.num_steps


def stretches_of_a_sample(run: Run) -> float:
    """About how many blocks a sample lies in, on average."""
    num_blocks = int((run.parts["stop_block"] - run.parts["first_block"]).sum())
    return 1 + run.config.sequence_length * num_blocks / max(1, int(run.parts["tokens"].sum()))


def block_budget(found: ReadSchedule, budget: Budget) -> int:
    """Bytes for blocks while those of a forecast are read, the largest of which may take more than is set aside for reading."""
    return budget.blocks - max(0, int(found.reading.max()) - budget.reads)


def windows(run: Run, found: Iterator[ReadSchedule], budget: Budget) -> Iterator[Window]:
    """What to read for each forecast, and what to keep; those blocks together take up to the memory for blocks."""
    held = _Held(*(np.zeros(0, np.int64) for _ in range(5)))
    for number, (now, after) in enumerate(pairwise(chain(found, [None]))):
        assert now is not None
        max_bytes = block_budget(now, budget)
        there = np.isin(now.ids, held.ids)
        reads = np.flatnonzero(~there)
        reads = reads[np.argsort(now.first_use[reads], kind="stable")]
        forgets, held = held.waiting(now, max_bytes)
        held = held.with_used(now, number)
        ahead = np.zeros(0, np.int64) if after is None else after.ids
        unfinished = (held.used < run.store.num_tokens(held.ids)) | (held.pending_boundary_tokens > 0)
        if not run.order_kind.consumes_whole_blocks:  # may be needed again at any time: the memory is for reading ahead
            unfinished[:] = False
        held = held.only(unfinished | np.isin(held.ids, ahead))
        keeps = np.isin(now.ids, held.ids)
        yield Window(forecast=now, reads=reads, keeps=keeps, forgets=forgets, max_bytes=max_bytes)


@dataclass(frozen=True, slots=True)
class _Held:
    """Blocks that are kept between windows; int64 [n] each."""

    ids: Int64s
    sizes: Int64s
    used: Int64s
    """Tokens that samples have used."""
    pending_boundary_tokens: Int64s
    """See Forecast."""
    window: Int64s
    """Number of the last window that used it."""

    def only(self, kept: npt.NDArray[np.bool_]) -> _Held:
        return _Held(
            *(column[kept] for column in (self.ids, self.sizes, self.used, self.pending_boundary_tokens, self.window))
        )

    def waiting(self, now: ReadSchedule, max_bytes: int) -> tuple[Int64s, _Held]:
        """Those that there is room for beside a window: the numbers of those that go, and what is left."""
        needed = np.isin(self.ids, now.ids)
        block_budget = max_bytes - int(now.sizes.sum())
        newest_first = np.lexsort((-self.window, ~needed))
        taken = np.cumsum(np.where(needed, 0, self.sizes)[newest_first])
        goes = np.zeros(len(self.ids), np.bool_)
        goes[newest_first] = taken > block_budget
        goes &= ~needed
        return self.ids[goes], self.only(~goes)

    def with_used(self, now: ReadSchedule, number: int) -> _Held:
        """With the blocks of a window, and what it uses of them."""
        ids = np.union1d(self.ids, now.ids)
        mine, theirs = np.searchsorted(ids, self.ids), np.searchsorted(ids, now.ids)
        sizes, used, pending_boundary_tokens, window = (np.zeros(len(ids), np.int64) for _ in range(4))
        sizes[mine], used[mine], pending_boundary_tokens[mine], window[mine] = (
            self.sizes,
            self.used,
            self.pending_boundary_tokens,
            self.window,
        )
        sizes[theirs], window[theirs] = now.sizes, number
        used[theirs] += now.used
        pending_boundary_tokens[theirs] += now.pending_boundary_tokens
        return _Held(ids, sizes, used, pending_boundary_tokens, window)
