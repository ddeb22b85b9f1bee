"""Numbers in files of their own are what was stored, or are told to be damaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megablend.errors import CacheError
from megablend.index.tables.sealed_numbers import (
    ComputedNumbers,
    pack_numbers,
    parse_numbers,
    read_numbers,
)

NUMBERS = np.array([1, -2, 1 << 40])
INT64 = np.dtype(np.int64)
STORED = pack_numbers(NUMBERS, b"magic", b"key")


def test_numbers_come_back_as_they_were() -> None:
    found = parse_numbers(STORED, INT64, 3, b"magic", b"key")
    assert found is not None
    np.testing.assert_array_equal(found, NUMBERS)
    found = parse_numbers(STORED, INT64, None, b"magic", b"key")
    assert found is not None
    np.testing.assert_array_equal(found, NUMBERS)
    found = parse_numbers(pack_numbers(NUMBERS[:0]), INT64)
    assert found is not None
    assert not len(found)


@pytest.mark.parametrize(
    ("count", "magic", "key"),
    [
        (2, b"magic", b"key"),
        (4, b"magic", b"key"),
        (3, b"Magic", b"key"),
        (3, b"magic", b""),
        (3, b"magic", b"other"),
    ],
)
def test_numbers_of_something_else_are_not_taken(count: int, magic: bytes, key: bytes) -> None:
    assert parse_numbers(STORED, INT64, count, magic, key) is None


def test_each_flipped_bit_and_each_cut_is_found() -> None:
    for bit in range(8 * len(STORED)):
        damaged = bytearray(STORED)
        damaged[bit // 8] ^= 1 << bit % 8
        assert parse_numbers(bytes(damaged), INT64, None, b"magic", b"key") is None
    for size in range(len(STORED)):
        assert parse_numbers(STORED[:size], INT64, None, b"magic", b"key") is None


def test_a_missing_file_is_none_and_a_damaged_one_an_error_where_it_is_not_computed_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "numbers"
    assert read_numbers(path, INT64) is None
    path.write_bytes(STORED[:-1])
    with pytest.raises(
        CacheError, match=rf"^{path}: damaged \(its checksum is wrong\); build again"
    ):
        read_numbers(path, INT64, 3, b"magic", b"key")
    path.unlink()
    path.mkdir()
    with pytest.raises(CacheError, match=rf"^{path}: cannot be read \(Is a directory\)"):
        read_numbers(path, INT64)


def test_computed_numbers_are_found_by_all_that_they_depend_on(tmp_path: Path) -> None:
    ComputedNumbers(tmp_path, "owner", ["request", 1]).keep(NUMBERS)
    (path,) = (tmp_path / "splits").iterdir()
    assert path.name.startswith("owner-")
    found = ComputedNumbers(tmp_path, "owner", ["request", 1]).find(INT64, 3)
    assert found is not None
    np.testing.assert_array_equal(found, NUMBERS)
    stored = path.read_bytes()
    path.write_bytes(stored[:-1])
    assert ComputedNumbers(tmp_path, "owner", ["request", 1]).find(INT64, 3) is None
    path.write_bytes(stored)
    assert ComputedNumbers(tmp_path, "owner", ["request", 2]).find(INT64, 3) is None
    path.rename(path.with_name(path.name.replace("owner", "other")))  # another's numbers
    other = ComputedNumbers(tmp_path, "other", ["request", 2])
    (tmp_path / "splits" / path.name.replace("owner", "other")).replace(other._path)
    assert other.find(INT64, 3) is None
