"""Checks a run's files in the background during training, to detect a missing or changed file before a sample needs it."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence

from megablend.errors import ChangedFileError, DataError, MissingFileError
from megablend.index.check_files import FileChecker

ROUND_SECONDS = 600.0
"""The shortest time between two checks of the same file."""
_JOIN_SECONDS = 1.0


class FileWatch:
    """Checks files one after another, repeatedly, from the first `start` until `close`.

    Args:
        checker: checks files of the index snapshot.
        files: numbers of the files that this rank checks.
        per_second: files checked per second; 0 checks none.
    """

    def __init__(self, checker: FileChecker, files: Sequence[int], *, per_second: float) -> None:
        self._checker, self._files, self._pause = checker, list(files), 1 / per_second if per_second else 0.0
        self._found: list[Exception] = []
        self._place = [0]  # index into `files` of the next one; survives a restart of the thread
        self._end: weakref.finalize[..., FileWatch] | None = None

    def start(self) -> None:
        """Start checking, unless it is already running."""
        if (self._end is not None and self._end.alive) or not self._pause or not self._files or self._found:
            return
        stop = threading.Event()
        arguments = (self._checker, self._files, self._pause, stop, self._found, self._place)
        thread = threading.Thread(target=_look, args=arguments, name="megablend-watch", daemon=True)
        self._end = weakref.finalize(self, _shut_down, thread, stop)
        thread.start()

    def raise_found(self) -> None:
        """Raise the error that a check found, if any. Raises: MissingFileError, ChangedFileError, CacheError."""
        if self._found:
            raise self._found[0]

    def close(self) -> None:
        """Stop checking."""
        if self._end is not None:
            self._end()


def _look(
    checker: FileChecker,
    files: Sequence[int],
    pause: float,
    stop: threading.Event,
    found: list[Exception],
    place: list[int],
) -> None:
    while True:
        start = time.monotonic()
        while place[0] < len(files):
            try:
                error = checker.check(files[place[0]])
            except Exception as failed:  # such as a damaged cache; raised with the next batch
                found.append(failed)
                return
            # Other errors of the file system may be over by the time the file is needed.
            if isinstance(error, MissingFileError | ChangedFileError):
                found.append(_explained(error))
                return
            place[0] += 1
            if stop.wait(pause):
                return
        place[0] = 0
        if stop.wait(max(0.0, start + ROUND_SECONDS - time.monotonic())):
            return


def _explained(error: DataError) -> DataError:
    remedy = "found by the check of files in the background, before a sample needed it; restore the file and resume; "
    remedy += "`megablend check CONFIG` lists all files that are missing or changed"
    return type(error)(error.path, f"{error.problem}: {remedy}", offset=error.offset)


def _shut_down(thread: threading.Thread, stop: threading.Event) -> None:
    stop.set()
    if thread is not threading.current_thread() and thread.ident is not None:
        thread.join(_JOIN_SECONDS)  # it may be waiting for a file system that hangs
