"""Long `.idx` files: readers look at the groups of lengths that they need, compared with digests that `build` made."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from megablend.config.read_spec import ReadSpec
from megablend.errors import ChangedFileError, DataError
from megablend.formats.megatron.idx import HEADER_BYTES
from megablend.formats.megatron.lengths import GROUP_BYTES, WHOLE_BYTES
from megablend.index.blocks.block_store import BlockStore
from megablend.index.build.build import SourceSpec
from megablend.index.read.snapshot import open_snapshot
from megablend.index.tables.cache_folders import idx_digests, snapshots
from megablend.index.verify.gc import collect
from megablend.index.verify.verify import verify
from megablend.storage.base import Allocate, Bytes, Int64s
from megablend.storage.local import LocalStorage
from tests.index.index_data import build
from tests.storages import STORAGE

NUM_SEQUENCES = 100_000


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes, np.ndarray]:
    """Bytes of a `.bin` and of its `.idx` of 2 MB, and the lengths."""
    rng = np.random.default_rng(5)
    lengths = rng.integers(0, 9, NUM_SEQUENCES).astype("<i4")
    tokens = rng.integers(0, 60_000, lengths.sum()).astype("<u2")
    pointers = 2 * (np.cumsum(lengths, dtype="<i8") - lengths)
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, NUM_SEQUENCES, NUM_SEQUENCES + 1)
    boundaries = np.arange(NUM_SEQUENCES + 1, dtype="<i8")
    return (
        tokens.tobytes(),
        head + lengths.tobytes() + pointers.tobytes() + boundaries.tobytes(),
        lengths,
    )


@pytest.fixture
def pair(tmp_path: Path, written: tuple[bytes, bytes, np.ndarray]) -> Path:
    path = tmp_path / "long.bin"
    path.write_bytes(written[0])
    path.with_suffix(".idx").write_bytes(written[1])
    assert path.with_suffix(".idx").stat().st_size > WHOLE_BYTES
    return path


def spec(path: Path) -> SourceSpec:
    return SourceSpec(name="long", patterns=(str(path),), read=ReadSpec(block_bytes=4096))


def open_store(path: Path) -> BlockStore:
    digest = build(path.parent / "cache", spec(path)).digest
    return BlockStore(open_snapshot(path.parent / "cache", digest), storage=STORAGE)


def flip(path: Path, offset: int) -> None:
    """Change a byte of a file; its size and times stay."""
    state = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def reads_of(monkeypatch: pytest.MonkeyPatch, path: Path) -> list[int]:
    """Sizes of the reads of a file, from now on; of several ranges in one call, their sum."""
    sizes: list[int] = []
    read = LocalStorage.read
    read_ranges = LocalStorage.read_ranges

    def counted_ranges(
        self: LocalStorage, name: str, offsets: Int64s, lengths: Int64s, allocate: Allocate
    ) -> tuple[Bytes, Int64s]:
        if name == str(path):
            sizes.append(int(lengths.sum()))
        return read_ranges(self, name, offsets, lengths, allocate)

    def counted(self: LocalStorage, name: str, offset: int, size: int) -> bytes:
        if name == str(path):
            sizes.append(size)
        return read(self, name, offset, size)

    monkeypatch.setattr(LocalStorage, "read", counted)
    monkeypatch.setattr(LocalStorage, "read_ranges", counted_ranges)
    return sizes


def test_a_reader_reads_the_groups_that_it_needs_alone(
    pair: Path,
    written: tuple[bytes, bytes, np.ndarray],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = open_store(pair)
    sizes = reads_of(monkeypatch, pair.with_suffix(".idx"))
    middle = len(store.snapshot.tokens_before) // 2
    store.read([middle])
    assert 0 < sum(sizes) < 4 * GROUP_BYTES
    ids = np.random.default_rng(0).permutation(len(store.snapshot.tokens_before) - 1)
    read = store.read(ids)
    # Each group once, and those of before
    assert sum(sizes) <= HEADER_BYTES + 4 * NUM_SEQUENCES + 6 * GROUP_BYTES
    in_order = [read[i] for i in np.argsort(ids)]
    assert b"".join(block.tokens.tobytes() for block in in_order) == written[0]
    assert (
        np.concatenate([np.diff(block.offsets) for block in in_order]).tolist()
        == written[2].tolist()
    )
    assert not caplog.records


def test_without_digests_the_whole_file_is_compared_in_parts_and_that_is_logged(
    pair: Path,
    written: tuple[bytes, bytes, np.ndarray],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = open_store(pair)
    (made,) = idx_digests(pair.parent / "cache").iterdir()
    content = made.read_bytes()
    for damage in (lambda: made.unlink(), lambda: flip(made, 30), lambda: made.write_bytes(b"")):
        damage()
        problems = (
            [
                f"{made}: damaged digests of an .idx file; remove it and build again (`megablend build CONFIG`)"
            ]
            if made.exists()
            else []
        )
        assert verify(str(pair.parent / "cache"), data=False, storage=STORAGE) == problems
        caplog.clear()
        sizes = reads_of(monkeypatch, pair.with_suffix(".idx"))
        store = BlockStore(store.snapshot, storage=STORAGE)
        store.read([0])
        assert max(sizes) <= 1 << 20 < sum(sizes)
        ids = np.arange(len(store.snapshot.tokens_before) - 1)
        assert b"".join(block.tokens.tobytes() for block in store.read(ids)) == written[0]
        assert "long.idx: the cache has no digests of the parts of this file" in caplog.text
        assert "run `megablend build CONFIG` to add them" in caplog.text
        assert build(pair.parent / "cache", spec(pair)).read == 0
        assert made.read_bytes() == content
    made.unlink()
    # A pointer, which no reader looks at
    flip(pair.with_suffix(".idx"), HEADER_BYTES + 4 * NUM_SEQUENCES + 3)
    with pytest.raises(
        ChangedFileError,
        match=r"long\.idx: has digest .*, but had .* when it was indexed; restore the original file",
    ):
        BlockStore(store.snapshot, storage=STORAGE).read([0])


def test_a_changed_length_is_found_when_its_group_is_read(pair: Path) -> None:
    store = open_store(pair)
    last = len(store.snapshot.tokens_before) - 2
    place = HEADER_BYTES + 4 * (NUM_SEQUENCES - 2)
    flip(pair.with_suffix(".idx"), place)
    store.read([0, 1])
    begin = place // GROUP_BYTES * GROUP_BYTES
    with pytest.raises(
        ChangedFileError,
        match=rf"long\.idx: has other bytes from {begin} to .* than when it was indexed",
    ):
        store.read([last])
    flip(pair.with_suffix(".idx"), place)
    assert len(store.read([last])) == 1
    flip(pair.with_suffix(".idx"), 18)  # the number of sequences
    with pytest.raises(DataError, match=r"long\.idx"):
        BlockStore(store.snapshot, storage=STORAGE).read([0])


def test_short_files_have_no_digests_of_parts_and_are_compared_when_they_are_opened(
    tmp_path: Path,
) -> None:
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 1, 2)
    (tmp_path / "short.idx").write_bytes(head + struct.pack("<iqqq", 2, 0, 0, 1))
    (tmp_path / "short.bin").write_bytes(b"abcd")
    store = open_store(tmp_path / "short.bin")
    assert list(idx_digests(tmp_path / "cache").iterdir()) == []
    flip(tmp_path / "short.idx", HEADER_BYTES + 4)
    with pytest.raises(ChangedFileError, match=r"short\.idx: has digest"):
        store.read([0])


def test_digests_go_with_the_last_index_that_holds_the_file(pair: Path) -> None:
    cache = pair.parent / "cache"
    digest = open_store(pair).snapshot.digest
    assert verify(str(cache), data=True, storage=STORAGE) == []
    (made,) = idx_digests(cache).iterdir()
    assert collect(cache, lambda: [], min_age_seconds=-9, dry_run=False).others == 0
    flip(pair.with_suffix(".idx"), HEADER_BYTES + 12 * NUM_SEQUENCES + 8 * 5)
    # As it was, with another ctime
    flip(pair.with_suffix(".idx"), HEADER_BYTES + 12 * NUM_SEQUENCES + 8 * 5)
    assert build(cache, spec(pair)).digest == digest
    assert made.is_file()
    other = pair.with_name("other.bin")
    other.write_bytes(b"")
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 0, 1)
    other.with_suffix(".idx").write_bytes(head + struct.pack("<q", 0))
    build(cache, spec(other))
    collect(cache, lambda: [], min_age_seconds=-9, dry_run=False)
    assert not made.exists()
    assert not (snapshots(cache) / digest).exists()
