import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablend.blend.interleavings import lanes as module
from megablend.blend.interleavings.cycle_counts import count_below
from megablend.blend.interleavings.lane_schedule import make_lane_schedule
from tests.examples import examples
from tests.run.plans import lane_plan


@examples(200)
@given(st.integers(1, 40), st.integers(1, 70), st.data())
def test_counts_are_those_of_the_listed_positions(
    lanes: int, slots: int, data: st.DataObject
) -> None:
    schedule = make_lane_schedule(lanes, slots)
    shift = data.draw(st.integers(0, slots - 1))
    taken = data.draw(st.integers(0, slots))
    edges = np.array(data.draw(st.lists(st.integers(0, lanes * slots), max_size=5)), np.int64)
    listed = [
        (first + lanes * ((schedule.stride * slot + shift) % slots)) % (lanes * slots)
        for slot in range(taken)
        for first in schedule.firsts.tolist()
    ]
    expected = [sum(position < edge for position in listed) for edge in edges.tolist()]
    assert count_below(schedule, shift, taken, edges).tolist() == expected


@pytest.mark.parametrize(("lanes", "slots"), [(8, 32), (12, 30), (5, 64), (1, 100), (64, 3)])
def test_plans_count_and_find_alike_with_and_without_listing(
    monkeypatch: pytest.MonkeyPatch, lanes: int, slots: int
) -> None:
    totals = [[301, 50, 0, 7], [3, 400, 20, 0]]
    listed = lane_plan(totals, lanes=lanes, slots=slots, spans=[2, 1, 1, 1], seed=4)
    sources, _ = listed.locate_many(np.arange(listed.num_samples))
    monkeypatch.setattr(module, "LISTED", 0)
    monkeypatch.setattr(module, "MAX_LISTED", 0)
    plan = lane_plan(totals, lanes=lanes, slots=slots, spans=[2, 1, 1, 1], seed=4)
    for n in range(plan.num_samples + 1):
        assert plan.counts(n).tolist() == np.bincount(sources[:n], minlength=4).tolist()
    for source in range(4):
        samples = np.flatnonzero(sources == source).tolist()
        assert [plan.nth_sample(source, n) for n in range(1, len(samples) + 1)] == samples


@pytest.mark.parametrize("lanes", [64, 1 << 12])
def test_a_long_cycle_is_not_listed(lanes: int) -> None:
    slots = 1 << 20
    totals = [[2 * lanes * slots + 5, lanes * slots // 3, 1000]]
    plan = lane_plan(totals, lanes=lanes, slots=slots, spans=[1, 1, 1], seed=4)
    tracemalloc.start()
    for n in (plan.num_samples // 3 + 7, plan.num_samples - 1):
        counts = plan.counts(n)
        assert counts.sum() == n
        for source in range(3):
            count = int(counts[source])
            if count:
                last = plan.nth_sample(source, count)
                assert last < n
                assert plan.locate(last)[0] == source
                assert plan.counts(last)[source] == count - 1
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 28
