"""What a loader will read: its coming steps, cut into windows whose blocks fit into memory. Pure: nothing is read here.

A sample number says which blocks the sample needs, so the future is known. A *window* is a stretch of steps (of one loader, or of
one of its workers) whose distinct blocks are all held at once, each read once. A block stays for the window after its own
where that uses it, or where it is not used up: a lane goes on in the block it stands in, perhaps some windows later. Those that
wait the longest go first where memory ends. (In row order a block is left after each document.)

Long windows read many blocks of a file at a time, and cost less to plan; the first ones are short, so that the first step is
there soon. A window takes up to half of the memory for blocks: the other half is for what is read ahead and what waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megablend.errors import ConfigError
from megablend.order.base import Spans
from megablend.plan.memory import Budget, shown
from megablend.plan.run import Run

Int64s = npt.NDArray[np.int64]

FIRST_SAMPLES, WINDOW_SAMPLES = 1 << 8, 1 << 14
"""Samples of the first window, and of the longest: windows double."""
STRETCH_BYTES = 640
"""Of memory for planning, a stretch of a window: three windows exist at once, and what one is made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Future:
    """The steps of a loader, or those of one of its workers."""

    first: int
    """First sample of the first step."""
    micro_batch_size: int
    stride: int
    """From a step's first sample to the next one's: samples of a step over all ranks, times workers."""
    stop: int
    """Samples of the run; a last step may be cut."""

    def samples(self, step: int, num_steps: int) -> tuple[Int64s, Int64s]:
        """Sample numbers of `num_steps` steps from `step` on, int64 [n], and where each step's begin, int64 [steps + 1].

        Steps beyond the run are left out.
        """
        begin = self.first + step * self.stride
        firsts = np.arange(begin, min(self.stop, begin + num_steps * self.stride), self.stride)  # not the whole run's
        numbers = firsts[:, np.newaxis] + np.arange(self.micro_batch_size)  # (steps, samples of a step)
        inside = numbers < self.stop
        return numbers[inside], np.concatenate([np.zeros(1, np.int64), np.cumsum(inside.sum(axis=1))])


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Steps, and all that they need."""

    samples: Int64s
    """int64 [n], sample numbers, step by step."""
    step_offsets: Int64s
    """int64 [num_steps + 1], into samples."""
    sources: npt.NDArray[np.int32]
    """int32 [n]"""
    stretches: Spans
    """Where the samples' tokens lie, [m]."""
    stretch_offsets: Int64s
    """int64 [num_steps + 1], into stretches."""
    ids: Int64s
    """int64 [num_blocks], the blocks needed, ascending."""
    places: Int64s
    """int64 [m], where in `ids` each stretch's block is."""
    sizes: Int64s
    """int64 [num_blocks], bytes that a block takes in memory."""
    reading: Int64s
    """int64 [num_blocks], bytes that reading a block takes besides, for a while."""
    first_use: Int64s
    """int64 [num_blocks], step, from 0."""
    last_use: Int64s
    used: Int64s
    """int64 [num_blocks], tokens by which the samples advance in each block."""
    awaited: Int64s
    """int64 [num_blocks]: samples that begin in the block, less those that end there: the first token of the ones is the extra
    token of the others, and may be needed later as that."""

    @property
    def num_steps(self) -> int:
        """How many steps."""
        return len(self.step_offsets) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A forecast whose blocks are all held at once."""

    forecast: Forecast
    reads: Int64s
    """int64 [...], places of the blocks to read, by first use; the others are there already."""
    keeps: npt.NDArray[np.bool_]
    """bool [num_blocks]: the block stays when its last step here is over."""
    forgets: Int64s
    """int64 [...], numbers of blocks, kept so far, that go when the window begins."""
    max_bytes: int
    """Of blocks that are held or on their way while this window's are read."""


def planned(run: Run, future: Future, budget: Budget) -> Iterator[Window]:
    """The windows in which a process reads its future. Raises: ConfigError where memory is too small."""
    return windows(run, forecasts(run, future, budget), budget)


class Located(NamedTuple):
    """Steps of samples, and where their tokens lie."""

    samples: Int64s
    step_offsets: Int64s
    sources: npt.NDArray[np.int32]
    ordinals: Int64s
    stretches: Spans

    def until(self, step: int) -> Located:
        """The steps before `step`."""
        num_samples = int(self.step_offsets[step])
        num_stretches = int(np.searchsorted(self.stretches.rows, num_samples))
        return Located(
            self.samples[:num_samples],
            self.step_offsets[: step + 1],
            self.sources[:num_samples],
            self.ordinals[:num_samples],
            Spans(*(column[:num_stretches] for column in self.stretches)),
        )


def located(run: Run, samples: Int64s, step_offsets: Int64s) -> Located:
    """Steps of samples: int64 [n], int64 [num_steps + 1]."""
    sources, ordinals = run.plan.locate_many(samples)
    return Located(samples, step_offsets, sources, ordinals, run.stretches(sources, ordinals))


def forecast(run: Run, found: Located) -> Forecast:
    """What steps of samples need; see Forecast."""
    samples, step_offsets, sources, ordinals, stretches = found
    ids, firsts, places = np.unique(stretches.blocks, return_index=True, return_inverse=True)
    stretch_offsets = np.searchsorted(stretches.rows, step_offsets)
    steps = np.repeat(np.arange(len(step_offsets) - 1), np.diff(stretch_offsets))
    sizes, reading = run.store.memory_bytes(ids, documents=run.config.inter_document_masking)
    last_use = np.zeros(len(ids), np.int64)
    last_use[places] = steps  # ascending: the last one stays
    advances = stretches.stops - stretches.starts
    begins, ends = (np.flatnonzero(np.diff(stretches.rows, **edge)) for edge in ({"prepend": -1}, {"append": -1}))
    extra = run.sample_tokens - run.config.sequence_length
    advances[ends] -= extra
    awaited = np.bincount(places[begins], extra * (ordinals > 0), minlength=len(ids))
    awaited -= np.bincount(places[ends], np.full(len(ends), extra), minlength=len(ids))
    return Forecast(
        samples=samples,
        step_offsets=step_offsets,
        sources=sources,
        stretches=stretches,
        stretch_offsets=stretch_offsets,
        ids=ids,
        places=places,
        sizes=sizes,
        reading=reading,
        first_use=steps[firsts],
        last_use=last_use,
        used=np.bincount(places, advances, minlength=len(ids)).astype(np.int64),
        awaited=awaited.astype(np.int64),
    )


def forecasts(run: Run, future: Future, budget: Budget) -> Iterator[Forecast]:
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
        max_bytes = room(found, budget)
        order = np.argsort(found.first_use, kind="stable")
        fitting = int(np.searchsorted(np.cumsum(found.sizes[order]), max_bytes // 2, side="right"))
        if fitting < len(order) and found.num_steps > 1:
            found = forecast(run, places.until(max(1, int(found.first_use[order[fitting]]))))
        if (needed := int(found.sizes.sum())) > (max_bytes := room(found, budget)):
            largest = int(found.reading.argmax())
            raise ConfigError(
                f"memory: the blocks of a step of {len(found.samples)} samples take {needed} bytes of the {max(0, max_bytes)} "
                f"that {shown(run.config.memory)} leave for blocks (most for block {found.ids[largest]}: {found.sizes[largest]}, "
                f"and {found.reading[largest]} while it is read); raise memory, or lower micro_batch_size or the sources' "
                "block sizes"
            )
        yield found
        step += found.num_steps


def stretches_of_a_sample(run: Run) -> float:
    """About how many blocks a sample lies in, on average."""
    num_blocks = int((run.parts["stop_block"] - run.parts["first_block"]).sum())
    return 1 + run.config.sequence_length * num_blocks / max(1, int(run.parts["tokens"].sum()))


def room(found: Forecast, budget: Budget) -> int:
    """Bytes for blocks while those of a forecast are read, the largest of which may take more than is set aside for reading."""
    return budget.blocks - max(0, int(found.reading.max()) - budget.reads)


def windows(run: Run, found: Iterator[Forecast], budget: Budget) -> Iterator[Window]:
    """What to read for each forecast, and what to keep; those blocks together take up to the memory for blocks."""
    held = _Held(*(np.zeros(0, np.int64) for _ in range(5)))
    for number, (now, after) in enumerate(pairwise(chain(found, [None]))):
        assert now is not None
        max_bytes = room(now, budget)
        there = np.isin(now.ids, held.ids)
        reads = np.flatnonzero(~there)
        reads = reads[np.argsort(now.first_use[reads], kind="stable")]
        forgets, held = held.waiting(now, max_bytes)
        held = held.with_used(now, number)
        ahead = np.zeros(0, np.int64) if after is None else after.ids
        unfinished = (held.used < run.store.num_tokens(held.ids)) | (held.awaited > 0)
        if run.config.order == "row":  # another document of a block is due at any time: the room is for reading ahead
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
    awaited: Int64s
    """See Forecast."""
    window: Int64s
    """Number of the last window that used it."""

    def only(self, kept: npt.NDArray[np.bool_]) -> _Held:
        return _Held(*(column[kept] for column in (self.ids, self.sizes, self.used, self.awaited, self.window)))

    def waiting(self, now: Forecast, max_bytes: int) -> tuple[Int64s, _Held]:
        """Those that there is room for beside a window: the numbers of those that go, and what is left."""
        needed = np.isin(self.ids, now.ids)
        room = max_bytes - int(now.sizes.sum())
        newest_first = np.lexsort((-self.window, ~needed))
        taken = np.cumsum(np.where(needed, 0, self.sizes)[newest_first])
        goes = np.zeros(len(self.ids), np.bool_)
        goes[newest_first] = taken > room
        goes &= ~needed
        return self.ids[goes], self.only(~goes)

    def with_used(self, now: Forecast, number: int) -> _Held:
        """With the blocks of a window, and what it uses of them."""
        ids = np.union1d(self.ids, now.ids)
        mine, theirs = np.searchsorted(ids, self.ids), np.searchsorted(ids, now.ids)
        sizes, used, awaited, window = (np.zeros(len(ids), np.int64) for _ in range(4))
        sizes[mine], used[mine], awaited[mine], window[mine] = self.sizes, self.used, self.awaited, self.window
        sizes[theirs], window[theirs] = now.sizes, number
        used[theirs] += now.used
        awaited[theirs] += now.awaited
        return _Held(ids, sizes, used, awaited, window)
