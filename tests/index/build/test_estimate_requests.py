"""How far files that were not tried may be from those that were."""

from __future__ import annotations

import numpy as np
import pytest

from megablend.storage.transfer import extrapolate


@pytest.mark.parametrize("seed", range(20))
def test_a_range_has_what_all_files_take(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(600, 5000))
    tried = 512
    sizes = np.sort(rng.lognormal(0, rng.uniform(0, 2), count))
    # Two kinds of files
    costs = np.stack([rng.choice([3, 20], count), 100 + sizes * rng.choice([1, 9], count)], axis=1)
    least, most = extrapolate(costs[((np.arange(tried) + 0.5) * count // tried).astype(int)], count)
    assert (least <= costs.sum(axis=0)).all()
    assert (costs.sum(axis=0) <= most).all()
    assert (extrapolate(costs, count) == costs.sum(axis=0)).all()
