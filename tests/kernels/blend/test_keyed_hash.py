import numpy as np
import pytest

from megablend.kernels.blend.keyed_hash import MASK, bounded_hash, hash_combine, mix


def python(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


@pytest.mark.parametrize("x", [0, 1, 2, 1 << 31, 1 << 62, MASK - 1, MASK])
def test_equals_unbounded_integers(x: int) -> None:
    assert mix(np.uint64(x)) == python(x)
    for value in (0, 1, MASK):
        assert (
            hash_combine(x, value) == python(python((x + 0x9E3779B97F4A7C15) % 2**64) ^ value) >> 1
        )


def test_first_number_of_splitmix64() -> None:
    assert mix(np.uint64(0x9E3779B97F4A7C15)) == 0xE220A8397B1DCDAF  # the generator seeded with 0


def test_every_bit_of_key_and_value_changes_half_of_the_bits() -> None:
    base = hash_combine(1, 2)
    flips = [(hash_combine(1 ^ 1 << bit, 2) ^ base).bit_count() for bit in range(63)]
    flips += [(hash_combine(1, 2 ^ 1 << bit) ^ base).bit_count() for bit in range(63)]
    assert min(flips) > 12
    assert max(flips) < 51
    assert 30 < np.mean(flips) < 33


def test_draws_are_even() -> None:
    counts = np.bincount([bounded_hash(5, value, 7) for value in range(70_000)], minlength=7)
    assert np.abs(counts - 10_000).max() < 400
