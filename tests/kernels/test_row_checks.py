from __future__ import annotations

import numpy as np
import pytest

from megablend.kernels.row_checks import row_checks

WORD = (1 << 64) - 1


def naive(row: int, values: list[int]) -> int:
    """By Python's integers, with the constants of SplitMix64 as its authors print them."""

    def mixed(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & WORD
        z = (z ^ z >> 27) * 0x94D049BB133111EB & WORD
        return z ^ z >> 31

    state = mixed(row + 0x9E3779B97F4A7C15 & WORD)
    for value in values:
        state = mixed(state ^ value & WORD)
    return state >> 32


@pytest.mark.parametrize("num_columns", [1, 3, 6])
def test_the_kernel_gives_what_plain_integers_give(num_columns: int) -> None:
    rng = np.random.default_rng(num_columns)
    rows = rng.integers(0, 1 << 62, 100)
    values = rng.integers(-(1 << 63), 1 << 63, (num_columns, 100))
    values[:, :3] = [[-1, 0, 1]] * num_columns
    expected = [
        naive(int(row), column.tolist()) for row, column in zip(rows, values.T, strict=True)
    ]
    out = np.empty(100, np.uint32)
    row_checks(rows.view(np.uint64), values.view(np.uint64), out)
    assert out.tolist() == expected


def test_the_format_on_disk() -> None:
    """These numbers lie in caches: never change them."""
    values = np.array([[0, 1, -1], [5, 6, 1 << 40]])
    out = np.empty(3, np.uint32)
    row_checks(np.array([0, 1, 10**8], np.uint64), values.view(np.uint64), out)
    assert out.tolist() == [851071573, 722752803, 100363135]
