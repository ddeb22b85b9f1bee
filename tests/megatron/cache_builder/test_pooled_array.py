from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from megablend.errors import CorruptFileError, MissingFileError
from megablend.megatron.cache_builder.pooled_array import PooledArray
from tests.storages import STORAGE


@pytest.mark.parametrize(
    "array",
    [
        np.arange(1000, dtype=np.uint32),
        np.arange(1000, dtype=np.int32).reshape(-1, 2),
        np.arange(6, dtype=np.int64).reshape(-1, 2) << 40,
        np.zeros(0, np.int32),
        np.zeros((1, 2), np.int32),
    ],
    ids=lambda array: f"{array.dtype}-{array.shape}",
)
def test_entries_are_those_of_the_array(tmp_path: Path, array: np.ndarray) -> None:
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    found = pickle.loads(pickle.dumps(PooledArray(str(tmp_path / "a.npy"), storage=STORAGE)))
    assert (found.shape, found.dtype, len(found)) == (array.shape, array.dtype, len(array))
    assert np.array_equal(np.asarray(found), array)
    for i in (*range(0, len(array), 37), *range(-len(array), 0, 41)):
        assert np.array_equal(found[np.uint32(i) if i >= 0 else i], array[i])
        assert type(found[i]) is type(array[i])
    for part in (
        slice(3, 9),
        slice(None),
        slice(-5, None),
        slice(9, 3),
        slice(None, None, 2),
        np.array([], np.int64),
    ):
        assert np.array_equal(found[part], array[part])
    assert found.tolist() == array.tolist()
    assert (found.ndim, found.size, found.sum()) == (array.ndim, array.size, array.sum())
    assert not hasattr(found, "path_of")
    for i in (len(array), -len(array) - 1):
        with pytest.raises(
            IndexError,
            match=(rf"a\.npy: entry {i} is out of range: the array has {len(array)} entries"),
        ):
            found[i]


def test_operators_are_those_of_the_array(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.uint32)
    np.save(tmp_path / "a.npy", array)
    found = PooledArray(str(tmp_path / "a.npy"), storage=STORAGE)
    pairs = [
        (found == 3, array == 3),
        (found != found[::-1], array != array[::-1]),
        (found > 2, array > 2),
    ]
    pairs += [
        (found + 1, array + 1),
        (1 - found, 1 - array),
        (found @ found, array @ array),
        (-found, -array),
    ]
    pairs += [
        (array * found, array * array),
        (found & 1, array & 1),
        (np.add.reduce(found), np.add.reduce(array)),
    ]
    for result, expected in pairs:
        np.testing.assert_array_equal(result, expected, strict=True)
    with pytest.raises(TypeError, match="NotImplemented"):
        found += 1
    with pytest.raises(TypeError, match="NotImplemented"):
        np.add.at(found, 0, 1)
    assert repr(found) == f"PooledArray({str(tmp_path / 'a.npy')!r})"


def test_what_is_no_array_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    with pytest.raises(MissingFileError, match=r"a\.npy: no such file"):
        len(PooledArray(str(path), storage=STORAGE))
    path.write_bytes(b"x" * 300)
    with pytest.raises(CorruptFileError, match=r"a\.npy: not a \.npy file"):
        len(PooledArray(str(path), storage=STORAGE))
    np.save(path, np.asfortranarray(np.zeros((3, 2))))
    with pytest.raises(CorruptFileError, match=r"Fortran order .*expected"):
        len(PooledArray(str(path), storage=STORAGE))
    np.save(path, np.arange(100))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptFileError, match="truncated"):
        PooledArray(str(path), storage=STORAGE)[99]


def test_a_file_that_was_built_anew_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    for value in (1, 2):
        np.save(path, np.full(10, value))
        assert PooledArray(str(path), storage=STORAGE).tolist() == [value] * 10
        path.unlink()
