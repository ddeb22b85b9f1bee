import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablend.kernels.blend.bijection import PACKED, permuted, shuffle
from megablend.kernels.blend.keyed_hash import MASK
from tests import naive
from tests.examples import examples


@pytest.mark.parametrize("n", [*range(1, 61), 127, 128, 129, 1023, 1024, 1025])
def test_every_entry_once(n: int) -> None:
    for key in (0, 1, MASK):
        assert sorted(permuted(i, n, key) for i in range(n)) == list(range(n))


@pytest.mark.parametrize("exponent", [16, 31, 32, 33, 40, 50])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_large_ranges_stay_inside_and_do_not_collide(exponent: int, more: int) -> None:
    n = min(2**exponent + more, 2**50)
    entries = {permuted(i, n, 9) for i in [*range(500), *range(n - 500, n)]}
    assert len(entries) == 1000
    assert min(entries) >= 0
    assert max(entries) < n


@pytest.mark.parametrize("n", [2, 3, 5, PACKED, PACKED + 1, 20, 40])
def test_entries_are_even_over_keys(n: int) -> None:
    keys = 1000
    counts = np.zeros((n, n))
    for key in range(keys):
        counts[range(n), [permuted(i, n, key) for i in range(n)]] += 1
    expected = keys / n
    chi = ((counts - expected) ** 2 / expected).sum()
    freedom = (n - 1) ** 2
    assert abs(chi - freedom) < 5 * (2 * freedom) ** 0.5 + 5


def shuffled(n: int, key: int, epoch: int = 0, group: int = 0) -> list[int]:
    entries = np.arange(n)
    shuffle(entries, key, epoch, group)
    return [int(entry) for entry in entries]


@examples(30)
@given(st.integers(0, 200), st.integers(0, MASK), st.integers(0, MASK), st.integers(0, 2000))
def test_shuffle_equals_its_twin(n: int, key: int, epoch: int, group: int) -> None:
    assert shuffled(n, key, epoch, group) == (naive.shuffled(n, key, epoch, group) if n else [])


def test_shuffle_differs_by_key_epoch_and_group() -> None:
    assert len({tuple(shuffled(50, *numbers)) for numbers in np.ndindex(5, 5, 5)}) == 125


def test_all_orders_of_four_are_equally_likely() -> None:
    seen: dict[tuple[int, ...], int] = {}
    for epoch in range(24_000):
        order = tuple(shuffled(4, 3, epoch))
        seen[order] = seen.get(order, 0) + 1
    assert len(seen) == 24
    assert max(abs(count - 1000) for count in seen.values()) < 150
