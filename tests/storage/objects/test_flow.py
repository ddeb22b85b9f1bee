"""How many requests are admitted, by the latency of answers and by what a source says."""

from megablend.storage.objects.flow import FIRST_REQUESTS, MAX_REQUESTS, Flow


def answer(flow: Flow, seconds: float, rounds: int) -> None:
    """So many rounds of answers that begin after `seconds`."""
    for _ in range(rounds * MAX_REQUESTS):
        flow.note_latency(seconds, 0.0)


def test_short_latency_admits_more_where_requests_wait() -> None:
    flow = Flow(4096, None, 1)
    answer(flow, 0.03, 20)
    assert flow.limit == FIRST_REQUESTS  # none waits
    flow.backlog = 1
    answer(flow, 0.03, 20)
    assert flow.limit == MAX_REQUESTS


def test_long_latency_takes_back_what_short_latency_gave_and_no_more() -> None:
    flow = Flow(4096, None, 1)
    flow.backlog = 1
    answer(flow, 0.03, 20)
    answer(flow, 0.3, 40)
    assert flow.limit == FIRST_REQUESTS
    few = Flow(64, None, 1)
    answer(few, 0.03, 1)
    answer(few, 0.3, 20)
    assert few.limit == 64  # the setting's


def test_a_busy_source_is_sent_fewer_and_one_more_after_each_round() -> None:
    flow = Flow(4096, None, 1)
    flow.requests = FIRST_REQUESTS
    flow.slow_down(1.0)
    flow.slow_down(1.5)  # of the same second
    assert flow.limit == 0.7 * FIRST_REQUESTS
    assert flow.is_slowed
    for _ in range(int(flow.limit)):
        flow.speed_up()
    assert 0.7 * FIRST_REQUESTS + 0.9 < flow.limit < 0.7 * FIRST_REQUESTS + 1.1
