import pickle
from fractions import Fraction

import numpy as np
import pytest

from megablend.blend.interleavings.sequential import SequentialPlan
from megablend.errors import PlanError
from megablend.run.plan_stages import plan_stages
from megablend.run.stage import Blend, SourceShare, Stage
from tests.run.plans import make_request

COUNTS = [3, 0, 2, 0]


def test_sources_one_after_the_other() -> None:
    plan = pickle.loads(pickle.dumps(SequentialPlan(make_request(COUNTS))))
    assert (plan.num_samples, plan.num_sources) == (5, 4)
    assert [plan.locate(k) for k in range(5)] == [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1)]
    sources, ordinals = plan.locate_many(np.arange(5))
    assert sources.dtype == np.int32
    assert ordinals.dtype == np.int64
    assert list(zip(sources.tolist(), ordinals.tolist(), strict=True)) == [
        plan.locate(k) for k in range(5)
    ]


def test_counts_and_where_they_are_reached() -> None:
    plan = SequentialPlan(make_request(COUNTS))
    for n in range(6):
        assert plan.counts(n).tolist() == [min(n, 3), 0, max(n - 3, 0), 0]
    assert [plan.nth_sample(2, n) for n in (1, 2)] == [3, 4]


def test_outside_is_refused() -> None:
    plan = SequentialPlan(make_request(COUNTS))
    for k in (-1, 5):
        with pytest.raises(IndexError, match=f"sample {k} is out of range: the plan has 5 samples"):
            plan.locate(k)
    with pytest.raises(IndexError, match="the first 6 samples were requested, but the plan has 5"):
        plan.counts(6)


@pytest.mark.parametrize("interleaving", ["sequential", "lanes"])
@pytest.mark.parametrize("plan_version", [1, 2])
def test_more_tokens_than_64_bits_count_are_refused(interleaving: str, plan_version: int) -> None:
    blend = Blend(
        split="train of 1,0,0",
        sources=(SourceShare(name="a", append_eod=None, share=Fraction(1), cycles=1),),
        sequence_length=16384,
        add_extra_token_to_sequence=True,
        interleaving=interleaving,
        plan_version=plan_version,
    )
    stages = [Stage(index="", blend=blend, end=end) for end in (1 << 48, 1 << 49)]
    with pytest.raises(
        PlanError, match="a plan can count at most 9223372036854775807 tokens of a source"
    ):
        plan_stages(stages, [99_950])
    assert plan_stages(stages[:1], [99_950]).token_ranges(
        np.zeros(1, np.int32), np.array([(1 << 48) - 1])
    )[0] == (((1 << 48) - 1) * 16384)
