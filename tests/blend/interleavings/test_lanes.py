import pickle
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablend.blend.interleavings.base import check_tokens
from megablend.blend.plan import StagesPlan
from megablend.errors import PlanError
from tests import oracle
from tests.examples import examples
from tests.run.plans import lane_plan


def make(
    totals: list[list[int]],
    *,
    lanes: int = 4,
    slots: int = 8,
    spans: list[int] | None = None,
    seed: int = 1,
) -> StagesPlan:
    return lane_plan(
        totals, lanes=lanes, slots=slots, spans=spans or [1] * len(totals[0]), seed=seed
    )


@st.composite
def plans(draw: st.DrawFn) -> oracle.Plan:
    num_sources = draw(st.integers(1, 6))
    stage = st.lists(st.integers(0, 80), min_size=num_sources, max_size=num_sources).filter(any)
    epochs = st.lists(st.integers(1, 600), min_size=num_sources, max_size=num_sources)
    return {
        "totals": draw(st.lists(stage, min_size=1, max_size=3)),
        "lanes": draw(st.sampled_from([1, 2, 3, 4, 6, 8, 64])),
        "slots": draw(st.integers(1, 20)),
        "spans": draw(st.lists(st.integers(1, 5), min_size=num_sources, max_size=num_sources)),
        "seed": draw(st.integers(0, 2**63 - 1)),
        "epoch_tokens": draw(st.none() | epochs),
        "sample_tokens": draw(st.integers(1, 9)),
    }


@examples(80)
@given(plans())
def test_equals_the_oracle(arguments: oracle.Plan) -> None:
    plan = lane_plan(**arguments)
    found = np.stack(plan.locate_many(np.arange(plan.num_samples)), axis=1)
    assert [tuple(sample) for sample in found.tolist()] == oracle.walk(**arguments)


@examples(40)
@given(plans(), st.data())
def test_every_ordinal_once_and_counts_agree(arguments: oracle.Plan, data: st.DataObject) -> None:
    plan = lane_plan(**arguments)
    sources, ordinals = plan.locate_many(np.arange(plan.num_samples))
    totals = np.sum(arguments["totals"], axis=0)
    for source, total in enumerate(totals):
        assert np.array_equal(np.sort(ordinals[sources == source]), np.arange(total))
    for n in {0, plan.num_samples, data.draw(st.integers(0, plan.num_samples))}:
        assert np.array_equal(plan.counts(n), np.bincount(sources[:n], minlength=plan.num_sources))
    k = data.draw(st.integers(0, plan.num_samples - 1))
    assert plan.locate(k) == (sources[k], ordinals[k])


@examples(25)
@given(plans())
def test_appending_a_stage_changes_nothing_before(arguments: oracle.Plan) -> None:
    longer = lane_plan(**arguments)
    arguments["totals"] = arguments["totals"][:-1] or arguments["totals"]
    shorter = lane_plan(**arguments)
    ks = np.arange(shorter.num_samples)
    assert np.array_equal(np.stack(shorter.locate_many(ks)), np.stack(longer.locate_many(ks)))


@pytest.mark.parametrize(("lanes", "slots", "span"), [(8, 16, 3), (4, 6, 4), (6, 4, 2)])
def test_a_lane_walks_neighbours_over_a_period(lanes: int, slots: int, span: int) -> None:
    totals = [700, 200, 90, 40]
    plan = make([totals], lanes=lanes, slots=slots, spans=[span] * 4)
    cycle = lanes * slots
    full = sum(totals) // cycle
    sources, ordinals = plan.locate_many(np.arange(plan.num_samples))
    samples = np.arange(plan.num_samples)
    for period in range(full // span):
        inside = (samples // (cycle * span) == period) & (samples // cycle < full)
        for lane in range(lanes):
            for source in range(4):
                run = ordinals[inside & (samples % lanes == lane) & (sources == source)]
                assert len(run) == 0 or np.array_equal(
                    np.sort(run), np.arange(run.min(), run.min() + len(run))
                )
                parts = [
                    ordinals[
                        inside
                        & (samples // cycle == c)
                        & (samples % lanes == lane)
                        & (sources == source)
                    ]
                    for c in range(period * span, (period + 1) * span)
                ]
                walked = [part for part in parts if len(part)]
                assert all(a.max() < b.min() for a, b in pairwise(walked))


def test_lanes_share_every_source_evenly() -> None:
    plan = make([[4000, 900, 77]], lanes=8, slots=64)
    cycle = 8 * 64
    sources, _ = plan.locate_many(np.arange(plan.num_samples // cycle * cycle))
    counts = np.array(
        [
            [np.bincount(lane, minlength=3) for lane in part.reshape(64, 8).T]
            for part in sources.reshape(-1, cycle)
        ]
    )
    assert (counts.max(axis=1) - counts.min(axis=1) <= 1).all()


def test_the_seed_chooses_the_order_within_cycles() -> None:
    orders = [make([[500, 300]], seed=seed).locate_many(np.arange(800)) for seed in (0, 1, 2, -1)]
    assert len({order[1].tobytes() for order in orders}) == 4
    assert len({make([[500, 300]], seed=seed).counts(32).tobytes() for seed in (0, 1, 2)}) == 1


def test_neighbours_are_shuffled_within_a_lane() -> None:
    plan = make([[2**12]], lanes=1, slots=2**10)
    _, ordinals = plan.locate_many(np.arange(2**10))
    assert (np.diff(ordinals) == 1).mean() < 0.01


def test_the_order_is_frozen() -> None:
    """Runs resume by sample number alone: another order here would break every run in progress."""
    plan = make([[600, 250, 9], [10, 0, 500]], lanes=8, slots=12, spans=[1, 3, 2], seed=1234)
    frozen = {
        0: (1, 2),
        1: (0, 17),
        95: (0, 66),
        96: (0, 70),
        500: (0, 372),
        767: (0, 532),
        768: (0, 537),
        857: (1, 249),
        858: (0, 599),
        859: (2, 16),
        1300: (2, 403),
        1368: (2, 508),
    }
    assert {k: plan.locate(k) for k in frozen} == frozen


def test_pickles() -> None:
    plan = make([[50, 30], [3, 0]], spans=[2, 1])
    copy = pickle.loads(pickle.dumps(plan))
    assert [plan.locate(k) for k in range(83)] == [copy.locate(k) for k in range(83)]


@pytest.mark.long
def test_huge_plans_are_exact_and_ready_at_once() -> None:
    total = 10**13
    num_sources = 32_000
    weights = 1 / np.arange(1, num_sources + 1)
    totals = [int(share) for share in weights / weights.sum() * total]
    plan = make([totals], lanes=64, slots=512)
    samples = plan.num_samples
    assert samples == sum(totals)
    assert plan.counts(samples).tolist() == totals
    assert plan.locate(samples - 1)[1] == totals[plan.locate(samples - 1)[0]] - 1
    middle = samples // 2 // (64 * 512) * 64 * 512
    twin = oracle.prefix(oracle.huffman(totals), middle)
    assert plan.counts(middle).tolist() == [twin[source] for source in range(num_sources)]
    sources, ordinals = plan.locate_many(np.arange(middle, middle + 64 * 512))
    for source in range(50):
        mine = np.sort(ordinals[sources == source])
        assert np.array_equal(mine, np.arange(twin[source], twin[source] + len(mine)))


def test_many_stages() -> None:
    totals = [[int(source == stage % 7) for source in range(7)] for stage in range(1000)]
    plan = make(totals, lanes=64, slots=512)
    sources, ordinals = plan.locate_many(np.arange(1000))
    assert np.array_equal(sources, np.arange(1000) % 7)
    assert np.array_equal(ordinals, np.arange(1000) // 7)


def test_sources_that_end_or_begin_between_stages() -> None:
    plan = make([[40, 0, 0], [0, 40, 0], [1, 1, 38]])
    assert plan.counts(40).tolist() == [40, 0, 0]
    assert plan.counts(80).tolist() == [40, 40, 0]


@pytest.mark.parametrize("k", [-1, 80, 10**18])
def test_outside_is_refused(k: int) -> None:
    plan = make([[50, 30]])
    with pytest.raises(IndexError, match=f"sample {k} is out of range: the plan has 80 samples"):
        plan.locate(k)
    with pytest.raises(IndexError, match=f"sample {k} is out of range"):
        plan.locate_many([0, k])
    with pytest.raises(
        IndexError,
        match=f"the first {k + 1 if k == 80 else k} samples were requested, but the plan has 80",
    ):
        plan.counts(k + 1 if k == 80 else k)
    with pytest.raises(TypeError, match="sample numbers must be integers, found float64"):
        plan.locate_many([0.5])


def test_wrong_plans_are_refused() -> None:
    with pytest.raises(PlanError, match="at least one stage"):
        lane_plan([], lanes=1, slots=1, spans=[1], seed=0)
    with pytest.raises(PlanError, match="a plan can have at most 1125899906842623"):
        make([[2**49], [2**49]])
    with pytest.raises(PlanError, match="0 lanes of 8 samples per cycle; expected 1 to 1048576"):
        make([[1]], lanes=0)
    with pytest.raises(PlanError, match="source 1 has 0 cycles per run"):
        make([[1, 1]], spans=[1, 0])
    with pytest.raises(PlanError, match="source 1 has epochs of 0 tokens; expected at least 1"):
        check_tokens([1, 1], [0, 0], [1, 0], 1)
    with pytest.raises(PlanError, match="samples are 0 tokens apart; expected at least 1"):
        check_tokens([1, 1], [0, 0], [1, 1], 0)
    with pytest.raises(
        PlanError,
        match=(
            "source 0 gives 1099511627776 samples of 8388608 tokens from token 0 on, in epochs of 1 tokens, which are "
            "too many; a plan can count"
        ),
    ):
        check_tokens([2**40, 1], [0, 0], [1, 1], 2**23)
