"""What every format promises: the same documents give the same tokens, rows and ends, and a file that is not what was
indexed gives an error that names it."""

import json
import os
import pickle
import random
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from megablend.errors import ChangedFileError, ConfigError, CorruptFileError, DataError, MissingFileError
from megablend.formats import FORMATS, format_of
from megablend.formats.base import CHUNK_DTYPE, PLACED_BLOCK_DTYPE, Array, BlockReader, FileIndex
from megablend.formats.fetch import read_blocks, read_pieces
from tests.formats.writers import ALL_KINDS, Documents, Kind, index, joined, opened, pieces
from tests.storages import STORAGE

RANDOM = random.Random(7)
DOCUMENTS: dict[str, Documents] = {
    "mixed": [
        None if i % 17 == 3 else [RANDOM.randrange(-9, 50_000) for _ in range(RANDOM.choice([0, 1, 2, 5, 30, 90]))]
        for i in range(120)
    ],
    "one": [[5]],
    "long": [list(range(3000)), [], list(range(500))],
    "empty": [[], None, []],
    "empty first and last": [[], [], [1, 2, 3], [], None],
    "none": [],
}


@pytest.fixture(params=ALL_KINDS.values(), ids=list(ALL_KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture
def path(tmp_path: Path, kind: Kind) -> Path:
    path = tmp_path / f"x{kind.suffix}"
    kind.write(path, DOCUMENTS["mixed"])
    return path


@pytest.mark.parametrize("case", DOCUMENTS)
def test_documents_come_back(tmp_path: Path, kind: Kind, case: str) -> None:
    path = tmp_path / f"x{kind.suffix}"
    kind.write(path, DOCUMENTS[case])
    expected = kind.as_read(DOCUMENTS[case])
    found = index(path, kind.column)
    read = pieces(opened(path, kind.column, found), found.blocks, found.chunks)
    assert list(joined(found, read)) == expected
    assert found.rows == len(expected)
    assert found.tokens == sum(map(len, expected))
    assert found.token_dtype == "int32"


def test_the_block_table_adds_up(path: Path, kind: Kind) -> None:
    found = index(path, kind.column)
    blocks = found.blocks
    assert (blocks.dtype, found.chunks.dtype) == (PLACED_BLOCK_DTYPE, CHUNK_DTYPE)
    assert len(blocks) > 3
    assert blocks["tokens"].sum() == found.tokens
    assert blocks["rows"].sum() == found.rows
    assert blocks["ends"].sum() == sum(1 for document in kind.as_read(DOCUMENTS["mixed"]) if document)
    assert (blocks["first_token"] == np.cumsum(blocks["tokens"]) - blocks["tokens"]).all()
    assert ((blocks["tokens"] > 0) | (blocks["rows"] > 0)).all()
    assert (np.diff(blocks["offset"]) >= 0).all()
    stop = path.stat().st_size
    assert (blocks["offset"] + blocks["stored_bytes"] <= stop).all()
    assert blocks["chunk"].max() < len(found.chunks)


def test_counting_without_documents_gives_the_same_tokens(path: Path, kind: Kind) -> None:
    exact, quick = index(path, kind.column), index(path, kind.column, documents=False)
    assert quick.tokens == exact.tokens
    # Where rows are not known, blocks without tokens are not listed.
    ours, theirs = (each.blocks[each.blocks["tokens"] > 0] for each in (quick, exact))
    assert (ours[["offset", "tokens", "first_token"]] == theirs[["offset", "tokens", "first_token"]]).all()
    known = ours["rows"] >= 0
    assert (ours[known] == theirs[known]).all()


def test_an_index_is_deterministic_and_its_facts_survive_json(path: Path, kind: Kind, tmp_path: Path) -> None:
    first = index(path, kind.column)
    for name in format_of(str(path), storage=STORAGE).files(str(path)):
        (tmp_path / "copy").mkdir(exist_ok=True)
        shutil.copy(name, tmp_path / "copy")
    second = index(tmp_path / "copy" / path.name, kind.column)
    assert first.blocks.tobytes() == second.blocks.tobytes()
    assert first.chunks.tobytes() == second.chunks.tobytes()
    assert (first.structure, first.meta) == (second.structure, second.meta)
    assert json.loads(json.dumps(first.meta)) == first.meta


def test_blocks_come_in_any_order_and_more_than_once(path: Path, kind: Kind) -> None:
    found = index(path, kind.column)
    reader = opened(path, kind.column, found)
    whole = pieces(reader, found.blocks, found.chunks)
    ids = np.random.default_rng(3).integers(0, len(found.blocks), 50)
    assert pieces(reader, found.blocks[ids], found.chunks) == [whole[i] for i in ids]
    assert list(read_blocks(reader, found.blocks[:0], found.chunks, STORAGE)) == []


def test_pieces_alone_are_those_of_the_decoded_blocks(path: Path, kind: Kind) -> None:
    found = index(path, kind.column)
    reader = opened(path, kind.column, found)
    ids = np.random.default_rng(3).integers(0, len(found.blocks), 20)
    offsets, scanned_bytes = read_pieces(reader, found.blocks[ids], found.chunks, STORAGE)
    decoded = read_blocks(reader, found.blocks[ids], found.chunks, STORAGE)
    assert [each.tolist() for each in offsets] == [block.offsets.tolist() for block in decoded]
    assert (scanned_bytes == 0) == kind.lengths_known
    wrong: Array = found.blocks[1:2].copy()
    wrong["tokens"] += 1
    with pytest.raises(DataError, match=str(path)):
        read_pieces(reader, wrong, found.chunks, STORAGE)


def test_decoded_blocks_are_read_only_and_typed(path: Path, kind: Kind) -> None:
    found = index(path, kind.column)
    for block in read_blocks(opened(path, kind.column, found), found.blocks, found.chunks, STORAGE):
        assert block.tokens.dtype == np.dtype("int32")
        assert block.offsets.dtype == np.dtype("int64")
        assert (block.offsets[0], block.offsets[-1]) == (0, len(block.tokens))
        assert not block.tokens.flags.writeable


def test_threads_share_a_reader(path: Path, kind: Kind) -> None:
    found = index(path, kind.column)
    reader = opened(path, kind.column, found)
    whole = pieces(reader, found.blocks, found.chunks)
    wrong: list[object] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(20):
            ids = rng.integers(0, len(found.blocks), 5)
            if pieces(reader, found.blocks[ids], found.chunks) != [whole[i] for i in ids]:
                wrong.append(ids)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_reader_works_after_a_fork(path: Path, kind: Kind) -> None:
    found = index(path, kind.column)
    reader = opened(path, kind.column, found)
    whole = pieces(reader, found.blocks, found.chunks)
    child = os.fork()
    if not child:
        status = 1
        try:
            status = int(pieces(reader, found.blocks, found.chunks) != whole)
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def test_readers_and_indexes_pickle(path: Path, kind: Kind) -> None:
    found: FileIndex = pickle.loads(pickle.dumps(index(path, kind.column)))
    reader: BlockReader = pickle.loads(pickle.dumps(opened(path, kind.column, found)))
    assert list(joined(found, pieces(reader, found.blocks, found.chunks))) == kind.as_read(DOCUMENTS["mixed"])


def test_a_missing_file(path: Path, kind: Kind) -> None:
    found = index(path, kind.column)
    size = path.stat().st_size
    for name in format_of(str(path), storage=STORAGE).files(str(path)):
        kept = Path(name).rename(f"{name}.kept")
        with pytest.raises(MissingFileError, match=f"{name}: no such file"):
            index(path, kind.column)
        with pytest.raises(MissingFileError, match=f"{name}: no such file"):
            opened(path, kind.column, found, size)
        kept.rename(name)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_file(path: Path, kind: Kind, share: float) -> None:
    found = index(path, kind.column)
    size = path.stat().st_size
    for name in format_of(str(path), storage=STORAGE).files(str(path)):
        whole = Path(name).read_bytes()
        Path(name).write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(CorruptFileError, match=f"{path.stem}\\."):
            index(path, kind.column)
        with pytest.raises(ChangedFileError, match=f"{name}.*indexed"):
            opened(path, kind.column, found, size)
        Path(name).write_bytes(whole)


def test_a_file_that_was_replaced_or_grew(path: Path, kind: Kind, tmp_path: Path) -> None:
    found = index(path, kind.column)
    size = path.stat().st_size
    other: Documents = [
        document if i != 60 else [*(document or []), *range(50)] for i, document in enumerate(DOCUMENTS["mixed"])
    ]
    (tmp_path / "other").mkdir()
    replacement = tmp_path / "other" / path.name
    kind.write(replacement, other)
    for name in format_of(str(path), storage=STORAGE).files(str(replacement)):
        Path(name).replace(path.parent / Path(name).name)
    with pytest.raises(ChangedFileError, match=f"{path.stem}.*indexed"):
        opened(path, kind.column, found, size)


def test_a_file_that_is_cut_under_its_reader(path: Path, kind: Kind) -> None:
    found = index(path, kind.column)
    reader = opened(path, kind.column, found)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(CorruptFileError, match=rf"{path}.*truncated"):
        read_blocks(reader, found.blocks, found.chunks, STORAGE)


def test_a_block_that_is_not_the_files(path: Path, kind: Kind) -> None:
    found = index(path, kind.column)
    reader = opened(path, kind.column, found)
    for field, change in (("offset", 4), ("tokens", 1), ("rows", 5)):  # five more, of which some have tokens
        wrong: Array = found.blocks[1:2].copy()
        wrong[field] += change
        if field == "offset" and not kind.column:
            continue  # a .bin has no marks between tokens
        with pytest.raises(DataError, match=str(path)):
            read_blocks(reader, wrong, found.chunks, STORAGE)


def test_the_column_is_named_or_found(path: Path, kind: Kind) -> None:
    if kind.column is None:
        with pytest.raises(ConfigError, match="have no columns; remove column: idz"):
            index(path, "idz")
        return
    assert index(path, None).tokens == index(path, "ids").tokens
    with pytest.raises(ConfigError, match="no column 'idz'; did you mean 'ids'"):
        index(path, "idz")
    with pytest.raises(ConfigError, match=r"column 'text' .*expected integers"):
        index(path, "text")


def test_formats_are_found_by_name(tmp_path: Path) -> None:
    assert list(FORMATS) == ["parquet", "arrow", "arrow-stream", "megatron", "raw"]
    for each in FORMATS.values():
        for suffix in set(each.suffixes) - ({".arrow"} if each.name == "arrow-stream" else set()):
            assert format_of(f"data/*{suffix}", storage=STORAGE) is each
            assert format_of(f"data/X{suffix.upper()}", storage=STORAGE) is each
    prefix = tmp_path / "x_text_document"
    for suffix in (".bin", ".idx"):
        with pytest.raises(
            ConfigError, match=r"unknown kind of file.*known suffixes: \.parquet.*prefix of a \.bin/\.idx pair"
        ):
            format_of(str(prefix), storage=STORAGE)
        Path(f"{prefix}{suffix}").touch()
    assert format_of(str(prefix), storage=STORAGE) is FORMATS["megatron"]
    assert format_of(f"{tmp_path}/*_document", storage=STORAGE) is FORMATS["megatron"]
    Path(f"{prefix}.idx").unlink()
    with pytest.raises(
        ConfigError,
        match=r"\.idx does not exist, but the other file of the pair does: .* `format: raw`",
    ):
        format_of(str(prefix), storage=STORAGE)
