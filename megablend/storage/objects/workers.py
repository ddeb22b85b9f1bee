"""Calling a coroutine function for many items by a few tasks,
about as many as requests are admitted.

A task for each item, all made at once, costs more CPU time than the requests: the garbage collector
looks through all that wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from megablend.storage.objects.rate_limiter import RateLimiter

T = TypeVar("T")


async def call_each(
    call: Callable[[T], Awaitable[None]], items: Iterable[T], limiter: RateLimiter
) -> None:
    """Call a coroutine function for each item, as many at a time as `limiter` admits requests, and
    more when it admits more.

    Raises: the first exception of a call, after which the others are cancelled.
    """
    loop = asyncio.get_running_loop()
    todo = deque(items)
    tasks = set[asyncio.Task[None]]()
    finished = loop.create_future()

    async def work() -> None:
        while todo:
            item = todo.popleft()
            limiter.backlog -= 1
            await call(item)
            if todo and len(tasks) < int(limiter.limit):
                start()

    def start() -> None:
        task = loop.create_task(work())
        tasks.add(task)
        task.add_done_callback(end)

    def end(task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if finished.done():
            return
        if task.cancelled():
            finished.cancel()
        elif error is not None:
            finished.set_exception(error)
        elif not tasks:
            finished.set_result(None)

    limiter.backlog += len(todo)
    try:
        for _ in range(min(len(todo), int(limiter.limit))):
            start()
        if tasks:
            await finished
    finally:
        limiter.backlog -= len(todo)
        todo.clear()
        for task in list(tasks):
            task.cancel()
