"""Low-level datasets of every format give the documents that were written, from any offset."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from megablend.distributed.base import SingleProcess
from megablend.errors import CacheError, ChangedFileError, ConfigError
from megablend.index.blocks.document_lengths import count_documents
from megablend.megatron.cache_builder.catalog import build_catalog, catalog_path, open_catalog
from megablend.megatron.cache_builder.document_tables import (
    build_table,
    open_table,
    pinned_address,
    share_of,
    table_path,
)
from megablend.megatron.plugin.documents import Documents, PairDocuments, TableDocuments
from megablend.megatron.request.address import Address, parse_address
from tests.megatron.plugin_data import draw_documents, write_word
from tests.storages import STORAGE

GOLDEN = Path(__file__).parent.parent.parent / "formats" / "golden"
DOCUMENTS = draw_documents(1)
EOD = 50_000


def open_documents(folder: Path, kind: str, eod: int | None = None) -> Documents:
    word = write_word(folder / kind, kind, DOCUMENTS, eod)
    cache = str(folder / "cache")
    if kind == "megatron":
        build_catalog(cache, [word], launch=SingleProcess(), storage=STORAGE)
        return PairDocuments(word, catalog_path(cache, (word,)), storage=STORAGE)
    return TableDocuments(
        cache,
        build_table(cache, parse_address(word), launch=SingleProcess(), storage=STORAGE),
        memory=2000,
        storage=STORAGE,
    )


@pytest.mark.parametrize("eod", [None, EOD])
@pytest.mark.parametrize(
    "kind", ["megatron", "parquet", "parquet-v2-unindexed", "arrow", "arrow-lz4"]
)
def test_documents_are_those_written(tmp_path: Path, kind: str, eod: int | None) -> None:
    found: Any = open_documents(tmp_path, kind, eod)
    expected = [
        [*document, eod] if document and eod is not None else document for document in DOCUMENTS
    ]
    assert found.sequence_lengths.dtype == np.int32
    assert found.sequence_lengths.tolist() == [len(document) for document in expected]
    assert len(found) == len(expected)
    rng = random.Random(0)
    for again in (found, pickle.loads(pickle.dumps(found))):
        for number in rng.sample(range(len(expected)), 80):
            document = expected[number]
            assert again.get(np.int32(number)).tolist() == document
            offset = rng.randrange(len(document) + 1)
            length = rng.randrange(len(document) - offset + 1)
            assert (
                again.get(number, offset=offset, length=length).tolist()
                == document[offset : offset + length]
            )
            assert again.get(number, offset=np.int32(offset)).tolist() == document[offset:]


def test_a_pair_that_was_replaced_since_is_refused_and_one_that_was_touched_is_not(
    tmp_path: Path,
) -> None:
    open_documents(tmp_path, "megatron")
    word = str(tmp_path / "megatron" / "pair")
    catalog = catalog_path(str(tmp_path / "cache"), (str(tmp_path / "megatron" / "pair"),))
    os.utime(f"{word}.idx", (1, 1))
    assert PairDocuments(word, catalog, storage=STORAGE).get(5).tolist() == DOCUMENTS[5]
    for others in (DOCUMENTS[1:], [[*DOCUMENTS[0], 7], *DOCUMENTS[1:]]):
        write_word(tmp_path / "megatron", "megatron", others)
        says = (
            rf"pair\.idx: does not contain the sequences .* \(found {len(others)}, expected 200 of the same lengths\): "
            r"restore the file, "
            rf"or remove the cache \({tmp_path}/cache\) and rebuild it"
        )
        with pytest.raises(ChangedFileError, match=says):
            PairDocuments(word, catalog, storage=STORAGE).get(5)
    shutil.rmtree(tmp_path / "cache")
    build_catalog(str(tmp_path / "cache"), [word], launch=SingleProcess(), storage=STORAGE)
    assert PairDocuments(word, catalog, storage=STORAGE).get(0).tolist() == [*DOCUMENTS[0], 7]
    restored = open_documents(tmp_path / "restored", "megatron")
    write_word(tmp_path / "restored" / "megatron", "megatron", DOCUMENTS[1:])
    write_word(tmp_path / "restored" / "megatron", "megatron", DOCUMENTS)
    assert restored.get(5).tolist() == DOCUMENTS[5]


@pytest.mark.parametrize("eod", [None, EOD])
def test_documents_that_pages_break_up(tmp_path: Path, eod: int | None) -> None:
    """Files of pyarrow 18, whose pages begin in the middle of rows; between them, two that do not."""
    cache = str(tmp_path / "cache")
    golden = sorted(GOLDEN.glob("mid_row_*.parquet"))
    rows = [json.loads(path.with_suffix(".json").read_text())["rows"] for path in golden]
    documents = [
        [token for token in row or [] if token is not None] for each in rows for row in each
    ]
    expected = [
        [*document, eod] if document and eod is not None else document for document in documents
    ]
    address = Address(
        format="parquet", pattern=f"{GOLDEN}/mid_row_*.parquet", column="input_ids", append_eod=eod
    )
    found = TableDocuments(
        cache,
        build_table(cache, address, launch=SingleProcess(), storage=STORAGE),
        memory=1,
        storage=STORAGE,
    )
    assert found.sequence_lengths.tolist() == [len(document) for document in expected]
    rng = random.Random(0)
    for number, document in enumerate(expected):
        offset = rng.randrange(len(document) + 1)
        length = rng.randrange(len(document) - offset + 1)
        assert found.get(number).tolist() == document
        assert found.get(number, offset, length).tolist() == document[offset : offset + length]


@pytest.mark.parametrize("num_ranks", [2, 3, 7])
def test_ranks_share_the_blocks_at_the_ends_of_documents(tmp_path: Path, num_ranks: int) -> None:
    cache = str(tmp_path / "cache")
    address = Address(format="parquet", pattern=f"{GOLDEN}/mid_row_*.parquet", column="input_ids")
    found = TableDocuments(
        cache,
        build_table(cache, address, launch=SingleProcess(), storage=STORAGE),
        memory=1,
        storage=STORAGE,
    )
    store, _ = open_table(
        cache, build_table(cache, address, launch=SingleProcess(), storage=STORAGE), storage=STORAGE
    )
    shares = [share_of(store.snapshot, rank, num_ranks) for rank in range(num_ranks)]
    assert [begin for begin, _ in shares[1:]] == [end for _, end in shares[:-1]]
    parts = [
        lengths for begin, end in shares for _, lengths, _ in count_documents(store, begin, end)
    ]
    assert np.concatenate(parts).tolist() == found.sequence_lengths.tolist()


def write_flat(folder: Path, kind: str) -> str:
    """Two files of 9 tokens each, 4 to a row group, in which 7 ends documents; how a blend calls them."""
    folder.mkdir()
    for number in range(2):
        tokens = pa.table({"ids": pa.array([1, 2, 7, 3, 7, 7, 4, 5, 10 + number], pa.uint16())})
        if kind == "parquet":
            pq.write_table(tokens, folder / f"{number}.parquet", row_group_size=4)
        else:
            with pa.ipc.new_file(folder / f"{number}.arrow", tokens.schema) as writer:
                writer.write_table(tokens, max_chunksize=4)
    return f"{kind}:{folder}/*.{kind}?column=ids"


@pytest.mark.parametrize("eod", [None, EOD])
@pytest.mark.parametrize(
    ("choice", "cuts"),
    [("file", [9]), ("row_group", [4, 8, 9]), ("7", [3, 5, 6, 9])],
    ids=["file", "row_group", "7"],
)
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_documents_of_a_flat_column(
    tmp_path: Path, kind: str, choice: str, cuts: list[int], eod: int | None
) -> None:
    word = write_flat(tmp_path / "data", kind)
    cache = str(tmp_path / "cache")
    address = parse_address(
        f"{word}&documents={choice}" + ("" if eod is None else f"&append_eod={eod}")
    )
    table = build_table(cache, address, launch=SingleProcess(), storage=STORAGE)
    found = TableDocuments(cache, table, memory=2000, storage=STORAGE)
    expected = [
        [1, 2, 7, 3, 7, 7, 4, 5, 10 + file][first:last] + ([] if eod is None else [eod])
        for file in range(2)
        for first, last in zip([0, *cuts], cuts, strict=False)
    ]
    assert found.sequence_lengths.tolist() == [len(document) for document in expected]
    for number, document in enumerate(expected):
        assert found.get(number).tolist() == document
        assert found.get(number, offset=1).tolist() == document[1:]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_flat_column_needs_its_documents(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    word = write_flat(tmp_path / "data", kind)
    cache = str(tmp_path / "cache")
    says = r"ids: has one token per row, .*`documents=file`, `documents=row_group`, or `documents=ID` with the id of the token"
    with pytest.raises(ConfigError, match=says):
        build_table(cache, parse_address(word), launch=SingleProcess(), storage=STORAGE)
    with monkeypatch.context() as before:  # as versions that did not ask
        before.setattr("megablend.megatron.cache_builder.document_tables.is_flat", lambda _: False)
        first = build_table(cache, parse_address(word), launch=SingleProcess(), storage=STORAGE)
        assert not caplog.messages
    assert build_table(cache, parse_address(word), launch=SingleProcess(), storage=STORAGE) == first
    assert "has one token per row, and each counts as a document" in caplog.text
    assert (
        TableDocuments(cache, first, memory=2000, storage=STORAGE).sequence_lengths.tolist()
        == [1] * 18
    )


def test_a_table_is_made_once_and_stays_with_its_files(tmp_path: Path) -> None:
    word = write_word(tmp_path / "data", "arrow", DOCUMENTS)
    cache = str(tmp_path / "cache")
    first = build_table(cache, parse_address(word), launch=SingleProcess(), storage=STORAGE)
    made = table_path(cache, first).stat().st_mtime_ns
    write_word(tmp_path / "other", "arrow", DOCUMENTS)
    (tmp_path / "other" / "0.arrow").rename(tmp_path / "data" / "more.arrow")
    assert (
        build_table(cache, parse_address(word), launch=SingleProcess(), storage=STORAGE)
        == first
        == pinned_address(cache, word)
    )
    assert table_path(cache, first).stat().st_mtime_ns == made
    for pin in (tmp_path / "cache" / "megablend-documents").glob("*.json"):
        pin.unlink()
    assert (
        build_table(cache, parse_address(word), launch=SingleProcess(), storage=STORAGE).index
        != first.index
    )


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"x")])
def test_a_damaged_table_is_built_again_of_the_same_files(
    tmp_path: Path, damage: Callable[[Path], Any]
) -> None:
    """Also if its index is missing; a file that was added since would give other samples."""
    word = write_word(tmp_path / "data", "arrow", DOCUMENTS)
    cache = str(tmp_path / "cache")
    first = build_table(cache, parse_address(word), launch=SingleProcess(), storage=STORAGE)
    path = table_path(cache, first)
    whole = path.read_bytes()
    shutil.copy(tmp_path / "data" / "0.arrow", tmp_path / "data" / "added.arrow")
    index = tmp_path / "cache" / "megablend" / "generations" / str(first.index)
    for is_indexed in (True, False):
        damage(path)
        if not is_indexed:
            (index / "blocks.arrow").unlink()
        again = build_table(cache, parse_address(word), launch=SingleProcess(), storage=STORAGE)
        assert again == first
        assert path.read_bytes() == whole
    damage(path)
    write_word(tmp_path / "data", "arrow", draw_documents(2))
    says = r"\.npy: is missing or damaged; it cannot be built again, since the files of .* have changed: restore"
    with pytest.raises(CacheError, match=says):
        build_table(cache, parse_address(word), launch=SingleProcess(), storage=STORAGE)


def test_what_was_not_prepared_is_told(tmp_path: Path) -> None:
    cache = str(tmp_path)
    with pytest.raises(
        CacheError,
        match=r"is not indexed in .*; open the dataset through MegablendDatasetBuilder, which indexes it",
    ):
        pinned_address(cache, "arrow:/data/*.arrow?column=ids")
    with pytest.raises(CacheError, match=r"lengths of the \.idx files are missing or damaged"):
        open_catalog(catalog_path(cache, ("/data/a",)))


def test_a_catalog_follows_its_files(tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    words = [
        write_word(tmp_path / str(seed), "megatron", draw_documents(seed)) for seed in range(5)
    ]
    build_catalog(cache, words, launch=SingleProcess(), storage=STORAGE)
    path = catalog_path(cache, tuple(words)).with_suffix(".npy")
    made = path.stat().st_mtime_ns
    build_catalog(cache, words[::-1], launch=SingleProcess(), storage=STORAGE)
    assert path.stat().st_mtime_ns == made
    write_word(tmp_path / "3", "megatron", draw_documents(30))
    build_catalog(cache, words, launch=SingleProcess(), storage=STORAGE)
    expected = [len(document) for document in draw_documents(30)]
    assert (
        PairDocuments(
            words[3], catalog_path(cache, tuple(words)), storage=STORAGE
        ).sequence_lengths.tolist()
        == expected
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/data/web_text", Address(format="megatron", pattern="/data/web_text")),
        ("parquet:/d/*.parquet", Address(format="parquet", pattern="/d/*.parquet")),
        ("parquet:/d/a?.parquet", Address(format="parquet", pattern="/d/a?.parquet")),
        ("arrow:/d/a?.arrow?column=x", Address(format="arrow", pattern="/d/a?.arrow", column="x")),
        (
            "parquet:/d/*.parquet?column=a.b&append_eod=2&index=ff",
            Address(
                format="parquet", pattern="/d/*.parquet", column="a.b", append_eod=2, index="ff"
            ),
        ),
        ("arrow:/d/a?documents=7", Address(format="arrow", pattern="/d/a", documents="7")),
    ],
)
def test_addresses(text: str, expected: Address) -> None:
    assert parse_address(text) == expected
    assert str(expected) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("parquet:/d/a?colum=x", "unknown option 'colum'; did you mean 'column'"),
        ("parquet:/d/a?column=x&column=y", "'column' has two values"),
        ("parquet:/d/a?column=", "'column' has no value"),
        ("arrow:/d/a?append_eod=-1", "append_eod is '-1'; expected a token id"),
        (
            "arrow:/d/a?documents=rows",
            "documents is 'rows'; expected file, row_group or the token id that ends documents",
        ),
        (
            "arrow:/d/a?documents=4294967296",
            "documents is '4294967296'; expected file, row_group or the token id",
        ),
    ],
)
def test_addresses_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_address(text)


def test_a_pair_looks_inside_like_an_indexed_dataset(tmp_path: Path) -> None:
    """Documents of several sequences; all that Megatron's own code and tests look up."""
    prefix = str(tmp_path / "pair")
    writer = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    rng = random.Random(3)
    for _ in range(20):
        sizes = [rng.randrange(9) for _ in range(rng.randrange(1, 4))]
        writer.add_document(
            np.array([rng.randrange(50_000) for _ in range(sum(sizes))], np.uint16), sizes
        )
    writer.finalize(f"{prefix}.idx")
    build_catalog(str(tmp_path), [prefix], launch=SingleProcess(), storage=STORAGE)
    theirs = IndexedDataset(prefix)
    ours: Any = PairDocuments(prefix, catalog_path(str(tmp_path), (prefix,)), storage=STORAGE)
    assert len(ours) == len(theirs) > len(theirs.document_indices)
    for name in ("sequence_lengths", "sequence_pointers", "document_indices"):
        found = getattr(ours.index, name)
        expected = getattr(theirs.index, name)
        assert found.dtype == expected.dtype
        assert np.array_equal(found, expected)
    for name in ("dtype", "dtype_size", "sequence_count", "document_count", "sequence_modes"):
        assert getattr(ours.index, name) == getattr(theirs.index, name)
    assert len(ours.index) == len(theirs.index)
    assert ours.index[5] == theirs.index[5]
    assert (ours.path_prefix, ours.multimodal) == (theirs.path_prefix, theirs.multimodal)
    for number in (0, 7, np.int32(3), -1, -len(theirs)):
        assert ours[number].tolist() == ours.get(number).tolist() == theirs[number].tolist()
    for part in (slice(2, 9), slice(None), slice(-4, None), slice(3, 3)):
        assert [found.tolist() for found in ours[part]] == [
            found.tolist() for found in theirs[part]
        ]
    ours.set_document_indices(theirs.get_document_indices()[:5])
    assert np.array_equal(ours.get_document_indices(), theirs.document_indices[:5])
    assert np.array_equal(
        pickle.loads(pickle.dumps(ours)).document_indices, theirs.document_indices
    )


@pytest.mark.parametrize("kind", ["megatron", "parquet", "arrow"])
def test_documents_are_looked_up_by_number_and_slice(tmp_path: Path, kind: str) -> None:
    found: Any = open_documents(tmp_path, kind)
    assert [each.tolist() for each in found[10:30]] == DOCUMENTS[10:30]
    assert found[-1].tolist() == found.get(-1).tolist() == DOCUMENTS[-1]
    assert found.document_indices.tolist() == list(range(len(DOCUMENTS) + 1))
    pointers = found.index.sequence_pointers
    itemsize = found.index.dtype_size
    assert np.array_equal(
        np.diff(pointers), found.sequence_lengths[:-1].astype(np.int64) * itemsize
    )
    assert found.index.dtype == np.result_type(found[0]).type
    for number in (len(DOCUMENTS), -len(DOCUMENTS) - 1):
        with pytest.raises(
            IndexError, match=rf"document {number} is out of range: there are {len(DOCUMENTS)}"
        ):
            found.get(number, offset=0, length=1)
    with pytest.raises(
        ValueError, match="found a slice with step 2; expected consecutive documents"
    ):
        found[::2]
    with pytest.raises(TypeError, match="found a str; expected a document's number or a slice"):
        found["a"]


def damage_lengths(path: Path, change: int, number: int = -1) -> None:
    """Change the length of a document in a table."""
    lengths = np.load(path)
    lengths[number] += change
    np.save(path, lengths)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("number", [0, 100, -1])  # of the document whose length is damaged
def test_a_table_with_more_tokens_than_its_files_is_named_and_removed(
    tmp_path: Path, kind: str, number: int
) -> None:
    found: Any = open_documents(tmp_path, kind)
    cache, address = found._arguments[:2]
    path = table_path(cache, address)
    damage_lengths(path, 1_000_000, number)
    documents = TableDocuments(cache, address, memory=2000, storage=STORAGE)
    last = len(DOCUMENTS) - 1

    def read() -> None:
        for number in range(len(DOCUMENTS)):
            documents.get(number)

    with pytest.raises(
        CacheError,
        match=r"\.npy: damaged: document [\d,]+ has more tokens than are left in its files; remove the table and build",
    ) as caught:
        read()
    Path(str(caught.value).partition(":")[0]).unlink()
    again = build_table(cache, parse_address(str(address)), launch=SingleProcess(), storage=STORAGE)
    assert again == address
    assert (
        TableDocuments(cache, again, memory=2000, storage=STORAGE).get(last).tolist()
        == DOCUMENTS[last]
    )


def test_a_damaged_table_is_built_again(tmp_path: Path) -> None:
    found: Any = open_documents(tmp_path, "parquet")
    cache, address = found._arguments[:2]
    path = table_path(cache, address)
    whole = path.read_bytes()
    for damage in (
        lambda: damage_lengths(path, 1),
        lambda: path.write_bytes(whole[:-1]),
        lambda: path.write_bytes(b"x"),
    ):
        damage()
        assert build_table(cache, address, launch=SingleProcess(), storage=STORAGE) == address
        assert path.read_bytes() == whole


def test_a_table_without_a_checksum_is_removed_as_its_message_says(tmp_path: Path) -> None:
    found: Any = open_documents(tmp_path, "parquet")
    cache, address = found._arguments[:2]
    path = table_path(cache, address)
    (pin,) = path.parent.glob("*.json")
    record = json.loads(pin.read_text())
    assert record.pop("checksum")
    pin.write_text(json.dumps(record))  # as version 0.1.0 wrote it
    whole = path.read_bytes()
    path.write_bytes(b"x")
    build_table(cache, address, launch=SingleProcess(), storage=STORAGE)
    with pytest.raises(
        CacheError, match=r"missing or damaged \(.*\); remove it and build again"
    ) as caught:
        open_table(cache, address, STORAGE)
    Path(str(caught.value).partition(":")[0]).unlink()
    build_table(cache, address, launch=SingleProcess(), storage=STORAGE)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("suffix", ["idx", "bin"])
def test_a_job_does_not_read_what_another_job_made_of_a_replaced_file(
    tmp_path: Path, suffix: str
) -> None:
    """The sizes of the files are as before; a worker that starts opens them by their names."""
    in_worker = pickle.dumps(open_documents(tmp_path, "megatron"))
    assert pickle.loads(in_worker).get(5).tolist() == DOCUMENTS[5]
    word = str(tmp_path / "megatron" / "pair")
    others = [*DOCUMENTS[1:], DOCUMENTS[0]] if suffix == "idx" else DOCUMENTS
    write_word(
        tmp_path / "megatron", "megatron", [[token + 1 for token in each] for each in others]
    )
    build_catalog(str(tmp_path / "cache"), [word], launch=SingleProcess(), storage=STORAGE)
    with pytest.raises(ChangedFileError, match=r"pair\.\w+: was replaced after this job .*restart"):
        pickle.loads(in_worker).get(5)
