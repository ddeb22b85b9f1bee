"""Artefacts: bytes that numpy.save would write, present only when whole."""

from __future__ import annotations

import dataclasses
import errno
import io
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablend.errors import CacheError
from megablend.megatron.cache_builder import commit
from megablend.megatron.cache_builder.artefacts import ArraySpec, Artefact, problem_with
from megablend.megatron.cache_builder.commit import WORK_FOLDER, ArtefactWriter, Commits
from tests.examples import examples

ARTEFACT = Artefact(
    base="f00-GPTDataset-train",
    description="{}",
    arrays=(
        ArraySpec(name="sample_index", shape=(3, 2), dtype="int32"),
        ArraySpec(name="shuffle_index", shape=(4,), dtype="uint32"),
    ),
)
OTHER = dataclasses.replace(ARTEFACT, base=f"{ARTEFACT.base}2")
SAMPLES = np.arange(6, dtype=np.int32).reshape(3, 2)
SHUFFLED = np.arange(4, dtype=np.uint32)


def saved(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


@contextmanager
def committing(cache: Path) -> Iterator[Commits]:
    """Commit as a build does: the last artefacts at its end, unless there is an error."""
    commits = Commits(cache, threading.Event())
    try:
        yield commits
        commits.finish()
    finally:
        commits.close()


def write(cache: Path) -> None:
    (cache / WORK_FOLDER).mkdir(exist_ok=True)
    with committing(cache) as commits, ArtefactWriter(ARTEFACT, commits) as out:
        with out.array("sample_index") as file:
            file.append(SAMPLES[:1])
            file.append(SAMPLES[1:])
        out.write("shuffle_index", SHUFFLED)


@examples(100)
@given(
    st.lists(st.integers(0, 3) | st.just(0), min_size=1, max_size=2),
    st.sampled_from(["int16", "int32", "uint32", "int64"]),
)
def test_headers_are_those_of_numpy(shape: list[int], dtype: str) -> None:
    spec = ArraySpec(name="x", shape=tuple(shape), dtype=dtype)
    assert spec.header == saved(np.zeros(shape, dtype))[: -spec.nbytes or None]
    wide = ArraySpec(name="x", shape=(1 << 40, 2), dtype=dtype)
    assert len(wide.header) % 64 == 0


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
        (b"", r"sample_index\.npy: not a \.npy file"),
        (
            saved(SAMPLES)[:-1],
            r"contains int32 \[3, 2\] in 23 bytes; expected contains int32 \[3, 2\] in 24 bytes",
        ),
        (saved(SAMPLES)[:100], r"sample_index\.npy: not a \.npy file"),
        (saved(SAMPLES).replace(b"(3, 2)", b"(3, 2 "), r"sample_index\.npy: not a \.npy file"),
        (saved(SAMPLES[:2]), r"contains int32 \[2, 2\] in 16 bytes"),
        (saved(SAMPLES.astype(np.int64)), r"contains int64 \[3, 2\] in 48 bytes"),
        (saved(np.asfortranarray(SAMPLES)), r"contains Fortran int32"),
    ],
)
def test_arrays_that_are_not_whole_are_no_hit(
    array: bytes | None, message: str, tmp_path: Path
) -> None:
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
    assert "the text does not match the hash in the file's name" in (
        problem_with(ARTEFACT, tmp_path) or ""
    )


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with (
            committing(tmp_path) as commits,
            ArtefactWriter(ARTEFACT, commits) as out,
        ):
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
    ARTEFACT.path(
        tmp_path, "shuffle_index"
    ).mkdir()  # renaming a file onto it fails, after the first array's
    path = re.escape(str(ARTEFACT.path(tmp_path, "shuffle_index")))
    with pytest.raises(CacheError, match=rf"^{path}: cannot write the cache"):
        write(tmp_path)
    assert not ARTEFACT.description_path(tmp_path).exists()


def test_a_description_that_cannot_be_removed_is_named_with_its_folder(tmp_path: Path) -> None:
    ARTEFACT.description_path(tmp_path).mkdir()
    with pytest.raises(
        CacheError, match=rf"^{re.escape(str(ARTEFACT.description_path(tmp_path)))}: cannot write"
    ):
        write(tmp_path)


def test_a_file_that_cannot_be_created_is_named_with_its_folder(tmp_path: Path) -> None:
    (tmp_path / WORK_FOLDER).mkdir()
    with committing(tmp_path) as commits:
        (commits.folder / "x").mkdir()
        with (
            pytest.raises(
                CacheError, match=rf"^{re.escape(str(commits.folder))}/x: cannot write the cache"
            ),
            commits.new_file("x"),
        ):
            pass


def test_an_array_in_thousands_of_parts(tmp_path: Path) -> None:
    """More than the system writes at once."""
    rows = np.arange(6000, dtype=np.int32).reshape(3000, 2)
    spec = ArraySpec(name="sample_index", shape=rows.shape, dtype="int32")
    artefact = Artefact(base="f00-GPTDataset-train", description="{}", arrays=(spec,))
    (tmp_path / WORK_FOLDER).mkdir()
    with (
        committing(tmp_path) as commits,
        ArtefactWriter(artefact, commits) as out,
        out.array("sample_index") as file,
    ):
        for i in range(len(rows)):
            file.append(rows[i : i + 1])
    assert artefact.path(tmp_path, "sample_index").read_bytes() == saved(rows)


def artefacts(number: int) -> list[Artefact]:
    """Some of one array each."""
    spec = ArraySpec(name="shuffle_index", shape=(4,), dtype="uint32")
    return [
        Artefact(base=f"f{i:02}-GPTDataset-train", description=f'{{"{i}": 0}}', arrays=(spec,))
        for i in range(number)
    ]


@pytest.mark.parametrize("together", [True, False])
def test_no_name_appears_before_all_bytes_are_on_the_disk(
    together: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever a machine stops, no array is there without a flush, and no description without its arrays."""
    steps: list[str] = []
    real: dict[str, Callable[..., Any]] = {
        "syncfs": commit._syncfs,
        "fsync": os.fsync,
        "rename": os.rename,
    }

    def seen(step: str) -> None:
        names = {path.name for path in tmp_path.iterdir()}
        described = {name for name in names if name.endswith("description.txt")}
        assert all(
            name.replace("description.txt", "shuffle_index.npy") in names for name in described
        )
        assert not names - {WORK_FOLDER} or flushed(steps)
        steps.append(step)

    def flushed(steps: list[str]) -> bool:
        return "syncfs" in steps if together else steps.count("fsync") >= 2 * 5

    monkeypatch.setattr(commit, "can_flush_together", lambda folder: together)

    def watched(step: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            result = real[step](*args, **options)
            seen(step)
            return result

        return call

    monkeypatch.setattr(commit, "_syncfs", watched("syncfs"))
    monkeypatch.setattr(os, "fsync", watched("fsync"))
    monkeypatch.setattr(os, "rename", watched("rename"))
    (tmp_path / WORK_FOLDER).mkdir()
    with committing(tmp_path) as commits:
        for artefact in artefacts(5):
            with ArtefactWriter(artefact, commits) as out:
                out.write("shuffle_index", SHUFFLED)
        assert [path.name for path in tmp_path.iterdir()] == [WORK_FOLDER]
    assert [problem_with(artefact, tmp_path) for artefact in artefacts(5)] == [None] * 5
    assert steps.count("rename") == 10
    assert steps.count("syncfs") == together


def test_a_full_batch_is_committed_before_the_build_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "_MIN_BATCH_BYTES", 2 * SHUFFLED.nbytes)
    (tmp_path / WORK_FOLDER).mkdir()
    with committing(tmp_path) as commits:
        for number, artefact in enumerate(artefacts(3)):
            with ArtefactWriter(artefact, commits) as out:
                out.write("shuffle_index", SHUFFLED)
            assert len(list(tmp_path.glob("*.txt"))) == (0, 2, 2)[number]
    assert len(list(tmp_path.glob("*.txt"))) == 3


def test_what_was_written_before_an_error_is_not_committed(tmp_path: Path) -> None:
    first, second = artefacts(2)

    def fail() -> None:
        with committing(tmp_path) as commits:
            with ArtefactWriter(first, commits) as out:
                out.write("shuffle_index", SHUFFLED)
            with ArtefactWriter(second, commits) as out:
                raise ZeroDivisionError("in the second")

    (tmp_path / WORK_FOLDER).mkdir()
    with pytest.raises(ZeroDivisionError, match="in the second"):
        fail()
    assert [path.name for path in tmp_path.rglob("*")] == [WORK_FOLDER]


def write_two(cache: Path) -> None:
    """Write the files of ARTEFACT, and of another one of the same content."""
    (cache / WORK_FOLDER).mkdir(exist_ok=True)
    with committing(cache) as commits:
        for artefact in (ARTEFACT, OTHER):
            with ArtefactWriter(artefact, commits) as out:
                out.write("sample_index", SAMPLES)
                out.write("shuffle_index", SHUFFLED)


@pytest.mark.parametrize("together", [True, False])
def test_files_of_two_artefacts(
    together: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    flush = os.fsync

    def note_flush(fd: int) -> None:
        flushed.append(fd)
        flush(fd)

    monkeypatch.setattr(commit, "can_flush_together", lambda folder: together)
    monkeypatch.setattr(os, "fsync", note_flush)
    write_two(tmp_path)
    for artefact in (ARTEFACT, OTHER):
        assert artefact.path(tmp_path, "sample_index").read_bytes() == saved(SAMPLES)
        assert artefact.path(tmp_path, "shuffle_index").read_bytes() == saved(SHUFFLED)
        assert artefact.description_path(tmp_path).read_bytes() == b"{}"
    assert list((tmp_path / WORK_FOLDER).iterdir()) == []
    assert together or len(flushed) >= 6  # each file, where the file system cannot flush all


@pytest.mark.parametrize("written", [1, 4])
def test_a_disk_that_is_full_is_reported_and_nothing_is_left(
    written: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some files have been written; full as os.open sees it."""
    open_ = os.open
    created = []

    def refuse(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_CREAT:
            created.append(path)
            if len(created) > written:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return open_(path, flags, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(
            CacheError, match=r"shuffle_index\.npy: cannot write the cache \(No space"
        ):
            write_two(tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == [WORK_FOLDER]
