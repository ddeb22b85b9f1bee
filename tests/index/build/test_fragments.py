from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from megablend.errors import CacheError
from megablend.formats.base import BLOCK_DTYPE, CHUNK_DTYPE, FileIndex
from megablend.index.build.fragments import (
    Fragment,
    fragment_name,
    read_fragment,
    split_name,
    write_fragment,
)
from megablend.index.build.source_spec import list_columns
from megablend.index.build.sources import list_source
from tests.index.index_data import spec, write
from tests.storages import STORAGE


def fragment(num_blocks: int) -> Fragment:
    blocks = np.zeros(num_blocks, BLOCK_DTYPE)
    blocks["offset"] = np.arange(num_blocks) * (1 << 40)
    blocks["rows"] = -1
    index = FileIndex(
        rows=3,
        tokens=1 << 50,
        token_dtype="uint16",
        chunks=np.ones(2, CHUNK_DTYPE),
        blocks=blocks,
        structure="ab" * 16,
        meta={"path": ["a", "ü"], "lengths": [1, 2]},
        scanned_bytes=7,
    )
    return Fragment.of(index, "cd" * 16)


@pytest.mark.parametrize("num_blocks", [0, 1, 1000])
def test_a_fragment_comes_back_as_it_was(tmp_path: Path, num_blocks: int) -> None:
    path = tmp_path / "fragment"
    written = fragment(num_blocks)
    write_fragment(path, written)
    found = read_fragment(path)
    assert found.body == written.body
    for name in ("rows", "tokens", "token_dtype", "structure", "meta", "scanned_bytes"):
        assert getattr(found, name) == getattr(written, name)
    np.testing.assert_array_equal(found.chunks, written.chunks)
    np.testing.assert_array_equal(found.blocks, written.blocks)


def test_no_damage_is_taken_for_a_fragment(tmp_path: Path) -> None:
    path = tmp_path / "fragment"
    write_fragment(path, fragment(20))
    whole = path.read_bytes()
    chance = random.Random(5)
    for _ in range(60):
        content = bytearray(whole)
        content[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        path.write_bytes(content[: chance.choice([len(whole), chance.randrange(len(whole))])])
        with pytest.raises(CacheError, match=rf"{path}: damaged fragment"):
            read_fragment(path)


def test_a_fragment_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    says = rf"{tmp_path}: cannot be read \(Is a directory\); remove it and build again"
    with pytest.raises(CacheError, match=says):
        read_fragment(tmp_path)


def test_names_tell_what_was_asked_and_which_version_answered(tmp_path: Path) -> None:
    write(tmp_path / "a.arrow", 1)
    (column,) = list_columns([list_source(spec(tmp_path), storage=STORAGE)])
    counted, uncounted = (
        fragment_name(column, column.files[0], documents=asked) for asked in (True, False)
    )
    assert split_name(counted)[0] == split_name(uncounted)[0]
    assert split_name(counted)[1] != split_name(uncounted)[1]
    write(tmp_path / "a.arrow", 2)
    (column,) = list_columns([list_source(spec(tmp_path), storage=STORAGE)])
    later = fragment_name(column, column.files[0], documents=True)
    assert split_name(later)[0] == split_name(counted)[0]
    assert split_name(later)[1] != split_name(counted)[1]
