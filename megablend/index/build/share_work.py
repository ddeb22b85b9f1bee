"""Indexing one rank's share of the files, and parts of files, of a build."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from megablend.caches.base import CacheStore
from megablend.distributed.assign import assign_longest_first
from megablend.distributed.base import Communicator
from megablend.errors import CacheError, CorruptFileError, UnsupportedFileError
from megablend.index.build.build_report import Progress
from megablend.index.build.file_tasks import (
    FileTask,
    TaskPart,
    TaskResult,
    ensure_fragment,
    join_parts,
)
from megablend.index.build.packs import PackWriter
from megablend.index.build.source_spec import SourceSpec
from megablend.storage.base import Storage
from megablend.storage.prefetched import PrefetchedStorage
from megablend.storage.requested_reads import RequestedReads, run_in_threads
from megablend.system.log import LOG

_POST_SECONDS = 0.2
_TIMES_IN_TURN = 8
"""Times as many files are indexed at a time over a network where each has only one request in
flight."""


def index_share(
    columns: Sequence[SourceSpec],
    work: Sequence[FileTask],
    items: Sequence[TaskPart],
    store: CacheStore,
    launch: Communicator,
    storage: Storage,
    progress: Callable[[Progress], None],
) -> tuple[dict[int, TaskResult], list[str]]:
    """Index this rank's share of the files, and wait for the other ranks.

    Returns: the result of each item, by its number; names of the packs that this rank wrote.
    """
    tally = _Tally(work, items)

    def report() -> None:
        if posts := launch.posts():
            tally.add(number for _, numbers in posts for number in numbers)
            progress(tally.progress())

    done: dict[int, TaskResult] = {}
    unreported: list[int] = []
    posted = time.monotonic()
    assigned = assign_longest_first([item.cost for item in items], launch.size)[launch.rank]
    writer = PackWriter(store)
    try:
        for number, result in _index_items(columns, work, items, assigned, store, writer, storage):
            done[number] = result
            unreported.append(number)
            if len(done) == len(assigned) or time.monotonic() > posted + _POST_SECONDS:
                launch.post(unreported)
                unreported = []
                posted = time.monotonic()
                report()
    except BaseException:
        with contextlib.suppress(CacheError):  # results so far can be reused by the next build
            writer.flush()
        raise
    writer.flush()
    launch.barrier(report)
    divided = [file for file in work if file.num_parts > 1]
    for file in divided[launch.rank :: launch.size]:
        join_parts(file, store)
    return done, writer.written


def _index_items(
    columns: Sequence[SourceSpec],
    work: Sequence[FileTask],
    items: Sequence[TaskPart],
    assigned: Sequence[int],
    store: CacheStore,
    writer: PackWriter,
    storage: Storage,
) -> Iterator[tuple[int, TaskResult]]:
    """Index items; over a network many at a time.
    Yields the number and the result of each, as they are done."""
    num_files = {
        number: max_files(columns[number], storage)
        for number in {work[items[i].number].column for i in assigned}
    }

    def index(number: int, reads: RequestedReads) -> TaskResult:
        item = items[number]
        file = work[item.number]
        column = columns[file.column]
        if num_files[file.column] == 1:
            return ensure_fragment(file, item.part, column, store, writer, storage)
        try:
            return ensure_fragment(
                file, item.part, column, store, writer, PrefetchedStorage(storage, reads)
            )
        except (CorruptFileError, UnsupportedFileError) as error:
            LOG.warning("%s: reading it again, since it may have been damaged in transit", error)
        again = PrefetchedStorage(storage.for_reading(), reads)  # nothing that was read before
        return ensure_fragment(file, item.part, column, store, writer, again)

    return run_in_threads(index, assigned, max(num_files.values(), default=1))


def max_files(column: SourceSpec, storage: Storage) -> int:
    """How many files of a column a process indexes at a time."""
    found = max((storage.limits(file.path).max_files for file in column.files[:1]), default=1)
    return found * _TIMES_IN_TURN if found > 1 and column.kind.requests_in_turn else found


class _Tally:
    """Counts completed work over all ranks."""

    def __init__(self, work: Sequence[FileTask], items: Sequence[TaskPart]) -> None:
        self._items = items
        self._left = [file.num_parts for file in work]
        self._files = sum(file.packed for file in work)
        self._bytes = sum(file.file.size for file in work if file.packed)
        self._num_bytes = sum(file.file.size for file in work)

    def add(self, numbers: Iterable[int]) -> None:
        """Count completed items, each once."""
        for number in numbers:
            file = self._items[number].number
            self._left[file] -= 1
            self._files += self._left[file] == 0
            self._bytes += self._items[number].size

    def progress(self) -> Progress:
        """The progress of the build."""
        return Progress(
            files=self._files,
            num_files=len(self._left),
            bytes=self._bytes,
            num_bytes=self._num_bytes,
        )
