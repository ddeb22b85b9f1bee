"""When the bytes of coming samples are due, for storages that keep copies of files on this node.

A storage with copies fetches first what is due first, and gives up first what is due last. So a
loader tells it what it will read: to the end of the epoch after the present one, since due times
that reach further do not make better choices.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
import weakref
from collections.abc import Sequence
from functools import partial

import numpy as np

from megablend.arrays import Float64s, Int64s
from megablend.errors import MegablendError
from megablend.formats.parquet.decoding.values import is_by_dictionary
from megablend.index.blocks.block_store import BlockStore
from megablend.index.read.snapshot import Snapshot
from megablend.prefetch.read_schedule import StepSequence, locate_steps
from megablend.run.run import Run
from megablend.storage.hints import DueRanges, HintedStorage, takes_hints
from megablend.system.log import LOG

CHUNK_SAMPLES = 1 << 14
MAX_SAMPLES = 1 << 22
"""Of a loader's own; what comes after them is told later."""
FIRST_SECONDS = 0.2
"""A step's, before any was seen: what counts is which is due first."""
MAX_BLOCKS = 1 << 20
"""Told at a time: the first ones."""
_FIRST_STEPS = 64
_FEWEST_STEPS = 16
"""From which a pace is known."""
_REPEAT_SECONDS = 60.0
_TURN_SECONDS = 1.0
_MOST_OFF = 1.0
"""Seconds by which steps may come earlier or later than was told, and a step and a half."""
_TELLING_SHARE = 20
"""It is told again only after so many times the time that telling took."""
_numbers = itertools.count()


def report_due(run: Run, future: StepSequence, taken: Sequence[int]) -> DueReporter | None:
    """Begin to tell the run's storage what a loader will read; None if it keeps no copies.

    Args:
        future: the loader's steps from now on.
        taken: two numbers, which the loader changes: how many of these steps were taken, and of how
            many after them everything has been asked for.
    """
    storage = run.store.storage
    firsts = [column.files.start for column in run.store.snapshot.columns]
    paths = [run.store.snapshot.path(file, run.store.roots) for file in firsts]
    if any(takes_hints(storage, path) for path in paths) and takes_hints(storage):
        return DueReporter(run, future, storage, taken)
    return None


def count_horizon(run: Run, position: int) -> int:
    """The number of samples of all ranks to the end of the next epoch: at most two of all
    sources."""
    epoch = int(run.data.parts["tokens"].sum()) // run.sequence_length + 1
    return min(run.num_samples - position, 2 * epoch)


def find_due(run: Run, samples: Int64s, step_offsets: Int64s) -> tuple[Int64s, Int64s]:
    """The blocks that steps use in each epoch, and the first step that uses each in it: int64 [n],
    by epoch, then blocks ascending.

    Args:
        samples: int64 [m], those of all steps.
        step_offsets: int64 [num_steps + 1], where each step begins in them.
    """
    spans = locate_steps(run, samples, step_offsets).spans
    num_blocks = int(spans.blocks.max(initial=0)) + 1
    keys, firsts = np.unique(spans.epochs * num_blocks + spans.blocks, return_index=True)
    return keys % num_blocks, np.searchsorted(step_offsets, spans.rows[firsts], side="right") - 1


def list_ranges(run: Run, blocks: Int64s, due: Float64s) -> list[DueRanges]:
    """What reading blocks asks for, by file, with their dictionaries and extra columns.

    Args:
        blocks: int64 [n], numbers in the index, ascending.
        due: float64 [n], seconds from now.
    """
    store = run.store
    snapshot = store.snapshot
    blocks, due = _add_extra_blocks(store, blocks, due)
    rows = snapshot.blocks(blocks)
    found = list[DueRanges]()
    for file, here in store.cut_by_file(blocks):
        kind = snapshot.column_of(file).kind
        stops = partial(_find_stops, snapshot, blocks[here])
        for each in kind.list_ranges(snapshot.path(file, store.roots), rows[here], stops):
            assert each.owners is not None
            found.append(DueRanges(each.path, each.offsets, each.sizes, due[here][each.owners]))
    by_dictionary = np.flatnonzero(is_by_dictionary(rows["encoding"]))
    chunks, sizes = snapshot.chunks_of(blocks[by_dictionary], "dictionary_bytes")
    _, offsets = snapshot.chunks_of(blocks[by_dictionary], "dictionary_offset")
    # A dictionary is read with the block that is due first
    order = np.lexsort((due[by_dictionary], chunks))
    order = order[(np.diff(chunks[order], prepend=-1) > 0) & (sizes[order] > 0)]
    first = by_dictionary[order]
    for file, here in store.cut_by_file(blocks[first]):
        path = snapshot.path(file, store.roots)
        some = order[here]
        found.append(DueRanges(path, offsets[some], sizes[some].astype(np.int64), due[first[here]]))
    return found


def _add_extra_blocks(store: BlockStore, blocks: Int64s, due: Float64s) -> tuple[Int64s, Float64s]:
    """The same, and the blocks of extra columns that are read with them, each when it is first
    due: int64 [n], ascending, and float64 [n]."""
    numbers = [blocks]
    times = [due]
    for some, places in store.list_extra_blocks(blocks):
        order = np.lexsort((due[places], some))
        order = order[np.diff(some[order], prepend=-1) > 0]
        numbers.append(some[order])
        times.append(due[places[order]])
    every = np.concatenate(numbers)
    order = np.argsort(every, kind="stable")
    return every[order], np.concatenate(times)[order]


def _find_stops(snapshot: Snapshot, blocks: Int64s) -> Int64s:
    """Where the next block of each begins in its file, or the file ends: int64 [n]."""
    files = snapshot.file_of(blocks)
    stops = snapshot.files.sizes[files]
    inside = np.flatnonzero(blocks + 1 < snapshot.files.first_block[files + 1])
    stops[inside] = snapshot.blocks(blocks[inside] + 1)["offset"]
    return stops


class DueReporter:
    """Tells a storage what a loader will read, from a thread that ends with this object.

    Args:
        run: the run that is read.
        future: the loader's steps from now on.
        storage: told.
        taken: two numbers, which the loader changes: how many of these steps were taken, and of how
            many after them everything has been asked for.
    """

    def __init__(
        self, run: Run, future: StepSequence, storage: HintedStorage, taken: Sequence[int]
    ) -> None:
        self._end = threading.Event()
        reader = f"reader-{next(_numbers)}"
        thread = threading.Thread(
            target=_report,
            args=(run, future, storage, reader, taken, self._end),
            name="megablend-due",
            daemon=True,
        )
        thread.start()
        # The thread does not refer to this object
        self._finalizer = weakref.finalize(self, self._end.set)

    def close(self) -> None:
        """End the thread, soon."""
        self._finalizer()


def plan_due(
    run: Run, future: StepSequence, step: int, seconds: float, num_steps: int
) -> list[DueRanges]:
    """What the steps from `step` on read, each `seconds` after the one before: a block once an
    epoch, since a storage would give it up when it was read if nothing more were known."""
    blocks = list[Int64s]()
    steps = list[Int64s]()
    chunk = max(1, CHUNK_SAMPLES // future.micro_batch_size)
    for begin in range(step, step + num_steps, chunk):
        samples, step_offsets = future.samples(begin, min(chunk, step + num_steps - begin))
        if not len(samples):
            break
        some, firsts = find_due(run, samples, step_offsets)
        blocks.append(some)
        steps.append(firsts + begin - step)
    if not blocks:
        return []
    every = np.concatenate(blocks)[:MAX_BLOCKS]
    due = seconds * np.concatenate(steps)[:MAX_BLOCKS].astype(np.float64)
    order = np.argsort(every, kind="stable")
    return list_ranges(run, every[order], due[order])


def _report(
    run: Run,
    future: StepSequence,
    storage: HintedStorage,
    reader: str,
    taken: Sequence[int],
    end: threading.Event,
) -> None:
    """Report at first the first steps, then all; again each minute, also after a failure, and if
    steps come earlier or later than was told."""
    horizon = min(
        count_horizon(run, future.first), MAX_SAMPLES * future.stride // future.micro_batch_size
    )
    num_steps = max(1, horizon // future.stride)
    pace = FIRST_SECONDS
    has_failed = False

    def tell(step: int, num_steps: int) -> None:
        nonlocal has_failed
        began = time.monotonic()
        try:
            told = plan_due(run, future, step, pace, num_steps)
            took = time.monotonic() - began
            storage.set_due(reader, [each._replace(due=each.due - took) for each in told])
        except MegablendError as error:
            # Reading says so, too, where it matters
            if not has_failed:
                LOG.warning("cannot tell the mirror what will be read: %s", error)
            has_failed = True

    started = time.monotonic()
    tell(0, _FIRST_STEPS)
    told_at = started
    num_told = 0
    quiet_until = -math.inf
    repeat_at = -math.inf
    while True:
        num_taken, num_ahead = taken
        now = time.monotonic()
        num_steps_since = num_taken - num_told
        is_off = abs(now - told_at - pace * num_steps_since) > _MOST_OFF + 1.5 * pace
        if now > repeat_at or (is_off and now > quiet_until):
            if num_steps_since >= _FEWEST_STEPS:
                pace = (now - told_at) / num_steps_since
            elif num_taken >= _FEWEST_STEPS:
                pace = (now - started) / num_taken
            # What was asked for already is not waited for
            tell(num_taken + num_ahead, num_steps)
            told_at = now
            num_told = num_taken
            quiet_until = now + _TELLING_SHARE * (time.monotonic() - now)
            repeat_at = now + _REPEAT_SECONDS
        if end.wait(_TURN_SECONDS):
            break
    tell(0, 0)
