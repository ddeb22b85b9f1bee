"""Futures of what is fetched: made from calls that are done at once, and from others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


def call_now(function: Callable[..., T], *arguments: Any) -> Future[T]:
    """A future that has the result of a call, or the exception that it raised; an interrupt is raised at once."""
    found = Future[T]()
    try:
        found.set_result(function(*arguments))
    except Exception as error:
        found.set_exception(error)
    return found


def gather_futures(futures: Sequence[Future[T]], make: Callable[[list[T]], R]) -> Future[R]:
    """A future of what `make` makes of the results of all; of the first exception where one has one.

    `make` is called by the thread that finishes the last one; by this one if all are done.
    """
    found = Future[R]()
    left, lock = [len(futures)], threading.Lock()

    def finish() -> None:
        try:
            found.set_result(make([future.result() for future in futures]))
        except BaseException as error:  # a cancelled future's, too: whoever waits is told
            found.set_exception(error)

    def count(_: Future[T]) -> None:
        with lock:
            left[0] -= 1
            is_last = not left[0]
        if is_last:
            finish()

    if all(future.done() for future in futures):
        finish()
        return found
    for future in futures:
        future.add_done_callback(count)
    return found


def forward_result(source: Future[T], target: Future[T]) -> None:
    """Give `target` the result or the exception of `source` as soon as that has one."""

    def forward(done: Future[T]) -> None:
        try:
            target.set_result(done.result())
        except BaseException as error:  # a cancelled future's, too: whoever waits is told
            target.set_exception(error)

    source.add_done_callback(forward)
