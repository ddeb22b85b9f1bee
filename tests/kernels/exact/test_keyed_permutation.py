from collections import Counter
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest

from megablend.kernels.exact.keyed_permutation import ROUNDS, find_owner, keyed_permutation


def keys_of(seed: int) -> npt.NDArray[np.uint32]:
    return np.asarray(np.random.default_rng(seed).integers(0, 2**32, ROUNDS, dtype=np.uint32))


def whole(limit: int, seed: int = 1) -> npt.NDArray[np.int64]:
    out = np.empty(limit, np.int64)
    keyed_permutation(0, limit, keys_of(seed), out)
    return out


@pytest.mark.parametrize("limit", [*range(2, 61), 255, 256, 257, 1023, 1024, 1025])
def test_bijection(limit: int) -> None:
    assert sorted(whole(limit).tolist()) == list(range(limit))


@pytest.mark.compiled
@pytest.mark.parametrize("limit", [2**17 - 1, 2**17, 2**17 + 1, 300_000])
def test_bijection_of_many_in_any_pieces(limit: int) -> None:
    found = whole(limit)
    edges = [0, 1, 2, limit // 3, limit // 3 + 1, limit]
    np.testing.assert_array_equal(np.sort(found), np.arange(limit))
    for start, stop in pairwise(edges):
        part = np.empty(stop - start, np.int64)
        keyed_permutation(start, limit, keys_of(1), part)
        np.testing.assert_array_equal(part, found[start:stop])


@pytest.mark.parametrize("power", [31, 32, 33, 40, 62])
@pytest.mark.parametrize("more", [-1, 0])
def test_large_ranges_stay_inside_and_differ(power: int, more: int) -> None:
    limit = 2**power + more
    parts = []
    for start in (0, limit // 2, limit - 500):
        part = np.empty(500, np.int64)
        keyed_permutation(start, limit, keys_of(2), part)
        parts.append(part)
    together = np.concatenate(parts)
    assert together.min() >= 0
    assert together.max() < limit
    assert len(set(together.tolist())) == 1500
    assert abs(float(together.mean()) / limit - 0.5) < 0.05


def test_positions_and_neighbours_are_uniform_over_keys() -> None:
    limit = 70_001
    cells = 8
    trials = 4000
    alone = np.zeros(cells)
    pairs = np.zeros((cells, cells))
    for seed in range(trials):
        part = np.empty(2, np.int64)
        keyed_permutation(seed % 50, limit, keys_of(seed), part)
        one, other = part * cells // limit
        alone[one] += 1
        pairs[one, other] += 1
    for found in (alone, pairs.ravel()):
        expected = trials / len(found)
        freedom = len(found) - 1
        chi2 = float(((found - expected) ** 2 / expected).sum())
        assert abs(chi2 - freedom) < 5 * (2 * freedom) ** 0.5


@pytest.mark.compiled
def test_steps_between_neighbours_do_not_repeat() -> None:
    found = whole(100_000)
    most = Counter(np.diff(found).tolist()).most_common(1)[0][1]
    assert most < 12  # about 1 each; a linear permutation has the same step everywhere


def test_deal_finds_owners() -> None:
    counts = np.array([0, 5, 0, 0, 900, 1, 0, 94, 0])
    starts = np.concatenate([[0], np.cumsum(counts)])
    owners = np.repeat(np.arange(9), counts)
    for shift in (0, 1, 4, 12):
        heads = (np.searchsorted(starts, np.arange(0, 1000, 1 << shift), side="right") - 1).astype(
            np.int32
        )
        datasets = np.empty(1000, np.int16)
        samples = np.empty(1000, np.int64)
        find_owner(np.arange(1000), starts, shift, heads, datasets, samples)
        np.testing.assert_array_equal(datasets, owners)
        np.testing.assert_array_equal(
            samples, np.concatenate([np.arange(count) for count in counts])
        )
