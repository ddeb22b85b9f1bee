from math import gcd

import numpy as np
import pytest

from megablend.kernels.blend.strides import golden_stride


@pytest.mark.parametrize("lanes", [1, 7, 64, 512])
def test_coprime_and_below_the_slots(lanes: int) -> None:
    for slots in [*range(1, 200), 1000, 4096, 65_537]:
        stride = golden_stride(slots, lanes)
        assert gcd(stride, slots) == 1
        assert 1 <= stride <= slots


@pytest.mark.parametrize(
    ("slots", "lanes"), [(512, 8), (4096, 64), (1000, 96), (4096, 24), (997, 1)]
)
def test_multiples_spread_evenly(slots: int, lanes: int) -> None:
    stride = golden_stride(slots, lanes)
    for step in (stride, stride * lanes):
        cycle = slots // gcd(step, slots)
        turns = step * np.arange(cycle) % slots
        for edge in (slots // 10, slots // 3, slots // 2, slots * 3 // 4):
            below = np.cumsum(turns < edge)
            share = np.ceil(edge * cycle / slots) / cycle
            assert np.abs(below - share * np.arange(1, cycle + 1)).max() < 5
