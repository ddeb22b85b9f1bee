import pickle

import numpy as np
import pytest

from megablend.errors import PlanError
from megablend.plan.interleavings.sequential import SequentialPlan

COUNTS = [3, 0, 2, 0]


def test_sources_one_after_the_other() -> None:
    plan = pickle.loads(pickle.dumps(SequentialPlan(COUNTS)))
    assert (plan.num_samples, plan.num_sources) == (5, 4)
    assert [plan.locate(k) for k in range(5)] == [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1)]
    sources, ordinals = plan.locate_many(np.arange(5))
    assert sources.dtype == np.int32
    assert ordinals.dtype == np.int64
    assert list(zip(sources.tolist(), ordinals.tolist(), strict=True)) == [plan.locate(k) for k in range(5)]


def test_counts_and_where_they_are_reached() -> None:
    plan = SequentialPlan(COUNTS)
    for n in range(6):
        assert plan.counts(n).tolist() == [min(n, 3), 0, max(n - 3, 0), 0]
    assert [plan.first_sample_from(2, ordinal) for ordinal in range(3)] == [3, 4, None]
    assert plan.first_sample_from(1, 0) is None


def test_outside_is_refused() -> None:
    plan = SequentialPlan(COUNTS)
    for k in (-1, 5):
        with pytest.raises(IndexError, match=f"sample {k} is out of range: the plan has 5 samples"):
            plan.locate(k)
    with pytest.raises(IndexError, match="the first 6 samples requested of a plan that has 5 samples"):
        plan.counts(6)
    with pytest.raises(PlanError, match="source 1 has -2 samples"):
        SequentialPlan([1, -2])
