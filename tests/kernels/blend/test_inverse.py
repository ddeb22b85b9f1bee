"""(source, ordinal) -> sample, against a plan walked sample by sample."""

import numpy as np
import pytest
from hypothesis import given, settings

from megablend.blend.interleavings.sequential import SequentialPlan
from megablend.kernels.blend.bijection import permuted, unpermuted
from tests import oracle
from tests.blend.interleavings.test_lanes import plans
from tests.examples import examples
from tests.run.plans import lane_plan, make_request


def check_every_ordinal(arguments: oracle.Plan, *, backwards: bool = False) -> None:
    """Each (source, ordinal) is where the oracle's walk meets it, and those next to the ends are nowhere."""
    plan = lane_plan(**arguments)
    walked = oracle.walk(**arguments)
    expected = {place: k for k, place in enumerate(walked)}
    for source, total in enumerate(np.sum(arguments["totals"], axis=0).tolist()):
        assert plan.find_samples(np.array([source], np.int32), np.array([total])).tolist() == [-1]
    places = sorted(expected, reverse=backwards)
    sources, ordinals = np.array(places).T
    found = plan.find_samples(sources.astype(np.int32), ordinals)
    assert found.tolist() == [expected[place] for place in places]


@examples(120)
@given(plans())
def test_equals_a_walk(arguments: oracle.Plan) -> None:
    check_every_ordinal(arguments)


@examples(30)
@given(plans())
def test_in_any_sequence(arguments: oracle.Plan) -> None:
    check_every_ordinal(arguments, backwards=True)


@pytest.mark.slow
@settings(max_examples=3000, deadline=None)
@given(plans())
def test_equals_a_walk_at_length(arguments: oracle.Plan) -> None:
    check_every_ordinal(arguments)


def test_large_plans_go_there_and_back() -> None:
    rng = np.random.default_rng(5)
    totals = rng.integers(1, 10**9, (3, 300)).tolist()
    epochs = rng.integers(10**4, 10**12, 300).tolist()
    spans = rng.integers(1, 33, 300).tolist()
    plan = lane_plan(
        totals, lanes=96, slots=200, spans=spans, seed=9, epoch_tokens=epochs, sample_tokens=4096
    )
    ks = np.sort(rng.integers(0, plan.num_samples, 20_000))
    np.testing.assert_array_equal(plan.find_samples(*plan.locate_many(ks)), ks)


def test_one_pass() -> None:
    plan = SequentialPlan(make_request([3, 0, 2]))
    sources = np.array([0, 2, 2, 0], np.int32)
    ordinals = np.array([2, 0, 1, 0])
    assert plan.samples_of(sources, ordinals).tolist() == [2, 3, 4, 0]
    for source, ordinal in ((0, 3), (1, 0), (2, 2), (0, -1), (3, 0)):
        with pytest.raises(
            IndexError, match=f"no sample with source {source} and ordinal {ordinal}"
        ):
            plan.samples_of(np.array([source], np.int32), np.array([ordinal]))


@pytest.mark.parametrize("n", [1, 2, 3, 14, 15, 16, 17, 99, 100, 101, 2**20 + 3, 2**50])
def test_a_permutation_is_undone(n: int) -> None:
    entries = range(n) if n < 1000 else range(0, n, n // 97)
    for key in (0, 1, 2**62 + 7):
        assert [unpermuted(permuted(i, n, key), n, key) for i in entries] == list(entries)
