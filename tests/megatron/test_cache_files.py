"""Artefacts: bytes that numpy.save would write, present only when whole."""

from __future__ import annotations

import io
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megablend.errors import CacheError
from megablend.megatron.artefacts import ArraySpec, Artefact, problem_with
from megablend.megatron.write import WORK_FOLDER, ArtefactWriter

ARTEFACT = Artefact(
    base="f00-GPTDataset-train",
    description="{}",
    arrays=(
        ArraySpec(name="sample_index", shape=(3, 2), dtype="int32"),
        ArraySpec(name="shuffle_index", shape=(4,), dtype="uint32"),
    ),
)
SAMPLES, SHUFFLED = np.arange(6, dtype=np.int32).reshape(3, 2), np.arange(4, dtype=np.uint32)


def saved(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def write(cache: Path) -> None:
    (cache / WORK_FOLDER).mkdir(exist_ok=True)
    with ArtefactWriter(ARTEFACT, cache, threading.Event()) as out:
        with out.array("sample_index") as file:
            file.extend([SAMPLES[:1], SAMPLES[1:]])
        out.write("shuffle_index", SHUFFLED)


@settings(derandomize=True, max_examples=100)
@given(
    st.lists(st.integers(0, 3) | st.just(0), min_size=1, max_size=2),
    st.sampled_from(["int16", "int32", "uint32", "int64"]),
)
def test_headers_are_those_of_numpy(shape: list[int], dtype: str) -> None:
    spec = ArraySpec(name="x", shape=tuple(shape), dtype=dtype)
    assert spec.header() == saved(np.zeros(shape, dtype))[: -spec.nbytes or None]
    wide = ArraySpec(name="x", shape=(1 << 40, 2), dtype=dtype)
    assert len(wide.header()) % 64 == 0


def test_files_are_those_of_numpy_save(tmp_path: Path) -> None:
    assert problem_with(ARTEFACT, tmp_path) == ""
    write(tmp_path)
    assert ARTEFACT.path(tmp_path, "sample_index").read_bytes() == saved(SAMPLES)
    assert ARTEFACT.path(tmp_path, "shuffle_index").read_bytes() == saved(SHUFFLED)
    assert ARTEFACT.description_path(tmp_path).read_bytes() == b"{}"
    assert problem_with(ARTEFACT, tmp_path) is None
    assert list((tmp_path / WORK_FOLDER).iterdir()) == []


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (None, r"sample_index\.npy: cannot be read \(No such file"),
        (b"", r"sample_index\.npy: is no \.npy file"),
        (saved(SAMPLES)[:-1], r"holds int32 \[3, 2\] in 23 bytes; expected holds int32 \[3, 2\] in 24 bytes"),
        (saved(SAMPLES)[:100], r"sample_index\.npy: is no \.npy file"),
        (saved(SAMPLES).replace(b"(3, 2)", b"(3, 2 "), r"sample_index\.npy: is no \.npy file"),
        (saved(SAMPLES[:2]), r"holds int32 \[2, 2\] in 16 bytes"),
        (saved(SAMPLES.astype(np.int64)), r"holds int64 \[3, 2\] in 48 bytes"),
        (saved(np.asfortranarray(SAMPLES)), r"holds Fortran int32"),
    ],
)
def test_arrays_that_are_not_whole_are_no_hit(array: bytes | None, message: str, tmp_path: Path) -> None:
    write(tmp_path)
    path = ARTEFACT.path(tmp_path, "sample_index")
    path.unlink()
    if array is not None:
        path.write_bytes(array)
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(problem_with(ARTEFACT, tmp_path))
    write(tmp_path)
    assert problem_with(ARTEFACT, tmp_path) is None


def test_another_description_is_no_hit(tmp_path: Path) -> None:
    write(tmp_path)
    ARTEFACT.description_path(tmp_path).write_text("{")
    assert "is not the description that its name is the hash of" in (problem_with(ARTEFACT, tmp_path) or "")


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with ArtefactWriter(ARTEFACT, tmp_path, threading.Event()) as out:
            out.write("sample_index", SAMPLES)
            raise ZeroDivisionError("between two arrays")

    (tmp_path / WORK_FOLDER).mkdir()
    with pytest.raises(ZeroDivisionError, match="between two arrays"):
        fail()
    assert [path.name for path in tmp_path.rglob("*")] == [WORK_FOLDER]


def test_the_description_goes_before_arrays_are_replaced(tmp_path: Path) -> None:
    """A build that dies between two arrays leaves no description that old and new ones share."""
    write(tmp_path)
    ARTEFACT.path(tmp_path, "shuffle_index").unlink()
    ARTEFACT.path(tmp_path, "shuffle_index").mkdir()  # renaming a file onto it fails, after the first array's
    with pytest.raises(CacheError, match=r"cannot write the cache"):
        write(tmp_path)
    assert not ARTEFACT.description_path(tmp_path).exists()
