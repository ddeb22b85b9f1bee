from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from megablend.megatron.exact.shuffle import SMALL, shuffle


def check(array: npt.NDArray[Any], state: np.random.RandomState, twin: np.random.RandomState) -> None:
    expected = array.copy()
    shuffle(array, state)
    twin.shuffle(expected)
    np.testing.assert_array_equal(array, expected)
    state.randint(5)
    twin.randint(5)
    for found, wanted in zip(state.get_state(), twin.get_state(), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, np.uint64, np.int16, np.float32])
@pytest.mark.parametrize("size", [0, 1, SMALL - 1, SMALL, SMALL + 1])
def test_array_and_state_as_numpy(dtype: Any, size: int) -> None:
    state, twin = np.random.RandomState(9), np.random.RandomState(9)
    assert state.standard_normal() == twin.standard_normal()  # leaves a second one in the state
    for _ in range(2):
        check(np.arange(size).astype(dtype), state, twin)


def test_other_arrays_and_generators_go_to_numpy() -> None:
    check(np.arange(4 * SMALL, dtype=np.int32)[::2], np.random.RandomState(1), np.random.RandomState(1))
    check(np.arange(3 * SMALL, dtype=np.int32).reshape(-1, 3), np.random.RandomState(1), np.random.RandomState(1))
    pcg, twin = (np.random.RandomState(np.random.PCG64(1)) for _ in range(2))
    expected = np.arange(SMALL)
    found = expected.copy()
    shuffle(found, pcg)
    twin.shuffle(expected)
    np.testing.assert_array_equal(found, expected)


def test_mapped_arrays(tmp_path: Any) -> None:
    mapped = np.memmap(tmp_path / "array", np.uint32, "w+", shape=SMALL + 5)
    mapped[:] = np.arange(SMALL + 5)
    check(mapped, np.random.RandomState(2), np.random.RandomState(2))
