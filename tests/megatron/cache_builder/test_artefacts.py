"""Files of a cache, and headers of `.npy` files."""

from __future__ import annotations

import gc
import io
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from megablend.megatron.cache_builder import artefacts
from megablend.megatron.cache_builder.artefacts import (
    ArraySpec,
    Artefact,
    problem_with,
    read_header,
)


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Threads take turns as often as they can, also while Python parses: where memory is collected."""
    before = sys.getswitchinterval()
    threshold = gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(5)
    gc.callbacks.append(_wait)
    yield
    gc.callbacks.remove(_wait)
    gc.set_threshold(*threshold)
    sys.setswitchinterval(before)


def _wait(phase: str, info: dict[str, int]) -> None:
    time.sleep(0)


@pytest.mark.usefixtures("frequent_switches")
def test_threads_read_headers_at_the_same_time() -> None:
    file = io.BytesIO()
    np.save(file, np.arange(48, dtype=np.int32))
    data = file.getvalue()

    def read(_: int) -> None:
        for _ in range(30):
            assert read_header(io.BytesIO(data)) == ((1, 0), (48,), False, np.dtype(np.int32))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, range(16)))


ARTEFACT = Artefact(
    base="00-GPTDataset-train",
    description='{"a": "\u00e4"}',
    arrays=(
        ArraySpec(name="document_index", shape=(12,), dtype="int32"),
        ArraySpec(name="sample_index", shape=(5, 2), dtype="int64"),
    ),
)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache as Megatron writes it."""
    ARTEFACT.description_path(tmp_path).write_text(ARTEFACT.description, encoding="utf-8")
    for array in ARTEFACT.arrays:
        np.save(ARTEFACT.path(tmp_path, array.name), np.zeros(array.shape, array.dtype))
    return tmp_path


def test_no_header_of_a_whole_cache_is_parsed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = list[str]()

    def parse(file: io.BufferedReader) -> None:
        parsed.append(file.name)

    monkeypatch.setattr(artefacts, "read_header", parse)
    assert problem_with(ARTEFACT, cache) is None
    assert not parsed


def test_a_header_that_is_written_otherwise_is_as_good(cache: Path) -> None:
    array = ARTEFACT.arrays[0]
    text = b"{'shape': (12,), 'fortran_order': False, 'descr': '<i4'}"
    header = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
    ARTEFACT.path(cache, array.name).write_bytes(header + bytes(array.nbytes))
    assert problem_with(ARTEFACT, cache) is None


@pytest.mark.parametrize("name", ARTEFACT.file_names)
def test_a_file_that_is_not_whole_is_a_problem(cache: Path, name: str) -> None:
    path = cache / name
    whole = path.read_bytes()
    for content in (whole[:-1], whole + b"0", b"", b"\0" + whole[1:], whole[:9]):
        path.write_bytes(content)
        assert problem_with(ARTEFACT, cache)
    path.unlink()
    missing = problem_with(ARTEFACT, cache)
    assert missing == "" if name.endswith(".txt") else missing
    path.mkdir()
    assert problem_with(ARTEFACT, cache)
