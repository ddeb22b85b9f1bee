"""A background thread that checks a run's files during training, so that missing or changed files
are detected before a sample needs them."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue

from megablend.errors import WITHOUT_IT, ChangedFileError, DataError, MissingFileError
from megablend.index.verify.check_files import FileChecker
from megablend.run.run_files import RunFile
from megablend.storage.waits import Waits

ROUND_SECONDS = 600.0
"""Minimum number of seconds between two checks of the same file."""
_JOIN_SECONDS = 1.0
"""Maximum time in seconds to wait for a thread that was asked to stop. Its check may hang because
the file system hangs."""
_running: weakref.WeakKeyDictionary[threading.Thread, _End] = weakref.WeakKeyDictionary()
"""Threads that check files, each with the object that stops it."""


class _End:
    """The means to stop a thread that checks files, without using a lock. It also stores what the
    thread has found."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[None] = SimpleQueue()
        self.waits = Waits()
        self.found: tuple[RunFile, Exception] | None = None
        """The file at which the thread stopped, and the error that is raised with the next batch if
        the file is still needed."""

    def request_after_check(self) -> None:
        """Ask the thread to stop after its current check. May be called by the garbage
        collector."""
        self._queue.put(None)

    def request_by_collector(self) -> None:
        """Ask the thread to stop, and cancel what its check is waiting for. May be called by the
        garbage collector, since the necessary locks are taken by another thread."""
        self._queue.put(None)
        self.waits.cancel_soon()

    def request(self) -> None:
        """Ask the thread to stop, and cancel what its check is waiting for, from the calling
        thread."""
        self._queue.put(None)
        self.waits.cancel()

    def withdraw(self) -> bool:
        """Withdraw a request to stop that the thread has not seen yet. Returns whether there was
        one."""
        return self.is_requested(0)

    def is_requested(self, seconds: float) -> bool:
        """Wait at most `seconds` for a request to stop, and return whether there is one. Each
        request is returned only once."""
        try:
            self._queue.get(timeout=seconds)
        except Empty:
            return False
        return True


@dataclass(slots=True)
class _Progress:
    """The progress of a FileWatch, which its owner and its threads share; each thread continues
    where the previous one stopped."""

    next_index: int = 0
    """Index of the next file to check."""
    position: int = 0
    """The number of the next sample to read. Files that only earlier samples need are not
    checked."""


class FileWatch:
    """A background check of files, one after another and repeatedly. It runs from `start` until
    `stop` or `close`, and can be started again.

    It also stops when this object is garbage-collected. That may happen in any thread, between any
    two instructions. So stopping must neither take a lock nor wait for the thread;
    `SimpleQueue.put`, which is used to stop the thread, takes no lock.

    Args:
        checker: checks files of the index snapshot.
        files: the files that this rank checks, as long as later samples may read them.
        per_second: number of files to check per second; 0 disables the check.
    """

    def __init__(
        self, checker: FileChecker, files: Sequence[RunFile], *, per_second: float
    ) -> None:
        self._checker = checker
        self._files = list(files)
        self._per_second = per_second
        self._pause = 1 / per_second if per_second else 0.0
        self._progress = _Progress()
        self._end = _End()
        self._finalizer: weakref.finalize[..., FileWatch] | None = None
        self._is_stopped = True
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def __reduce__(self) -> tuple[Callable[..., FileWatch], tuple[FileChecker, list[RunFile]]]:
        # Another process has neither the thread nor what the thread has found
        return partial(FileWatch, per_second=self._per_second), (self._checker, self._files)

    def start(self, position: int = 0) -> None:
        """Start checking, unless a thread of this process is already checking. A file for which an
        error was raised is checked again.

        Args:
            position: the number of the next sample to read.
        """
        self._progress.position = position
        if not self._pause or not self._files:
            return
        if self._process == os.getpid() and self._is_busy():
            return
        self._end = _End()
        self._process = os.getpid()
        # The thread must not refer to this object, which could not be garbage-collected then
        arguments = self._checker, self._files, self._pause, self._end, self._progress
        self._thread = threading.Thread(
            target=_check_repeatedly, args=arguments, name="megablend-watch", daemon=True
        )
        self._thread.start()
        _running[self._thread] = self._end
        if self._finalizer is not None:
            self._finalizer.detach()
        self._finalizer = weakref.finalize(self, self._end.request_by_collector)
        self._is_stopped = False

    def _is_busy(self) -> bool:
        """Return whether no thread needs to be started, because a thread is running, or has found
        an error before it stopped. A thread that was asked to stop, but is still in its last check,
        continues to run."""
        if self._end.found is not None or not self._is_stopped:
            return True
        if self._thread is not None and self._thread.is_alive() and self._end.withdraw():
            self._is_stopped = False
        return not self._is_stopped

    def raise_found(self) -> None:
        """Raise the error that a check found, if any.
        Raises: MissingFileError, ChangedFileError, CacheError."""
        if self._end.found is None:
            return
        self.stop()
        self._thread = None
        file, error = self._end.found
        self._end.found = None
        if file.is_needed(self._progress.position):
            raise error

    def stop(self) -> None:
        """Stop after the check in progress, without waiting for it. May be called by the garbage
        collector."""
        if not self._is_stopped:
            self._is_stopped = True
            self._end.request_after_check()

    def close(self) -> None:
        """Stop checking, and wait for the thread."""
        self._is_stopped = True
        self._end.request_by_collector()
        thread = self._thread
        self._thread = None
        if thread is not None and self._process == os.getpid():
            thread.join(_JOIN_SECONDS)


@atexit.register
def _end_all() -> None:
    """Stop all threads that check files, and wait for them.

    A thread that still runs while the interpreter shuts down is killed in the middle of a C++ call,
    or while it frees a mapped table of the cache, and the process would abort.
    """
    running = list(_running.items())
    for _, end in running:
        end.request()
    deadline = time.monotonic() + _JOIN_SECONDS
    for thread, _ in running:
        thread.join(max(0.0, deadline - time.monotonic()))


def _check_repeatedly(
    checker: FileChecker,
    files: Sequence[RunFile],
    pause: float,
    end: _End,
    progress: _Progress,
) -> None:
    """Check files in turn until one is found to be missing or changed, or a stop is requested.

    Args:
        pause: time in seconds to wait after each check.
    """
    end.waits.enter()
    while True:
        started = time.monotonic()
        while progress.next_index < len(files):
            file = files[progress.next_index]
            error = None
            try:
                if file.is_needed(progress.position):
                    error = checker.check(file.number)
            except CancelledError:  # ended while the check waited for an object store
                return
            except Exception as failure:  # such as a damaged cache
                end.found = file, failure
                return
            # Other errors of the file system may be over by the time the file is needed
            if isinstance(error, MissingFileError | ChangedFileError):
                end.found = file, _explain(error)
                return
            progress.next_index += 1
            if end.is_requested(pause):
                return
        progress.next_index = 0
        if end.is_requested(max(0.0, started + ROUND_SECONDS - time.monotonic())):
            return


def _explain(error: DataError) -> DataError:
    """Return an error like `error` that also says that the background check found it, and what to
    do."""
    remedy = "found by the background check of files, before a sample needed it; restore the file and resume; "
    remedy += f"`megablend check CONFIG` lists all files that are missing or changed; {WITHOUT_IT}"
    return type(error)(error.path, f"{error.problem}: {remedy}", offset=error.offset)
