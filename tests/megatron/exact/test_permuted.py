from fractions import Fraction

import numpy as np
import pytest

from megablend.blend.allocate import largest_remainder
from megablend.errors import PlanError
from megablend.megatron.exact.permuted import SMALL, Permuted, largest_remainder_blend


@pytest.mark.parametrize("size", [0, 1, 7, 300, SMALL, SMALL + 1, 150_001])
def test_every_sample_of_every_dataset_once(size: int) -> None:
    weights: list[int | float | Fraction] = [3, 0.25, 0, Fraction(1, 3), 1e-9, 2.5]
    datasets, samples = largest_remainder_blend(weights, size, 5).draw(size)
    order = np.lexsort((samples, datasets))
    counts = largest_remainder([Fraction(weight) for weight in weights], size)
    np.testing.assert_array_equal(datasets[order], np.repeat(np.arange(6), counts))
    np.testing.assert_array_equal(
        samples[order], np.concatenate([np.arange(count) for count in counts])
    )


@pytest.mark.compiled
@pytest.mark.parametrize("size", [1000, SMALL + 77])
def test_pieces_and_threads_do_not_matter(size: int) -> None:
    counts = largest_remainder([1, 2, 3], size)
    expected = Permuted(counts, 11).draw(size)
    for threads in (1, 2, 3):
        blend = Permuted(counts, 11)
        pieces = [blend.draw(count, threads=threads) for count in (1, 0, 500, size - 501)]
        for found, wanted in zip(zip(*pieces, strict=True), expected, strict=True):
            np.testing.assert_array_equal(np.concatenate(found), wanted)


def test_seeds_and_sizes_give_other_orders() -> None:
    orders = {
        Permuted([size], seed).draw(10)[1].tobytes()
        for size in (1000, 1001)
        for seed in (0, 1, 2, -1)
    }
    assert len(orders) == 8


def test_frozen_order() -> None:
    """What a cache holds must not change with a version."""
    assert Permuted([3, 4, 5], 1).draw(12)[1].tolist() == [4, 1, 1, 2, 1, 3, 2, 0, 0, 0, 3, 2]
    assert Permuted([10**9, 10**9], 1).draw(6)[1].tolist() == [
        682825881,
        64285677,
        752114729,
        967397879,
        401179432,
        420150508,
    ]


@pytest.mark.compiled
def test_prefixes_are_as_good_as_chance() -> None:
    datasets, _ = Permuted([60_000, 30_000, 10_000], 3).draw(100_000)
    for dataset, share in enumerate((0.6, 0.3, 0.1)):
        off = np.cumsum(datasets == dataset) - share * np.arange(1, 100_001)
        assert np.abs(off).max() < 4 * (100_000 * share * (1 - share)) ** 0.5 / 2


def test_refusals() -> None:
    with pytest.raises(PlanError, match="dataset 1 has weight nan; expected a finite number"):
        largest_remainder_blend([1, float("nan")], 10, 0)
    with pytest.raises(PlanError, match="source 0 has weight -1"):
        largest_remainder_blend([-1, 2], 10, 0)
    with pytest.raises(PlanError, match="a blend of 40,000 datasets"):
        Permuted([1] * 40_000, 0)
    with pytest.raises(
        PlanError, match="13 samples requested, but the blend has only 12 of 12 left"
    ):
        Permuted([3, 4, 5], 1).draw(13)
