"""How many requests are admitted, by the latency of answers and by what a source says."""

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


def test_limits_of_a_job_are_divided_anew_and_a_busy_source_stays_slowed() -> None:
    limiter = RateLimiter(64, 1000, 2)
    assert (limiter.limit, limiter._rate) == (32, 500)
    limiter.divide(4)
    assert (limiter.limit, limiter._rate) == (16, 250)
    limiter.requests = 10
    limiter.slow_down(1.0)
    limiter.divide(1)
    assert (limiter.max_requests, limiter.limit, limiter._rate) == (64, 7, 1000)
    for _ in range(10_000):
        limiter.speed_up()
    assert limiter.limit == 64
