"""Index one rank's share of a build's files and parts of files."""

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
"""Time between two messages to the other ranks about this rank's progress."""
_TIMES_IN_TURN = 8
"""Over a network, this many times more files are indexed at a time if a format makes the requests
for a file one after another."""


def index_share(
    work: Sequence[FileTask],
    items: Sequence[TaskPart],
    store: CacheStore,
    launch: Communicator,
    storage: Storage,
    progress: Callable[[Progress], None],
) -> tuple[dict[int, TaskResult], list[str]]:
    """Index this rank's share of the files and parts of files, and wait for the other ranks.

    Returns: the results of this rank's items, by the number of the item; and the names of the packs
        that this rank wrote.
    """
    tally = _Tally(work, items)

    def report() -> None:
        posts = launch.posts()
        if posts:
            tally.add(number for _, numbers in posts for number in numbers)
            progress(tally.progress())

    done: dict[int, TaskResult] = {}
    unreported: list[int] = []
    posted = time.monotonic()
    assigned = assign_longest_first([item.cost for item in items], launch.size)[launch.rank]
    writer = PackWriter(store)
    try:
        for number, result in _index_items(work, items, assigned, store, writer, storage):
            done[number] = result
            unreported.append(number)
            if len(done) == len(assigned) or time.monotonic() > posted + _POST_SECONDS:
                launch.post(unreported)
                unreported = []
                posted = time.monotonic()
                report()
    except BaseException:
        # The next build can reuse the results so far
        with contextlib.suppress(CacheError):
            writer.flush()
        raise
    writer.flush()
    launch.barrier(report)
    divided = [task for task in work if task.num_parts > 1]
    for task in divided[launch.rank :: launch.size]:
        join_parts(task, store)
    return done, writer.written


def _index_items(
    work: Sequence[FileTask],
    items: Sequence[TaskPart],
    assigned: Sequence[int],
    store: CacheStore,
    writer: PackWriter,
    storage: Storage,
) -> Iterator[tuple[int, TaskResult]]:
    """Index the items with the `assigned` numbers; over a network, many at a time. Yield the number
    and the result of each item as soon as it is done."""
    tasks = (work[items[i].number] for i in assigned)
    columns = {task.column.column_name: task.column for task in tasks}
    num_threads = max((max_files(column, storage) for column in columns.values()), default=1)

    def index(number: int, reads: RequestedReads) -> TaskResult:
        item = items[number]
        task = work[item.number]
        if max_files(task.column, storage) == 1:
            return ensure_fragment(task, item.part, store, writer, storage)
        prefetched = PrefetchedStorage(storage, reads)
        try:
            return ensure_fragment(task, item.part, store, writer, prefetched)
        except (CorruptFileError, UnsupportedFileError) as error:
            LOG.warning("%s: reading it again, since it may have been damaged in transit", error)
        # The storage that `for_reading` returns does not keep bytes that were read before
        fresh = PrefetchedStorage(storage.for_reading(), reads)
        return ensure_fragment(task, item.part, store, writer, fresh)

    return run_in_threads(index, assigned, num_threads)


def max_files(column: SourceSpec, storage: Storage) -> int:
    """Return the number of files of a column that a process indexes at a time."""
    if not column.files:
        return 1
    num_files = storage.limits(column.files[0].path).max_files
    if num_files > 1 and column.kind.requests_in_turn:
        return num_files * _TIMES_IN_TURN
    return num_files


class _Tally:
    """Counts the completed work of all ranks."""

    def __init__(self, work: Sequence[FileTask], items: Sequence[TaskPart]) -> None:
        self._items = items
        self._parts_left = [task.num_parts for task in work]
        self._files = sum(task.packed for task in work)
        self._bytes = sum(task.file.size for task in work if task.packed)
        self._num_bytes = sum(task.file.size for task in work)

    def add(self, numbers: Iterable[int]) -> None:
        """Count completed items, given by number. An item must be added only once."""
        for number in numbers:
            item = self._items[number]
            self._parts_left[item.number] -= 1
            self._files += self._parts_left[item.number] == 0
            self._bytes += item.size

    def progress(self) -> Progress:
        """Return the progress of the build."""
        return Progress(
            files=self._files,
            num_files=len(self._parts_left),
            bytes=self._bytes,
            num_bytes=self._num_bytes,
        )
