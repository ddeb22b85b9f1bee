"""Call a coroutine function for many items, with about as many tasks as requests are admitted.

A task for each item, all created at once, would cost more CPU time than the requests: the garbage
collector traverses all tasks that wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, TypeVar

from megablend.storage.objects.rate_limiter import RateLimiter

T = TypeVar("T")


async def call_each(
    call: Callable[[T], Awaitable[None]], items: Iterable[T], limiter: RateLimiter
) -> None:
    """Call a coroutine function for each item, with as many calls in flight as `limiter` admits
    requests.

    Raises: the first exception of a call; the other calls are then cancelled.
    """
    await _Calls(call, items, limiter).run()


class _Calls(Generic[T]):
    """The state of one call of `call_each`. Nested functions instead of this class would refer to
    each other. They would keep alive all objects that `call` refers to, such as the memory that is
    read into, until the garbage collector runs."""

    def __init__(
        self, call: Callable[[T], Awaitable[None]], items: Iterable[T], limiter: RateLimiter
    ) -> None:
        self._call = call
        self._items_left = deque(items)
        self._limiter = limiter
        self._loop = asyncio.get_running_loop()
        self._tasks = set[asyncio.Task[None]]()
        self._finished = self._loop.create_future()

    async def run(self) -> None:
        """Run all calls; see `call_each`."""
        self._limiter.backlog += len(self._items_left)
        try:
            for _ in range(min(len(self._items_left), int(self._limiter.limit))):
                self._start()
            if self._tasks:
                await self._finished
        finally:
            self._limiter.backlog -= len(self._items_left)
            self._items_left.clear()
            for task in list(self._tasks):
                task.cancel()

    async def _work(self) -> None:
        """Call the function for one item after another, and start another task if more requests are
        now admitted. Runs in a task."""
        while self._items_left:
            item = self._items_left.popleft()
            self._limiter.backlog -= 1
            await self._call(item)
            if self._items_left and len(self._tasks) < int(self._limiter.limit):
                self._start()

    def _start(self) -> None:
        task = self._loop.create_task(self._work())
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        """Handle the end of a task. The first error, or the end of the last task, ends the whole
        call."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if self._finished.done():
            return
        if task.cancelled():
            self._finished.cancel()
        elif error is not None:
            self._finished.set_exception(error)
        elif not self._tasks:
            self._finished.set_result(None)
