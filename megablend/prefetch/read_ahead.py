"""Reading ahead: the blocks of coming windows are fetched and decoded as memory allows, and each
step is gathered from them.

The loop that requests steps drives everything: it submits reads to a pipeline, waits for those that
its step needs and releases blocks that are no longer needed, which makes room for further reads.
Memory is counted block by block, as in the read schedule.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future as Pending
from dataclasses import dataclass, field

import numpy as np

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
    """A window, and the progress of its reads."""

    window: Window
    unissued: deque[Read]
    """Reads that are not yet submitted."""
    unfinished: deque[Read] = field(default_factory=deque)
    """Submitted reads whose blocks are not yet in the table."""


class ReadAhead:
    """The samples of consecutive steps.

    Args:
        run: the run to read.
        windows: what to read; advanced in a thread.
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
        # Not at exit, when the interpreter itself waits for threads.
        self._end = weakref.finalize(self, self._pipeline.abandon)
        self._end.atexit = False
        self._coming: Pending[Window | None] = self._pipeline.compute(next, windows, None)
        self._in_flight: deque[InFlightWindow] = deque()
        self._bytes = 0  # of blocks in the table or being read
        self._max_bytes = 0  # what the windows in flight allow
        self._table = BlockTable(np.zeros(0, np.int64))
        self._step = 0

    def next(self) -> Samples | None:
        """The samples of the next step; None after the last one.

        Raises: MissingFileError, ChangedFileError, CorruptFileError from reading; ConfigError if
            memory is too small.
        """
        if (
            not self._in_flight or self._step == self._in_flight[0].window.forecast.num_steps
        ) and not self._advance():
            return None
        current = self._in_flight[0]
        self._wait_for_blocks(current)
        samples = self._gather(current.window.forecast)
        self._release()
        self._step += 1
        self._submit_reads()
        return samples

    def close(self) -> None:
        """Stop the threads and release all blocks."""
        self._end.detach()
        self._pipeline.close()
        self._table = BlockTable(np.zeros(0, np.int64))
        self._in_flight.clear()

    def _advance(self) -> bool:
        """Advance to the next window; False if there is none."""
        if self._in_flight:
            self._in_flight.popleft()
            self._max_bytes = min((each.window.max_bytes for each in self._in_flight), default=0)
        if not self._in_flight and not self._plan():
            return False
        window = self._in_flight[0].window
        now = window.forecast
        self._bytes -= self._table.drop(np.searchsorted(self._table.ids, window.forgets))
        waiting = self._table.ids[self._table.occupied()]
        self._table = self._table.move_to(np.union1d(now.ids, waiting))
        # Table slots of the schedule's blocks
        self._places = np.searchsorted(self._table.ids, now.ids)
        self._span_places = self._places[now.places]
        self._span_offsets = now.span_offsets.tolist()
        self._step_offsets = now.step_offsets.tolist()
        order = np.argsort(now.last_use, kind="stable")
        order = order[~window.keeps[order]]
        self._leaving = self._places[order]
        self._left = np.searchsorted(
            now.last_use[order], np.arange(-1, now.num_steps), side="right"
        ).tolist()
        self._step = 0
        self._continues = None
        if self._run.settings.masks.inter_document_masking:
            self._continues = find_continued(self._run.store.snapshot, self._table.ids)
        self._submit_reads()
        return True

    def _plan(self) -> bool:
        """Add the window that a thread has planned in the meantime; False if there is none."""
        window = self._coming.result()
        if window is None:
            return False
        self._coming = self._pipeline.compute(next, self._windows, None)
        self._in_flight.append(
            InFlightWindow(window, deque(split_reads(self._run, window, self._budget)))
        )
        self._max_bytes = min(each.window.max_bytes for each in self._in_flight)
        return True

    def _submit_reads(self) -> None:
        """Submit reads while there is memory; those of the next window after
        all of the current one's."""
        while True:
            for each in self._in_flight:
                while each.unissued:
                    if self._bytes + each.unissued[0].size > self._max_bytes:
                        return
                    self._submit_read(each)
            if len(self._in_flight) > 1 or not self._coming.done() or not self._plan():
                return

    def _submit_read(self, in_flight: InFlightWindow) -> None:
        read = in_flight.unissued.popleft()
        self._bytes += read.size
        self._pipeline.submit(read)
        in_flight.unfinished.append(read)

    def _wait_for_blocks(self, current: InFlightWindow) -> None:
        """Wait for the blocks that this step is the first to need."""
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
            self._table.put(
                self._places[read.places], blocks, current.window.forecast.sizes[read.places]
            )
            current.unfinished.popleft()

    def _gather(self, now: ReadSchedule) -> Samples:
        """The samples of this step, whose blocks are in the table."""
        begin = self._step_offsets[self._step]
        end = self._step_offsets[self._step + 1]
        here = slice(self._span_offsets[self._step], self._span_offsets[self._step + 1])
        rows, epochs, blocks, starts, stops = now.spans
        spans = Spans(rows[here], epochs[here], blocks[here], starts[here], stops[here])
        samples = gather(
            self._run,
            self._table,
            self._span_places[here],
            spans,
            now.sources[begin:end],
            self._continues,
        )
        if samples.masked is not None and self._meter is not None:
            self._meter.add(ReadCounts(masked_samples=int(samples.masked.sum())))
        return samples

    def _release(self) -> None:
        """Drop the blocks whose last step this was."""
        first, last = self._left[self._step : self._step + 2]
        if last > first:
            self._bytes -= self._table.drop(self._leaving[first:last])
