"""Check that the files of a snapshot exist and are still those that were indexed. A file is not
read if its size and times are still the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from megablend.errors import CHANGED_REMEDY, ChangedFileError, DataError
from megablend.index.build.build_report import Progress
from megablend.index.read.snapshot import Snapshot
from megablend.index.tables.file_versions import (
    NUM_RANGES,
    RANGE_BYTES,
    check_body,
    join_etags,
    numbers_of,
)
from megablend.storage.base import Storage

NUM_THREADS = 16
"""Number of threads; each mostly waits for the file system."""
_BATCH = 256
"""Number of files between two progress reports."""


class FileChecker:
    """Checks the files of a snapshot, given by number, without disturbing readers. It can be shared
    between threads."""

    def __init__(self, snapshot: Snapshot, roots: Mapping[str, str], storage: Storage) -> None:
        self._snapshot = snapshot
        self._roots = dict(roots)
        self._storage = storage.for_checking()
        self._touched = set[int]()
        """Numbers of checked files whose times have changed since they were indexed,
        although their sampled content is the same. This is a set because files are checked
        repeatedly during training."""

    def check(self, number: int) -> DataError | None:
        """Check a file. Return an error that describes the problem, or None if it is the file that
        was indexed. Raises: CacheError."""
        file = self._snapshot.files.entry(number)
        path = self._snapshot.path(number, self._roots)
        column = self._snapshot.columns[file.column]
        source_format = column.kind
        storage = self._storage
        try:
            stats = [storage.stat(name) for name in source_format.files(path)]
            if stats[0].size != file.opened.size:
                raise ChangedFileError(
                    path,
                    f"has {stats[0].size} bytes, but had {file.opened.size} when it was indexed; {CHANGED_REMEDY}",
                )
            if self._snapshot.seen[number] not in numbers_of(join_etags(stats)):
                source_format.open(path, column.column, file.opened, storage=storage)
                check_body(path, file.opened.size, file.body, storage)
                if self._snapshot.seen[number]:
                    self._touched.add(number)
        except DataError as error:
            return _add_source(error, column.source_name)
        return None

    @property
    def warnings(self) -> tuple[str, ...]:
        """A tuple that contains a warning if only samples were compared for any of the checked
        files; otherwise an empty tuple."""
        touched = tuple(self._touched)  # other threads may add numbers meanwhile
        if not touched:
            return ()
        first = min(self._snapshot.path(number, self._roots) for number in touched)
        more = f" (and {len(touched) - 1:,} more)" if len(touched) > 1 else ""
        return (
            f"{first}{more}: has been moved, copied or touched since the build; {NUM_RANGES * RANGE_BYTES >> 10} KiB of "
            "each file were compared and are unchanged; run `megablend verify --data CONFIG` to compare all blocks that have "
            "checksums",
        )


def files_of(snapshot: Snapshot, sources: Sequence[str]) -> list[int]:
    """Return the numbers of the files of the named sources. Files of extra columns have numbers of
    their own, but are left out, since they are the same files."""
    return [number for entry in snapshot.sources if entry.name in sources for number in entry.files]


def check_files(
    checker: FileChecker,
    numbers: Sequence[int],
    *,
    progress: Callable[[Progress], None] | None = None,
) -> list[DataError]:
    """Check files in several threads.

    Args:
        progress: called at intervals; bytes are not counted.

    Returns: the problems that were found, in the order of the files.
    Raises: CacheError.
    """
    return [
        problem
        for problem in check_each(checker, numbers, progress=progress)
        if problem is not None
    ]


def check_each(
    checker: FileChecker,
    numbers: Sequence[int],
    *,
    progress: Callable[[Progress], None] | None = None,
) -> list[DataError | None]:
    """Check files in several threads, as `check_files` does. Return the problem of each file, or
    None for a file without problems."""
    results: list[DataError | None] = []
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="megablend-check") as threads:
        for start in range(0, len(numbers), _BATCH):
            part = numbers[start : start + _BATCH]
            results += threads.map(checker.check, part)
            if progress is not None:
                progress(Progress(files=start + len(part), num_files=len(numbers)))
    return results


def _add_source(error: DataError, source: str) -> DataError:
    return type(error)(error.path, f"{error.problem} (source {source!r})", offset=error.offset)
