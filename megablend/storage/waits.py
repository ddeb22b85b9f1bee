"""Cancel the waits of a group of threads, for example when a source does not respond.

A thread that reads synchronously from an object store waits as long as its request is retried, even
if the result is no longer needed.
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
"""A thread-local object. It has the attribute `waits` in a thread that has entered a Waits."""


class Waits:
    """The futures that a group of threads wait for in synchronous calls to storages. This class has
    no lock."""

    def __init__(self) -> None:
        self._pending = set[Future[Any]]()
        self._is_cancelled = False
        self._process = os.getpid()

    def enter(self) -> None:
        """Add the calling thread to the group, until the thread exits."""
        _current.waits = self

    def cancel(self) -> None:
        """Cancel all waits, including those that begin later. The waiting threads get a
        CancelledError."""
        self._is_cancelled = True
        for awaited in list(self._pending):
            awaited.cancel()

    def cancel_soon(self) -> None:
        """Call `cancel` in a new thread that `threading` does not track. This is safe in a
        finalizer, which must not wait for a lock."""
        self._is_cancelled = True
        if self._pending and self._process == os.getpid():
            # No thread can be started: the interpreter ends, or the system refuses another one
            with contextlib.suppress(RuntimeError):
                _thread.start_new_thread(self.cancel, ())

    def add(self, awaited: Future[Any]) -> None:
        """Add a future until it is done."""
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
