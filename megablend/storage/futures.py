"""Create futures from synchronous calls, and combine futures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


def call_now(function: Callable[..., T], *arguments: Any) -> Future[T]:
    """Call a function, and return a completed future with its result or exception.
    KeyboardInterrupt is raised at once."""
    future = Future[T]()
    try:
        future.set_result(function(*arguments))
    except Exception as error:
        future.set_exception(error)
    return future


def fail_now(error: Exception) -> Future[Any]:
    """Return a future that has failed."""
    future = Future[Any]()
    future.set_exception(error)
    return future


def gather_futures(futures: Sequence[Future[T]], make: Callable[[list[T]], R]) -> Future[R]:
    """Return a future with the result of `make`, applied to the results of all futures, or with the
    first exception. Cancelling the returned future cancels all of the given futures.

    `make` is called by the thread that completes the last future, or by this thread if all futures
    are done already.
    """
    gathered = Future[R]()
    waited = list(futures)
    num_left = len(waited)
    lock = threading.Lock()

    def finish() -> None:
        """Set the result of `gathered`, since all futures are done."""
        try:
            if gathered.set_running_or_notify_cancel():
                gathered.set_result(make([future.result() for future in waited]))
        except BaseException as error:
            # Also from a cancelled future: the waiting caller must see it
            gathered.set_exception(error)
        finally:
            # The futures and `gathered` refer to each other: otherwise the results would stay in
            # memory until the garbage collector runs
            waited.clear()

    def count_done(_: Future[T]) -> None:
        nonlocal num_left
        with lock:
            num_left -= 1
            is_last = num_left == 0
        if is_last:
            finish()

    def cancel_rest(done: Future[R]) -> None:
        if done.cancelled():
            for future in list(waited):
                future.cancel()

    if all(future.done() for future in waited):
        finish()
        return gathered
    for future in list(waited):
        future.add_done_callback(count_done)
    gathered.add_done_callback(cancel_rest)
    return gathered


def forward_result(source: Future[T], target: Future[T]) -> None:
    """Pass the result or the exception of `source` to `target` as soon as it is available."""

    def forward(done: Future[T]) -> None:
        if not target.set_running_or_notify_cancel():
            return
        try:
            target.set_result(done.result())
        except BaseException as error:
            # Also from a cancelled future: the waiting caller must see it
            target.set_exception(error)

    source.add_done_callback(forward)
