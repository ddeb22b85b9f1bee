from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablend.kernels.exact.numpy_shuffle import AHEAD, BUFFER, shuffle
from tests import naive_megatron as naive
from tests.examples import examples

SIZES = [0, 1, 2, 3, 4, 5, AHEAD, AHEAD + 1, AHEAD + 2, 255, 256, 257, 467, 468, 469, 623, 624, 625]
LONG = [
    BUFFER - 1,
    BUFFER,
    BUFFER + 1,
    BUFFER + 2,
    3 * BUFFER + 1,
    2**15 + 1,
    2**17 - 1,
    2**17,
    2**17 + 1,
]


def parts(state: np.random.RandomState) -> tuple[Any, int]:
    generator = state.get_state(legacy=False)
    return generator["state"]["key"], generator["state"]["pos"]


def check(size: int, dtype: Any, seed: int, used: int) -> None:
    state = np.random.RandomState(seed)
    state.randint(0, 2**32, used, dtype=np.uint32)
    entries = np.arange(size, dtype=dtype)
    expected = entries.copy()
    key, position = parts(state)
    for _ in range(2):  # the second begins inside a batch of words
        position = shuffle(entries, key, position)
        state.shuffle(expected)
        np.testing.assert_array_equal(entries, expected)
        expected_key, expected_position = parts(state)
        np.testing.assert_array_equal(key, expected_key)
        assert position == expected_position


@pytest.mark.parametrize("size", SIZES)
def test_as_numpy(size: int) -> None:
    check(size, np.uint32, 1234, 0)


@pytest.mark.compiled
@pytest.mark.parametrize("size", LONG)
@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_long_ones_as_numpy(size: int, dtype: Any) -> None:
    check(size, dtype, 7, 1)


@examples(60)
@given(st.integers(0, 1500), st.integers(0, 2**32 - 1), st.integers(0, 1300))
def test_as_numpy_from_any_state(size: int, seed: int, used: int) -> None:
    check(size, np.uint32, seed, used)


@pytest.mark.parametrize("position", [0, 1, 623, 624])
def test_as_the_twin(position: int) -> None:
    key = np.random.RandomState(3).randint(0, 2**32, 624, dtype=np.uint32)
    twin = naive.Generator(key.tolist(), position)
    expected = list(range(700))
    twin.shuffle(expected)
    entries = np.arange(700, dtype=np.uint32)
    position = shuffle(entries, key, position)
    assert entries.tolist() == expected
    assert (key.tolist(), position) == twin.state()
