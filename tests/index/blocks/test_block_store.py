"""Files stay open as long as there is room for their readers."""

from __future__ import annotations

from pathlib import Path

import pytest

from megablend.index.blocks.block_store import BlockStore
from megablend.index.read.snapshot import open_snapshot
from tests.index.index_data import build, spec, write
from tests.storages import STORAGE


@pytest.mark.parametrize(("open_bytes", "kept"), [(32 << 20, 6), (6000, 2)])
def test_as_many_readers_are_kept_as_there_is_room_for(
    tmp_path: Path, open_bytes: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megablend.index.blocks.open_files.OPEN_BYTES", open_bytes)
    monkeypatch.setattr("megablend.index.blocks.open_files.MIN_OPEN_FILES", 1)
    for seed in range(6):
        write(tmp_path / "data" / f"{seed}.arrow", seed)
    store = BlockStore(
        open_snapshot(
            tmp_path / "cache", build(tmp_path / "cache", spec(tmp_path / "data")).digest
        ),
        storage=STORAGE,
    )
    expected = [
        block.tokens.tolist()
        for block in store.read(range(store.snapshot.files.entry(5).first_block))
    ]
    again = [
        block.tokens.tolist()
        for block in store.read(range(store.snapshot.files.entry(5).first_block))
    ]
    assert again == expected
    store.read([store.snapshot.files.entry(5).first_block])
    assert len(store._files._opened._values) == kept
