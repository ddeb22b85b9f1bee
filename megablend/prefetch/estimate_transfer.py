"""What reading a run takes from object stores:
requests, bytes and their price, found by planning the reads of its loaders.

What a read requests depends on the format: some files of each source are opened to
find out. What is read while blocks are decoded (extra columns), and again after a
failure or a restart, is not included.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from megablend.arrays import Float64s
from megablend.errors import DataError
from megablend.formats.fetch import plan_fetch, start_fetch
from megablend.index.blocks.block_store import BlockStore
from megablend.prefetch.memory_budget import Budget, batches_of, plan_budget
from megablend.prefetch.memory_need import check_memory
from megablend.prefetch.read_amplification import Dictionaries
from megablend.prefetch.read_schedule import StepSequence
from megablend.prefetch.reads import Read, split_reads
from megablend.prefetch.windows import FIRST_SAMPLES, WINDOW_SAMPLES, Window, plan_windows
from megablend.run.run import Run
from megablend.run.skips import Skips
from megablend.storage.object_options import StoreOptions
from megablend.storage.objects.bucket import plan_requests
from megablend.storage.objects.clients import count_requests
from megablend.storage.parallel_map import parallel_map
from megablend.storage.ranges import FileRanges
from megablend.storage.transfer import RequestCount, Transfer, extrapolate, price_transfer

_PLANNED_SAMPLES = 1 << 16
"""Of longer runs only some reads are planned."""
_FEWEST_SPANS = 4
_WIDEST = 1.3
"""Parts of it that are planned; more while the most is more than so many times the least."""
_OPENED_FILES = 256
_FEWEST_FILES = 4
"""Files to open, of all sources together; at least so many of each."""
_TRIED_READS = 8
"""Reads of a source whose first requests are made, where the answers say what else is requested."""
_TOLERANCE = 0.05
"""Of what is not known exactly, for requests that are sent a second time, and files that are not
opened."""


class _Span(NamedTuple):
    """Planned samples of a process."""

    samples: int
    reads: Sequence[Read]


def estimate_transfer(
    run: Run, *, micro_batch_size: int, data_parallel_size: int, num_workers: int
) -> Transfer | None:
    """Find what the loaders of a split request from object stores,
    from the run's first sample to its last.

    Returns: None if no source is in an object store, or a file cannot be opened.
    Raises: ConfigError if memory is too small.
    """
    step = micro_batch_size * data_parallel_size
    stride = step * max(1, num_workers)
    stop = run.num_samples // step * step
    begins = range(0, min(stride, stop), micro_batch_size)
    if run.store.max_files == 1 or not begins:
        return None
    future = StepSequence(first=0, micro_batch_size=micro_batch_size, stride=stride, stop=stop)
    num_batches = batches_of(num_workers)
    check_memory(
        run, Skips(), micro_batch_size=micro_batch_size, stride=stride, num_batches=num_batches
    )
    spans, is_whole = _plan_spans(run, future, begins, num_batches)
    try:
        return _count_spans(run, spans, len(begins), stop, is_whole=is_whole)
    except DataError:
        return None


def _plan_spans(
    run: Run, future: StepSequence, begins: range, num_batches: int
) -> tuple[list[_Span], bool]:
    """Plan all reads of all processes, or of some; or parts of them if a process has many. More
    if they differ much.

    Args:
        future: all steps of the run.
        begins: the first sample of each process.

    Returns: these; whether they are all of the processes' reads.
    """
    own = future.stop // len(begins)
    is_long = own > 2 * WINDOW_SAMPLES
    count = max(_FEWEST_SPANS, _PLANNED_SAMPLES // own)
    while True:
        is_all = future.stop <= _PLANNED_SAMPLES or count >= (
            future.stop // (2 * WINDOW_SAMPLES) if is_long else len(begins)
        )
        count = len(begins) if is_all else count
        firsts = [begins[i * len(begins) // count] for i in range(count)]
        if is_long and not is_all:
            step = (
                (own - 2 * WINDOW_SAMPLES) // (count - 1) // future.micro_batch_size * future.stride
            )
            firsts = [first + i * step for i, first in enumerate(firsts)]
        is_whole = is_all or not is_long
        starts = [dataclasses.replace(future, first=first) for first in firsts]
        spans = [_plan_span(run, each, num_batches, is_whole=is_whole) for each in starts]
        if is_all:
            return spans, is_whole
        sizes = [
            [len(span.reads), sum(map(_stored_bytes, span.reads))] / np.array([span.samples])
            for span in spans
        ]
        least, most = extrapolate(np.array(sizes), future.stop if is_long else len(begins))
        if (most <= _WIDEST * least).all():
            return spans, is_whole
        count *= 2


def _plan_span(run: Run, future: StepSequence, num_batches: int, *, is_whole: bool) -> _Span:
    """Plan all reads of a process; or those of the second window from `future.first` on, and of
    further ones if windows are short: in the first one nothing is in memory."""
    stride = future.stride
    batch_size = future.micro_batch_size
    dictionaries = Dictionaries(0)
    samples = 0
    reads = list[Read]()
    for section in run.sections if is_whole else [run.view_at(future.first).settings]:
        view = run.view(section)
        begin = future.first % stride
        first = max(future.first, begin + -(-max(0, section.start - begin) // stride) * stride)
        budget = plan_budget(view, micro_batch_size=batch_size, num_batches=num_batches)
        dictionaries.resize(budget.dictionaries)
        coming = dataclasses.replace(future, first=first, stop=min(section.stop, future.stop))
        windows = plan_windows(view, coming, budget, FIRST_SAMPLES if is_whole else WINDOW_SAMPLES)
        for number, window in enumerate(windows):
            found = list(_list_reads(view, window, budget, dictionaries))
            if is_whole or number:
                samples = samples + len(window.schedule.samples)
                reads = reads + found
            if not is_whole and samples >= WINDOW_SAMPLES // 2:
                break
    return _Span(samples, reads)


def _list_reads(
    run: Run, window: Window, budget: Budget, dictionaries: Dictionaries
) -> Iterator[Read]:
    numbers, sizes = run.store.dictionaries(window.schedule.ids)
    for read in split_reads(run, window, budget):
        before = dictionaries.num_read
        size = dictionaries.read(numbers[read.indices], sizes[read.indices])
        read.dictionaries = dictionaries.num_read - before, size
        yield read


def _count_spans(
    run: Run, spans: Sequence[_Span], num_processes: int, num_samples: int, *, is_whole: bool
) -> Transfer:
    """What the run requests, from the reads of some of its processes, or in some places. Raises: as
    BlockStore.begin_read."""
    snapshot = run.store.snapshot
    storage = run.store.storage
    # Where nothing is known of the files
    state = run.store.__getstate__() | {"storage": storage.for_reading()}
    files = np.unique([read.file for span in spans for read in span.reads])
    columns = snapshot.files.columns[files]
    counted = defaultdict[StoreOptions, Float64s](lambda: np.zeros((len(spans), 3)))
    opened_later = defaultdict[StoreOptions, Float64s](lambda: np.zeros((2, 3)))
    is_exact = is_whole and len(spans) == num_processes
    for column in np.unique(columns).tolist():
        mine = files[columns == column]
        path = snapshot.path(int(mine[0]), run.store.roots)
        if storage.limits(path).max_files == 1:
            continue
        options = run.runtime.objects.find(path)
        tried = max(_FEWEST_FILES, _OPENED_FILES // len(np.unique(columns)))
        opened = mine[
            np.unique(np.linspace(0, len(mine) - 1, min(tried, len(mine))).astype(np.int64))
        ]
        is_exact &= len(opened) == len(mine)
        reads = [
            [each for each in span.reads if snapshot.files.columns[each.file] == column]
            for span in spans
        ]
        source = _Source(type(run.store)(**state), {*opened.tolist()}, reads)
        counted[options] += [source.count(each) for each in reads]
        opening = source.opening
        if is_whole:
            counted[options] += np.outer(
                [len({each.file for each in those}) for those in reads], opening
            )
            continue
        entry = snapshot.columns[column]
        share = sum(len(each.ids) for those in reads for each in those) / sum(
            span.samples for span in spans
        )
        share *= num_samples / num_processes / len(entry.blocks)
        expected = (
            num_processes
            * len(entry.files)
            * (1 - (1 - min(1, share)) ** (len(entry.blocks) / len(entry.files)))
        )
        opened_later[options] += np.outer(
            [0.9 * expected, min(1.1 * expected, num_processes * len(entry.files))], opening
        )
    found = Transfer()
    for options, sums in counted.items():
        each, units = (
            (sums, num_processes)
            if is_whole
            else (sums / [[span.samples] for span in spans], num_samples)
        )
        least, most = np.stack(extrapolate(each, units)) + opened_later[options]
        if not is_exact or (most > least).any():
            least = least * (1 - _TOLERANCE)
            most = most * (1 + _TOLERANCE)
        found += price_transfer(
            RequestCount(least[0], least[1]), RequestCount(most[0], most[2]), options
        )
    return found


class _Source:
    """What reads of a source's files request.

    Args:
        store: a BlockStore that has opened none of them.
        opened: files to open; those of the others are taken to be alike.
        reads: of each span.
    """

    def __init__(
        self, store: BlockStore, opened: set[int], reads: Sequence[Sequence[Read]]
    ) -> None:
        self._store = store
        self._opened = opened
        self._tried = self._later_requests = self._later_blocks = 0
        self._paths = {each: store.snapshot.path(each, store.roots) for each in opened}
        firsts = {each.file: each for those in reads for each in those if each.file in opened}
        before = count_requests()
        threads = store.storage.limits(next(iter(self._paths.values()))).max_files
        parallel_map(
            lambda each: store.begin_read(each.ids[:1], each.rows[:1]), [*firsts.values()], threads
        )
        requests, size = np.subtract(count_requests(), before) / len(opened)
        self.opening = np.array([requests, size, size])
        """Requests and bytes of opening a file, as those of reads."""
        known = [each for those in reads for each in those if each.file in opened]
        blocks = sum(len(each.ids) for each in known)
        stored = sum(map(_stored_bytes, known))
        self._known = {id(each): self._count(each) for each in known}
        self._alike = np.sum(list(self._known.values()), axis=0) / [
            max(1, blocks),
            max(1, stored),
            max(1, stored),
        ]

    def count(self, reads: Sequence[Read]) -> Float64s:
        """Requests, and the least and the most of bytes, of the reads of a span: float64 [3]."""
        found = np.zeros(3)
        for each in reads:
            number, size = each.dictionaries
            found += [number, size, size]
            if (known := self._known.get(id(each))) is None:
                stored = _stored_bytes(each)
                known = self._alike * [len(each.ids), stored, stored]
            found += known
        return found

    def _count(self, read: Read) -> Float64s:
        """The same of a read of an opened file, without dictionaries."""
        (file,) = self._store.begin_read(read.ids, read.rows)
        found = np.zeros(3)
        stored = _stored_bytes(read)
        is_first = True
        while ranges := file.next_ranges():
            counted = np.sum(
                [self._count_ranges(each, self._paths[read.file]) for each in ranges], axis=0
            )
            found += counted
            if not is_first:
                self._later_requests += counted[0]
                self._later_blocks += len(read.ids)
            if found[2] >= stored:
                break
            if self._tried >= _TRIED_READS:  # what else is requested is known from the answers only
                return np.array(
                    [
                        found[0]
                        + len(read.ids) * self._later_requests / max(1, self._later_blocks),
                        stored,
                        stored,
                    ]
                )
            self._tried = self._tried + 1
            is_first = False
            for each in ranges:
                file.add(start_fetch(each, self._store.storage).result())
        return found

    def _count_ranges(self, ranges: FileRanges, path: str) -> list[int]:
        if ranges.is_shared:  # a dictionary
            return [0, 0, 0]
        parts = [
            plan_requests(*each, np.cumsum(each[1]) - each[1])
            for each in plan_fetch(ranges, self._store.storage)
        ]
        size = sum(stop - start for part in parts for start, stop, _ in part)
        # Of another file, such as a long .idx, less is requested when parts of it have been
        # checked.
        return [sum(map(len, parts)), size if ranges.path == path else 0, size]


def _stored_bytes(read: Read) -> int:
    return int(read.rows["stored_bytes"].sum(dtype=np.int64))
