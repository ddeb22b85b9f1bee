"""Checks a run's files in the background during training, to detect a missing or changed file
before a sample needs it."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import CancelledError
from queue import Empty, SimpleQueue

from megablend.errors import WITHOUT_IT, ChangedFileError, DataError, MissingFileError
from megablend.index.verify.check_files import FileChecker
from megablend.run.run_files import RunFile
from megablend.storage.waits import Waits

ROUND_SECONDS = 600.0
"""The shortest time between two checks of the same file."""
_JOIN_SECONDS = 1.0
_running: weakref.WeakKeyDictionary[threading.Thread, _End] = weakref.WeakKeyDictionary()
"""Threads that check files, and what ends them."""


class _End:
    """The end of a thread that checks files: requested without a lock."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[None] = SimpleQueue()
        self.waits = Waits()

    def request(self) -> None:
        """End the thread, and what it waits for; may be called by the garbage collector."""
        self._queue.put(None)
        self.waits.cancel_soon()

    def request_now(self) -> None:
        """The same when locks may be waited for: no other thread is needed."""
        self._queue.put(None)
        self.waits.cancel()

    def request_soon(self) -> None:
        """End the thread after the check that it is in."""
        self._queue.put(None)

    def withdraw(self) -> bool:
        """Take back a request that the thread has not seen. Returns: whether there was one."""
        return self.is_requested(0)

    def is_requested(self, seconds: float) -> bool:
        """Wait until the end is requested, at most `seconds`; whether it is."""
        try:
            self._queue.get(timeout=seconds)
        except Empty:
            return False
        return True


class FileWatch:
    """Checks files one after another, repeatedly, from `start` until `stop` or `close`;
    it can be started again.

    It ends also when it is garbage-collected. That may happen in any thread, between any two
    instructions, so that ending it must not need a lock or wait for the thread:
    `SimpleQueue.put` needs none.

    Args:
        checker: checks files of the index snapshot.
        files: the files that this rank checks, as long as samples to come may read them.
        per_second: files checked per second; 0 checks none.
    """

    def __init__(
        self, checker: FileChecker, files: Sequence[RunFile], *, per_second: float
    ) -> None:
        self._checker = checker
        self._files = list(files)
        self._pause = 1 / per_second if per_second else 0.0
        self._found: list[tuple[RunFile, Exception]] = []
        self._place = [0]  # index into `files` of the next one; survives a restart of the thread
        self._position = [0]
        self._end = _End()
        self._finalizer: weakref.finalize[..., FileWatch] | None = None
        self._is_stopped = True
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def start(self, position: int = 0) -> None:
        """Start checking, unless it is already running in this process.
        A file for which an error was raised is checked again.

        Args:
            position: the next sample that is read.
        """
        self._position[0] = position
        if not self._pause or not self._files or (self._process == os.getpid() and self._is_busy()):
            return
        self._end = _End()
        self._found = []
        self._process = os.getpid()
        arguments = (
            self._checker,
            self._files,
            self._pause,
            self._end,
            self._found,
            self._place,
            self._position,
        )
        self._thread = threading.Thread(
            target=_look, args=arguments, name="megablend-watch", daemon=True
        )
        self._thread.start()
        _running[self._thread] = self._end
        if self._finalizer is not None:
            self._finalizer.detach()
        self._finalizer = weakref.finalize(self, self._end.request)
        self._is_stopped = False

    def _is_busy(self) -> bool:
        """Whether no thread is to be started: one is running, or one that was stopped has found
        something meanwhile.

        A thread that is still in the check during which it was stopped continues.
        """
        if self._found or not self._is_stopped:
            return True
        if self._thread is not None and self._thread.is_alive() and self._end.withdraw():
            self._is_stopped = False
        return not self._is_stopped

    def raise_found(self) -> None:
        """Raise the error that a check found, if any.
        Raises: MissingFileError, ChangedFileError, CacheError."""
        if not self._found:
            return
        self.stop()
        self._thread = None  # it ends with what it finds
        file, error = self._found.pop()
        if file.is_needed(self._position[0]):
            raise error

    def stop(self) -> None:
        """Stop checking after the check in progress, without waiting for it; may be called by the
        garbage collector."""
        if not self._is_stopped:
            self._is_stopped = True
            self._end.request_soon()

    def close(self) -> None:
        """Stop checking."""
        self._is_stopped = True
        self._end.request()
        thread = self._thread
        self._thread = None
        if thread is not None and self._process == os.getpid():
            thread.join(_JOIN_SECONDS)  # it may be waiting for a file system that hangs


@atexit.register
def _end_all() -> None:
    """Wait until no thread checks files.

    One that runs while the interpreter shuts down ends in the middle of a call of a C++ library, or
    of freeing a mapped table of the cache: the process would abort.
    """
    running = list(_running.items())
    for _, end in running:
        end.request_now()
    deadline = time.monotonic() + _JOIN_SECONDS
    for thread, _ in running:
        # It may be waiting for a file system that hangs
        thread.join(max(0.0, deadline - time.monotonic()))


def _look(
    checker: FileChecker,
    files: Sequence[RunFile],
    pause: float,
    end: _End,
    found: list[tuple[RunFile, Exception]],
    place: list[int],
    position: list[int],
) -> None:
    end.waits.enter()
    while True:
        start = time.monotonic()
        while place[0] < len(files):
            file = files[place[0]]
            error = None
            try:
                if file.is_needed(position[0]):
                    error = checker.check(file.number)
            except CancelledError:  # it was closed while it waited for an object store
                return
            except Exception as failed:  # such as a damaged cache; raised with the next batch
                found.append((file, failed))
                return
            # Other errors of the file system may be over by the time the file is needed.
            if isinstance(error, MissingFileError | ChangedFileError):
                found.append((file, _explained(error)))
                return
            place[0] += 1
            if end.is_requested(pause):
                return
        place[0] = 0
        if end.is_requested(max(0.0, start + ROUND_SECONDS - time.monotonic())):
            return


def _explained(error: DataError) -> DataError:
    remedy = "found by the background check of files, before a sample needed it; restore the file and resume; "
    remedy += f"`megablend check CONFIG` lists all files that are missing or changed; {WITHOUT_IT}"
    return type(error)(error.path, f"{error.problem}: {remedy}", offset=error.offset)
