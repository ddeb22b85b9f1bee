from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from megablend.megatron.exact.shuffle import Generator

MANY = 1 << 16


def check(array: npt.NDArray[Any], generator: Generator, twin: np.random.RandomState) -> None:
    expected = array.copy()
    generator.shuffle(array)
    twin.shuffle(expected)
    np.testing.assert_array_equal(array, expected)
    state: Any = twin.get_state(legacy=False)["state"]
    np.testing.assert_array_equal(generator.key, state["key"])
    assert generator.position == state["pos"]


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, np.uint64])
@pytest.mark.parametrize("size", [0, 1, 2, MANY - 1, MANY, MANY + 1])
def test_array_and_state_as_numpy(dtype: Any, size: int) -> None:
    generator = Generator(9)
    twin = np.random.RandomState(9)
    for _ in range(2):
        check(np.arange(size).astype(dtype), generator, twin)


def test_mapped_arrays(tmp_path: Any) -> None:
    mapped = np.memmap(tmp_path / "array", np.uint32, "w+", shape=MANY + 5)
    mapped[:] = np.arange(MANY + 5)
    check(mapped, Generator(2), np.random.RandomState(2))
