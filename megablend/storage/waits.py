"""Cancel the waits of a group of threads, such as for a file's first request to a source that does
not respond.

A thread that reads synchronously from an object store waits as long as its request is retried, even
if its result is no longer needed.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import threading
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
_current = threading.local()
"""Has the attribute `waits` in a thread that has entered a Waits."""


class Waits:
    """The futures that the threads of a group wait for in synchronous calls to storages. Works
    without a lock."""

    def __init__(self) -> None:
        self._pending = set[Future[Any]]()
        self._is_cancelled = False
        self._process = os.getpid()

    def enter(self) -> None:
        """Include the calling thread from now on, until it exits."""
        _current.waits = self

    def cancel(self) -> None:
        """Cancel all waits, and those that begin later: the threads get a CancelledError."""
        self._is_cancelled = True
        for awaited in list(self._pending):
            awaited.cancel()

    def cancel_soon(self) -> None:
        """Do what `cancel` does, but in a thread that `threading` does not track: safe to call from
        a finalizer, which must not wait for a lock."""
        self._is_cancelled = True
        if self._pending and self._process == os.getpid():
            # No thread can be started: the interpreter ends, or the system refuses another one
            with contextlib.suppress(RuntimeError):
                _thread.start_new_thread(self.cancel, ())

    def add(self, awaited: Future[Any]) -> None:
        """Include a future until it is done."""
        self._pending.add(awaited)
        awaited.add_done_callback(self._pending.discard)
        # `cancel` sets this before it goes through the futures, so that one of the two cancels
        if self._is_cancelled:
            awaited.cancel()


def wait_for(awaited: Future[T]) -> T:
    """Wait for the result of a future; cancel the future if the wait is interrupted. Raises: the
    future's exception; CancelledError."""
    waits: Waits | None = getattr(_current, "waits", None)
    if waits is not None:
        waits.add(awaited)
    try:
        return awaited.result()
    except BaseException:
        awaited.cancel()
        raise
