"""Reading ahead: fetch and decode the blocks of coming windows as far as memory allows, and gather
the samples of each step from them.

The thread that asks for steps controls everything. It submits reads to a pipeline, waits for the
reads that its step needs, and releases blocks that are no longer needed, which makes room for
further reads. Memory is counted block by block, as in the read schedule.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future as Pending
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.errors import CorruptFileError
from megablend.index.blocks.damaged_blocks import read_or_replace
from megablend.order.base import Spans
from megablend.prefetch.block_table import BlockTable
from megablend.prefetch.memory_budget import Budget
from megablend.prefetch.read_counts import ReadCounts, ReadMeter
from megablend.prefetch.read_pipeline import ReadPipeline
from megablend.prefetch.read_schedule import ReadSchedule
from megablend.prefetch.reads import Read, split_reads
from megablend.prefetch.samples import Samples, find_continued, gather
from megablend.prefetch.windows import Window
from megablend.run.run import Run


@dataclass(slots=True)
class InFlightWindow:
    """A window whose blocks are being read, and the progress of its reads. Reads are in the order
    in which steps need them."""

    window: Window
    unissued: deque[Read]
    """Reads that have not been submitted yet."""
    unfinished: deque[Read] = field(default_factory=deque)
    """Submitted reads whose blocks have not been put into the table yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _TableUse:
    """How the steps of a window use the block table."""

    slots: Int64s
    """int64 [num_blocks], slots of the blocks of the window's schedule."""
    span_slots: Int64s
    """int64 [m], slots of the blocks of the schedule's spans."""
    span_offsets: list[int]
    """[num_steps + 1], offsets of the steps in `span_slots`."""
    step_offsets: list[int]
    """[num_steps + 1], offsets of the steps in the window's samples."""
    dropped: Int64s
    """int64 [...], slots of the blocks that are not kept after the window, in the order of their
    last use."""
    dropped_before: list[int]
    """[num_steps + 1], how many items of `dropped` have been dropped before each step."""
    continued: npt.NDArray[np.bool_] | None
    """bool, the result of `find_continued` for each slot; None if document begins are not
    needed."""


class ReadAhead:
    """An iterator over the samples of consecutive steps, which reads their blocks ahead.

    Args:
        run: the run to read.
        windows: the windows to read; a thread of the pipeline plans them by iterating.
        budget: the memory budget of the process.
        num_fetching, num_decoding, meter: see ReadPipeline.
    """

    def __init__(
        self,
        run: Run,
        windows: Iterator[Window],
        *,
        budget: Budget,
        num_fetching: int,
        num_decoding: int,
        meter: ReadMeter | None = None,
    ) -> None:
        self._run = run
        self._meter = meter
        self._windows = windows
        self._budget = budget
        self._pipeline = ReadPipeline(
            run.store,
            max_bytes=budget.reads,
            num_fetching=num_fetching,
            num_decoding=num_decoding,
            pieces=run.settings.masks.inter_document_masking,
            meter=meter,
        )
        # At exit the interpreter itself waits for threads, so the pipeline need not be abandoned
        # then
        self._end = weakref.finalize(self, self._pipeline.abandon)
        self._end.atexit = False
        # The window after those in flight; a thread plans it
        self._planned: Pending[Window | None] = self._pipeline.compute(next, windows, None)
        # The current window, and sometimes the next one
        self._in_flight: deque[InFlightWindow] = deque()
        self._bytes = 0  # bytes of the blocks in the table or being read
        self._max_bytes = 0  # the limit that all windows in flight allow
        self._table = BlockTable(np.zeros(0, np.int64))
        self._use: _TableUse  # set with the first window
        self._step = 0  # the next step, counted from the current window's first
        self._stop = 0  # number of steps of the current window

    def next(self) -> Samples | None:
        """Return the samples of the next step, or None after the last one.

        Raises: MissingFileError, ChangedFileError, CorruptFileError from reading; ConfigError if
            memory is too small.
        """
        if self._step == self._stop and not self._advance():
            return None
        current = self._in_flight[0]
        self._wait_for_blocks(current)
        samples = self._gather(current.window.schedule)
        self._release()
        self._step += 1
        self._submit_reads()
        return samples

    def count_steps_ahead(self) -> int:
        """Return the number of coming steps whose reads have all been submitted."""
        first_step = -self._step  # first step of a window, counted from the next step
        for in_flight in self._in_flight:
            if in_flight.unissued:
                return max(0, first_step + in_flight.unissued[0].first_use)
            first_step += in_flight.window.schedule.num_steps
        return first_step

    def close(self) -> None:
        """Stop the threads and release all blocks."""
        self._end.detach()
        self._pipeline.close()
        self._table = BlockTable(np.zeros(0, np.int64))
        self._in_flight.clear()

    def _advance(self) -> bool:
        """Advance to the next window; return False if there is none."""
        if self._in_flight:
            self._in_flight.popleft()
            self._max_bytes = min(
                (planned.window.max_bytes for planned in self._in_flight), default=0
            )
        self._step = 0
        self._stop = 0
        if not self._in_flight and not self._add_planned_window():
            return False
        window = self._in_flight[0].window
        # Blocks that an earlier window kept for later use stay in the table, and so do this window's
        # own blocks that were read ahead
        self._bytes -= self._table.drop(np.searchsorted(self._table.ids, window.forgets))
        occupied = self._table.ids[self._table.occupied()]
        self._table = self._table.move_to(np.union1d(window.schedule.ids, occupied))
        self._use = self._plan_table_use(window)
        self._stop = window.schedule.num_steps
        self._submit_reads()
        return True

    def _plan_table_use(self, window: Window) -> _TableUse:
        """Find out how the steps of a window use the table, which has slots for the window's
        blocks."""
        schedule = window.schedule
        slots = np.searchsorted(self._table.ids, schedule.ids)
        by_last_use = np.argsort(schedule.last_use, kind="stable")
        dropped = by_last_use[~window.keeps[by_last_use]]
        steps_before = np.arange(-1, schedule.num_steps)
        continued = None
        if self._run.settings.masks.inter_document_masking:
            continued = find_continued(self._run.store.snapshot, self._table.ids)
        return _TableUse(
            slots=slots,
            span_slots=slots[schedule.span_blocks],
            # Lists, since indexing a list is much faster than indexing an array
            span_offsets=schedule.span_offsets.tolist(),
            step_offsets=schedule.step_offsets.tolist(),
            dropped=slots[dropped],
            dropped_before=np.searchsorted(
                schedule.last_use[dropped], steps_before, side="right"
            ).tolist(),
            continued=continued,
        )

    def _add_planned_window(self) -> bool:
        """Add the window that a thread is planning, after waiting for it if necessary; return False
        if there is none."""
        window = self._planned.result()
        if window is None:
            return False
        self._planned = self._pipeline.compute(next, self._windows, None)
        reads = split_reads(self._run, window, self._budget)
        self._in_flight.append(InFlightWindow(window, deque(reads)))
        self._max_bytes = min(planned.window.max_bytes for planned in self._in_flight)
        return True

    def _submit_reads(self) -> None:
        """Submit reads while there is memory; all reads of the current window come before those of
        the next one."""
        for in_flight in self._in_flight:
            if not self._submit_fitting(in_flight):
                return
        # Be at most one window ahead, and do not wait for planning while there are steps to return
        if len(self._in_flight) == 1 and self._planned.done() and self._add_planned_window():
            self._submit_fitting(self._in_flight[-1])

    def _submit_fitting(self, in_flight: InFlightWindow) -> bool:
        """Submit reads of a window while there is memory; return whether all are submitted."""
        while in_flight.unissued:
            if self._bytes + in_flight.unissued[0].size > self._max_bytes:
                return False
            self._submit_read(in_flight)
        return True

    def _submit_read(self, in_flight: InFlightWindow) -> None:
        """Submit the next read of a window."""
        read = in_flight.unissued.popleft()
        self._bytes += read.size
        self._pipeline.submit(read)
        in_flight.unfinished.append(read)

    def _wait_for_blocks(self, current: InFlightWindow) -> None:
        """Wait for the blocks that the current step is the first to need, and put them into the
        table."""
        while current.unissued and current.unissued[0].first_use <= self._step:
            self._submit_read(current)
        while current.unfinished and current.unfinished[0].first_use <= self._step:
            read = current.unfinished[0]
            try:
                blocks = read.blocks.result()
            except CorruptFileError:
                if self._run.runtime.on_bad_sample == "raise":
                    raise
                pieces = self._run.settings.masks.inter_document_masking
                blocks = read_or_replace(self._run.store, read.ids, pieces=pieces)
            if blocks is None:
                raise RuntimeError("the interpreter is shutting down: nothing more can be read")
            sizes = current.window.schedule.sizes[read.indices]
            self._table.put(self._use.slots[read.indices], blocks, sizes)
            current.unfinished.popleft()

    def _gather(self, schedule: ReadSchedule) -> Samples:
        """Gather the samples of the current step, whose blocks are in the table."""
        use = self._use
        step = self._step
        samples_here = slice(use.step_offsets[step], use.step_offsets[step + 1])
        spans_here = slice(use.span_offsets[step], use.span_offsets[step + 1])
        samples = gather(
            self._run,
            self._table,
            use.span_slots[spans_here],
            Spans(*(column[spans_here] for column in schedule.spans)),
            schedule.sources[samples_here],
            use.continued,
        )
        if samples.masked is not None and self._meter is not None:
            self._meter.add(ReadCounts(masked_samples=int(samples.masked.sum())))
        return samples

    def _release(self) -> None:
        """Drop the blocks that are not needed after the current step."""
        dropped_before = self._use.dropped_before
        first = dropped_before[self._step]
        stop = dropped_before[self._step + 1]
        if stop > first:
            self._bytes -= self._table.drop(self._use.dropped[first:stop])
