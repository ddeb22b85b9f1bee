"""Reading ahead: the blocks of coming windows are fetched and decoded, as far as memory goes; steps are gathered from them.

The loop that asks for steps drives it all: it hands reads to a pipeline, waits for those that its step needs and lets go of
blocks that are used up, which makes room for further reads. Memory is counted as the forecast has it, block by block.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future as Pending
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from megablend.formats.decoded import DecodedBlocks
from megablend.order.base import Spans
from megablend.plan.run import Run
from megablend.prefetch.block_table import BlockTable
from megablend.prefetch.memory_budget import Budget
from megablend.prefetch.read_counts import ReadMeter
from megablend.prefetch.read_pipeline import ReadPipeline
from megablend.prefetch.read_schedule import ReadSchedule
from megablend.prefetch.samples import Samples, continued, gather
from megablend.prefetch.windows import Window

Int64s = npt.NDArray[np.int64]

READ_BYTES = 4 << 20
"""Blocks of a file that are read and decoded in one go, in decoded bytes; or one block. Less where memory is little."""
READS_AHEAD = 32
"""Reads of a window, at least: its threads share it, however short it is."""


@dataclass(slots=True)
class _Read:
    """Blocks on their way from the disk."""

    places: Int64s
    """int64 [n], in their window's forecast."""
    size: int
    """Bytes that they take in memory."""
    reading: int
    """Bytes that are needed besides while they are read."""
    first_use: int
    blocks: Pending[DecodedBlocks | None] | None = None


@dataclass(slots=True)
class InFlightWindow:
    """A window, and how far its reads have come."""

    window: Window
    unissued: deque[_Read]
    unfinished: deque[_Read] = field(default_factory=deque)


class ReadAhead:
    """Samples of one step after the other.

    Args:
        run: whose samples they are.
        windows: what is to be read; asked for in a thread.
        budget: of the process.
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
        self._windows = windows
        self._read_bytes = max(1, min(READ_BYTES, budget.reads // 8))
        self._pipeline = ReadPipeline(
            run.store, max_bytes=budget.reads, num_fetching=num_fetching, num_decoding=num_decoding, meter=meter
        )
        # Also when this is forgotten, at any time before the interpreter's end: it waits for its threads by itself.
        self._end = weakref.finalize(self, self._pipeline.close)
        self._end.atexit = False
        self._coming: Pending[Window | None] = self._pipeline.compute(next, windows, None)
        self._stages: deque[InFlightWindow] = deque()
        self._bytes = 0  # of blocks that are held or on their way
        self._table = BlockTable(np.zeros(0, np.int64))
        self._step = 0

    def next(self) -> Samples | None:
        """The next step's samples; None where the future ends.

        Raises: what reading raises: MissingFileError, ChangedFileError, CorruptFileError; ConfigError of the forecast.
        """
        if (not self._stages or self._step == self._stages[0].window.forecast.num_steps) and not self._enter():
            return None
        stage = self._stages[0]
        self._take(stage)
        found = self._gather(stage.window.forecast)
        self._let_go()
        self._step += 1
        self._issue()
        return found

    def close(self) -> None:
        """Stop the threads and let go of all blocks."""
        self._end()
        self._table = BlockTable(np.zeros(0, np.int64))
        self._stages.clear()

    def _enter(self) -> bool:
        """Go on to the next window; False where there is none."""
        if self._stages:
            self._stages.popleft()
        if not self._stages and not self._plan():
            return False
        window = self._stages[0].window
        now = window.forecast
        self._bytes -= self._table.drop(np.searchsorted(self._table.ids, window.forgets))
        waiting = self._table.ids[self._table.held()]
        self._table = self._table.moved(np.union1d(now.ids, waiting))
        self._places = np.searchsorted(self._table.ids, now.ids)  # of the forecast's blocks in the table
        self._stretch_places = self._places[now.places]
        order = np.argsort(now.last_use, kind="stable")
        order = order[~window.keeps[order]]
        self._leaving = self._places[order]
        self._left = np.searchsorted(now.last_use[order], np.arange(-1, now.num_steps), side="right").tolist()
        self._step = 0
        self._continues = None
        if self._run.config.inter_document_masking:
            self._continues = continued(self._run.store.generation, self._table.ids)
        self._issue()
        return True

    def _plan(self) -> bool:
        """Take over the window that a thread has planned meanwhile; False where there is none."""
        window = self._coming.result()
        if window is None:
            return False
        self._coming = self._pipeline.compute(next, self._windows, None)
        files = self._run.store.generation.file_of(window.forecast.ids[window.reads])
        whole = int(window.forecast.sizes[window.reads].sum())
        size = max(1, min(self._read_bytes, whole // READS_AHEAD))
        self._stages.append(InFlightWindow(window, deque(_reads(window, files, size))))
        return True

    def _issue(self) -> None:
        """Hand reads to the threads while there is room, those of the next window after all of this one's."""
        while True:
            max_bytes = min(stage.window.max_bytes for stage in self._stages)
            for stage in self._stages:
                while stage.unissued:
                    if self._bytes + stage.unissued[0].size > max_bytes:
                        return
                    self._send(stage)
            if len(self._stages) > 1 or not self._coming.done() or not self._plan():
                return

    def _send(self, stage: InFlightWindow) -> None:
        read = stage.unissued.popleft()
        self._bytes += read.size
        ids = stage.window.forecast.ids[read.places]
        read.blocks = self._pipeline.submit(ids, read.reading, pieces=self._run.config.inter_document_masking)
        stage.unfinished.append(read)

    def _take(self, stage: InFlightWindow) -> None:
        """Wait for the blocks that this step needs and were not here before."""
        while stage.unissued and stage.unissued[0].first_use <= self._step:
            self._send(stage)
        while stage.unfinished and stage.unfinished[0].first_use <= self._step:
            read = stage.unfinished[0]
            assert read.blocks is not None
            if (found := read.blocks.result()) is None:
                raise RuntimeError("the interpreter is about to end: nothing is read any more")
            self._table.put(self._places[read.places], found, stage.window.forecast.sizes[read.places])
            stage.unfinished.popleft()

    def _gather(self, now: ReadSchedule) -> Samples:
        """The samples of this step, whose blocks are in the table."""
        first, last = now.stretch_offsets[self._step : self._step + 2]
        begin, end = now.step_offsets[self._step : self._step + 2]
        stretches = Spans(*(column[first:last] for column in now.stretches))
        places = self._stretch_places[first:last]
        return gather(self._run, self._table, places, stretches, now.sources[begin:end], self._continues)

    def _let_go(self) -> None:
        """Drop the blocks whose last step this was."""
        first, last = self._left[self._step : self._step + 2]
        if last > first:
            self._bytes -= self._table.drop(self._leaving[first:last])


def _reads(window: Window, files: npt.NDArray[np.int32], read_bytes: int) -> list[_Read]:
    """A window's reads, cut into portions of one file each, by first use.

    Args:
        files: int32 [num_reads], the file of each block that is to be read.
        read_bytes: of a portion, decoded; or one block.
    """
    order = np.argsort(files, kind="stable")  # within a file by first use, as they come
    places, files = window.reads[order], files[order]
    sizes, reading, first_use = (
        column[places] for column in (window.forecast.sizes, window.forecast.reading, window.forecast.first_use)
    )
    portions = np.cumsum(sizes) // read_bytes
    edges = (np.diff(portions, prepend=-1, append=-1) != 0) | (np.diff(files, prepend=-1, append=-1) != 0)
    reads = [
        _Read(
            places[start:stop],
            int(sizes[start:stop].sum()),
            int(reading[start:stop].sum()),
            int(first_use[start]),
        )
        for start, stop in pairwise(np.flatnonzero(edges).tolist())
    ]
    return sorted(reads, key=lambda read: read.first_use)
