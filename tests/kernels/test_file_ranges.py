"""Ranges of a file, read by one call, against slices of its bytes."""

import random
from pathlib import Path

import numpy as np
import pytest

from megablend.kernels.file_ranges import read_ranges

CONTENT = random.Random(5).randbytes(5000)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "x").write_bytes(CONTENT)
    return tmp_path / "x"


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_ranges_are_slices(path: Path, seed: int, ahead: bool) -> None:
    rng = random.Random(seed)
    ranges = [
        (offset := rng.randrange(5001), rng.choice([0, 1, rng.randrange(5001 - offset)]))
        for _ in range(20)
    ]
    ranges = [(offset, min(size, 5000 - offset)) for offset, size in ranges]
    offsets, sizes = np.array(ranges).T.copy()
    begins = np.cumsum(sizes) - sizes + 3
    out = np.full(int(sizes.sum()) + 6, 7, np.uint8)
    with path.open("rb") as file:
        assert read_ranges(file.fileno(), offsets, sizes, begins, ahead, out) == 20
    assert out[3:-3].tobytes() == b"".join(
        CONTENT[offset : offset + size] for offset, size in ranges
    )
    assert out[:3].tolist() == out[-3:].tolist() == [7, 7, 7]


def test_the_first_range_that_does_not_come_is_named(path: Path) -> None:
    offsets = np.array([10, 4999, 4998, 0])
    sizes = np.array([5, 1, 3, 4])
    out = np.zeros(13, np.uint8)
    with path.open("rb") as file:
        assert read_ranges(file.fileno(), offsets, sizes, np.cumsum(sizes) - sizes, True, out) == 2
    assert out[:8].tobytes() == CONTENT[10:15] + CONTENT[4999:] + CONTENT[4998:]
