"""How many requests are admitted, by the latency of answers and by what a source says."""

from __future__ import annotations

import asyncio

import pytest

from megablend.storage.objects.rate_limiter import FIRST_REQUESTS, MAX_REQUESTS, RateLimiter


def answer(limiter: RateLimiter, seconds: float, rounds: int) -> None:
    """So many rounds of answers that begin after `seconds`."""
    for _ in range(rounds * MAX_REQUESTS):
        limiter.note_latency(seconds, 0.0)


def test_short_latency_admits_more_where_requests_wait() -> None:
    limiter = RateLimiter(4096, None, 1)
    answer(limiter, 0.03, 20)
    assert limiter.limit == FIRST_REQUESTS  # none waits
    limiter.backlog = 1
    answer(limiter, 0.03, 20)
    assert limiter.limit == MAX_REQUESTS


def test_long_latency_takes_back_what_short_latency_gave_and_no_more() -> None:
    limiter = RateLimiter(4096, None, 1)
    limiter.backlog = 1
    answer(limiter, 0.03, 20)
    answer(limiter, 0.3, 40)
    assert limiter.limit == FIRST_REQUESTS
    few = RateLimiter(64, None, 1)
    answer(few, 0.03, 1)
    answer(few, 0.3, 20)
    assert few.limit == 64  # the setting's


def test_a_busy_source_is_sent_fewer_and_one_more_after_each_round() -> None:
    limiter = RateLimiter(4096, None, 1)
    limiter.requests = FIRST_REQUESTS
    limiter.slow_down(1.0)
    limiter.slow_down(1.5)  # of the same second
    assert limiter.limit == 0.7 * FIRST_REQUESTS
    assert limiter.is_slowed
    for _ in range(int(limiter.limit)):
        limiter.speed_up()
    assert 0.7 * FIRST_REQUESTS + 0.9 < limiter.limit < 0.7 * FIRST_REQUESTS + 1.1


def test_an_idle_process_that_is_told_of_a_busy_source_goes_on_with_most_of_its_requests() -> None:
    limiter = RateLimiter(4096, None, 1)
    limiter.slow_down(1.0, 5.0, is_told=True)
    assert (limiter.limit, limiter.paused_until) == (0.7 * FIRST_REQUESTS, 6.0)


def test_limits_of_a_job_are_divided_anew_and_a_busy_source_stays_slowed() -> None:
    limiter = RateLimiter(64, 1000, 2)
    assert (limiter.limit, 1 / limiter._seconds_a_byte) == (32, 500)
    limiter.divide(4)
    assert (limiter.limit, 1 / limiter._seconds_a_byte) == (16, 250)
    limiter.requests = 10
    limiter.slow_down(1.0)
    limiter.divide(1)
    assert (limiter.max_requests, limiter.limit) == (64, 7)
    for _ in range(10_000):
        limiter.speed_up()
    assert limiter.limit == 64


def test_few_requests_of_a_job_are_few_for_all_processes() -> None:
    assert RateLimiter(16, None, 8).max_requests == 2
    assert RateLimiter(4, None, 8).max_requests == 1
    limiter = RateLimiter(16, None, 8)
    limiter.slow_down(5.0)
    assert limiter.limit == 2
    # Nobody has asked for few
    assert RateLimiter(4096, None, 8192).max_requests == 4


class Clock(asyncio.SelectorEventLoop):
    """A loop in which sleeping takes no time."""

    now = 1000.0

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, *about: object, **more: object) -> asyncio.TimerHandle:
        self.now = max(self.now, when)
        return super().call_at(when, *about, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rate", "request_rate", "size", "seconds"),
    [
        (None, 5, 0, 2 * 100 / 5),  # of two processes
        (1000, None, 50, 2 * 100 * 50 / 1000),
        (1000, 5, 50, 2 * 100 / 5),
        (1000, 50, 50, 2 * 100 * 50 / 1000),
    ],
)
def test_rates_of_bytes_and_requests(
    rate: int | None, request_rate: float | None, size: int, seconds: float
) -> None:
    limiter = RateLimiter(64, rate, 2, request_rate)

    async def read() -> None:
        for _ in range(100):
            await limiter.enter(size)
            limiter.leave(size)

    loop = Clock()
    loop.run_until_complete(read())
    loop.close()
    # A second's worth goes at once
    assert seconds - 1.01 <= loop.now - 1000 <= seconds


def test_nothing_is_admitted_while_a_source_has_asked_for_a_pause() -> None:
    limiter = RateLimiter(64, None, 1)
    told: list[float] = []
    limiter.on_busy = told.append
    loop = Clock()
    limiter.slow_down(loop.now, 7.0)
    limiter.slow_down(loop.now + 0.1, 6.5)  # it is left alone for as long already
    limiter.slow_down(loop.now + 0.2, 9.0)
    limiter.slow_down(loop.now + 0.3, 30.0, is_told=True)
    limiter.slow_down(loop.now + 0.4, 0.0)
    assert [round(each, 3) for each in told] == [7, 9]

    async def read() -> None:
        await limiter.enter(5)
        limiter.leave(5)

    loop.run_until_complete(read())
    loop.close()
    assert loop.now == pytest.approx(1030.3)
    # Whatever a source says
    limiter.slow_down(2000.0, 1e9)
    assert limiter.paused_until == 2300
