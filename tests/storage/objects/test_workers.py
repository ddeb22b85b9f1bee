"""Tasks that call a coroutine function for many items: how many at a time, and what happens when one fails."""

from __future__ import annotations

import asyncio

import pytest

from megablend.storage.objects.rate_limiter import RateLimiter
from megablend.storage.objects.workers import call_each

ITEMS = list(range(100))


class Calls:
    """Calls in progress, each of which takes several turns of the loop."""

    def __init__(
        self,
        fails_at: int | None = None,
        grows_at: int | None = None,
        limiter: RateLimiter | None = None,
    ) -> None:
        self.begun = list[int]()
        self.ended = list[int]()
        self.at_a_time = self.most = 0
        self._fails_at = fails_at
        self._grows_at = grows_at
        self._limiter = limiter

    async def call(self, item: int) -> None:
        self.begun.append(item)
        self.at_a_time += 1
        self.most = max(self.most, self.at_a_time)
        try:
            for _ in range(3):
                await asyncio.sleep(0)
            if item == self._fails_at:
                raise ValueError(f"item {item}")
            if item == self._grows_at and self._limiter is not None:
                self._limiter.limit = 12.0
            self.ended.append(item)
        finally:
            self.at_a_time -= 1


def make_flow(limit: float) -> RateLimiter:
    limiter = RateLimiter(1024, None, 1)
    limiter.limit = limit
    return limiter


@pytest.mark.parametrize(("limit", "most"), [(4.0, 4), (7.9, 7), (256.0, 100)])
def test_each_item_once_and_in_order(limit: float, most: int) -> None:
    calls = Calls()
    limiter = make_flow(limit)
    asyncio.run(call_each(calls.call, ITEMS, limiter))
    assert calls.begun == ITEMS
    assert sorted(calls.ended) == ITEMS
    assert calls.most == most
    assert limiter.backlog == 0


def test_of_no_items_nothing_is_waited_for() -> None:
    calls = Calls()
    limiter = make_flow(4.0)
    asyncio.run(asyncio.wait_for(call_each(calls.call, [], limiter), 5))
    assert (calls.begun, limiter.backlog) == ([], 0)


def test_more_at_a_time_when_more_are_admitted() -> None:
    limiter = make_flow(4.0)
    calls = Calls(grows_at=10, limiter=limiter)
    asyncio.run(call_each(calls.call, ITEMS, limiter))
    assert (calls.begun, calls.most) == (ITEMS, 12)


def test_after_an_error_the_others_are_cancelled() -> None:
    calls = Calls(fails_at=10)
    limiter = make_flow(4.0)

    async def run() -> int:
        with pytest.raises(ValueError, match="item 10"):
            await call_each(calls.call, ITEMS, limiter)
        await asyncio.sleep(0)
        return len(asyncio.all_tasks())

    assert asyncio.run(run()) == 1
    assert 14 <= len(calls.begun) <= 18
    assert (calls.at_a_time, limiter.backlog) == (0, 0)


def test_a_cancelled_caller_cancels_all() -> None:
    calls = Calls()
    limiter = make_flow(4.0)

    async def run() -> int:
        task = asyncio.ensure_future(call_each(calls.call, ITEMS, limiter))
        for _ in range(6):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        return len(asyncio.all_tasks())

    assert asyncio.run(run()) == 1
    assert 0 < len(calls.begun) < 20
    assert (calls.at_a_time, limiter.backlog) == (0, 0)
