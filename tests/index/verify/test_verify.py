from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from megablend.errors import CacheError, DamagedCacheError
from megablend.index.read.snapshot import open_snapshot
from megablend.index.tables.list_snapshots import list_snapshots
from megablend.index.tables.tables import read_batch
from megablend.index.verify.verify import verify
from tests.index.index_data import build, documents_of, spec, write
from tests.storages import STORAGE


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for seed, name in enumerate("abc"):
        write(tmp_path / "data" / f"{name}.arrow", seed)
    return tmp_path / "data"


@pytest.fixture
def cache(tmp_path: Path, data: Path) -> Path:
    build(tmp_path / "cache", spec(data))
    return tmp_path / "cache"


def snapshot(cache: Path) -> Path:
    return cache / "generations" / list_snapshots(str(cache))[-1]


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


def test_a_sound_cache_has_no_problems(cache: Path) -> None:
    assert verify(str(cache), data=False, storage=STORAGE) == []
    assert verify(str(cache), data=True, storage=STORAGE) == []


def test_no_cache_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="nowhere: there is no cache here"):
        verify(str(tmp_path / "nowhere"), data=False, storage=STORAGE)


@pytest.mark.parametrize("name", ["blocks.arrow", "chunks.arrow", "files.arrow", "manifest.json"])
@pytest.mark.parametrize("part", [0.0, 0.3, 0.5, 0.7, 0.999])
def test_any_changed_byte_of_a_snapshot_is_found(cache: Path, name: str, part: float) -> None:
    path = snapshot(cache) / name
    flip(path, int(path.stat().st_size * part))
    problems = verify(str(cache), data=False, storage=STORAGE)
    assert problems
    assert str(path) in problems[0]


@pytest.mark.parametrize("name", ["blocks.arrow", "chunks.arrow", "files.arrow"])
def test_any_overwritten_byte_of_a_table_is_found(cache: Path, name: str) -> None:
    path = snapshot(cache) / name
    content = path.read_bytes()
    for at in range(0, len(content), 31):
        path.write_bytes(content[:at] + b"\xff" + content[at + 1 :])
        problems = verify(str(cache), data=False, storage=STORAGE)
        assert content[at] == 0xFF or str(path) in problems[0]
        with contextlib.suppress(CacheError):
            open_snapshot(str(cache), snapshot(cache).name)


@pytest.mark.parametrize(
    "name", ["blocks.arrow", "chunks.arrow", "files.arrow", "manifest.json", "roots.json"]
)
def test_a_truncated_snapshot_is_not_opened(cache: Path, name: str) -> None:
    path = snapshot(cache) / name
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(CacheError, match=rf"{path}.*build again to repair it"):
        open_snapshot(str(cache), snapshot(cache).name)
    assert str(path) in verify(str(cache), data=False, storage=STORAGE)[0]


def test_a_damaged_fragment_is_found(cache: Path) -> None:
    path = sorted((cache / "fragments").iterdir())[0]
    flip(path, 200)
    (problem,) = verify(str(cache), data=False, storage=STORAGE)
    assert problem.startswith(f"{path}: damaged fragment")


def test_data_that_changed_or_went_is_found_by_reading_it(data: Path, cache: Path) -> None:
    write(data / "a.arrow", 55)
    (data / "b.arrow").unlink()
    assert verify(str(cache), data=False, storage=STORAGE) == []
    problems = verify(str(cache), data=True, storage=STORAGE)
    assert len(problems) == 2
    assert problems[0].startswith(f"{data}/a.arrow")
    assert problems[1].startswith(f"{data}/b.arrow")


def test_a_changed_token_is_found_where_it_was_sampled(data: Path, cache: Path) -> None:
    content = (data / "c.arrow").read_bytes()
    flip(data / "c.arrow", content.index(np.array(documents_of(2)[1][:2], np.int32).tobytes()))
    (problem,) = verify(str(cache), data=True, storage=STORAGE)
    assert problem.startswith(f"{data}/c.arrow: is not the file that was indexed")


def test_a_newer_format_is_refused_by_name(cache: Path) -> None:
    path = snapshot(cache) / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"format_version": 2, "written_by": "megablend 9.0"}))
    with pytest.raises(
        CacheError, match=r"format version 2 by megablend 9.0; .* up to version 1: upgrade"
    ):
        open_snapshot(str(cache), path.parent.name)


def test_an_unknown_snapshot_lists_those_there_are(cache: Path) -> None:
    with pytest.raises(
        CacheError, match=rf"this version of the index does not exist .*{snapshot(cache).name}"
    ):
        open_snapshot(str(cache), "0" * 32)
    folder = snapshot(cache)
    (folder / "manifest.json").unlink()
    assert (
        f"{folder}/manifest.json: cannot be read"
        in verify(str(cache), data=False, storage=STORAGE)[0]
    )
    shutil.rmtree(folder)
    with pytest.raises(CacheError, match="none"):
        open_snapshot(str(cache), "0" * 32)


def test_a_table_of_several_batches_is_damaged_and_its_error_travels(tmp_path: Path) -> None:
    """An error of a worker process says where, how and what to do once, and what it says without the last is kept."""
    batch = pa.RecordBatch.from_pydict({"number": [1]})
    with pa.ipc.new_file(tmp_path / "table.arrow", batch.schema) as writer:
        writer.write(batch)
        writer.write(batch)
    with pytest.raises(
        DamagedCacheError,
        match=r"table.arrow: damaged table: it has 2 record batches, expected 1; build",
    ) as found:
        read_batch(str(tmp_path / "table.arrow"), batch.schema)
    again = pickle.loads(pickle.dumps(found.value))
    assert (str(again), again.problem) == (str(found.value), found.value.problem)
    assert str(again) == f"{again.problem}; build again to repair it (`megablend build CONFIG`)"
