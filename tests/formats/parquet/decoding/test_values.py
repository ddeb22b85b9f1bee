"""What pyarrow writes comes back: types x nulls x encodings x codecs x page versions x page index or none."""

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megablend.errors import UnsupportedFileError
from megablend.formats.fetch import read_blocks
from megablend.formats.parquet.decoding.values import DECODERS
from tests.formats.parquet_files import Rows, check, documents_of
from tests.formats.writers import index, opened
from tests.pyarrow_versions import INSTALLED, needs_pyarrow
from tests.storages import STORAGE

TOKENS = {"int32": pa.int32(), "int64": pa.int64(), "uint16": pa.uint16(), "uint32": pa.uint32()}
SMALL = {"int8": pa.int8(), "int16": pa.int16(), "uint8": pa.uint8()}
LISTS = {"list": pa.list_, "large": pa.large_list}
NULLS = ["none", "rows", "elements", "both"]
ENCODINGS = ["PLAIN", "dictionary", "DELTA_BINARY_PACKED"]
if INSTALLED >= 16:
    ENCODINGS.append("BYTE_STREAM_SPLIT")
CODECS = ["none", "snappy", "gzip", "brotli", "lz4", "zstd"]

POOLS = list[pa.MemoryPool]()
"""Those that tests have set: cached dictionaries may still be in them, and are freed through them."""


def lists(nulls: str, seed: int, top: int, count: int = 90) -> Rows:
    chance = random.Random(seed)

    def row() -> list[int | None] | None:
        if nulls in ("rows", "both") and chance.random() < 0.2:
            return None
        length = chance.choice([0, 1, 2, 3, 10, 40, 400])
        if nulls in ("elements", "both"):
            rate = chance.choice([0, 0.1, 1])
            return [
                None if chance.random() < rate else chance.randrange(top) for _ in range(length)
            ]
        return [chance.randrange(top) for _ in range(length)]

    return [row() for _ in range(count)]


def store(
    path: Path,
    rows: Rows,
    kind: pa.DataType,
    *,
    encoding: str = "PLAIN",
    codec: str = "none",
    version: str = "1.0",
    page_index: bool = False,
    **options: Any,
) -> Path:
    leaf = "ids.list.element" if kind.num_fields else "ids"
    special = encoding in ("DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT")
    table = pa.table({"text": ["x"] * len(rows), "ids": pa.array(rows, kind)})
    settings = {
        "data_page_size": 300,
        "write_batch_size": 16,
        "row_group_size": 50,
        "write_page_checksum": True,
    }
    pq.write_table(
        table,
        path,
        use_dictionary=["ids"]
        if encoding == "dictionary" and leaf == "ids"
        else encoding == "dictionary",
        column_encoding={leaf: encoding} if special else None,
        compression=codec,
        data_page_version=version,
        write_page_index=page_index,
        **(settings | options),
    )
    return path


def top_of(kind: pa.DataType) -> int:
    return min(50_000, int(np.iinfo(str(kind)).max))


MATRIX = list(
    itertools.product(
        TOKENS, [*LISTS, "flat"], NULLS, ENCODINGS, CODECS, ["1.0", "2.0"], [False, True]
    )
)


def run_matrix_case(path: Path, case: tuple[str, str, str, str, str, str, bool]) -> None:
    token, shape, nulls, encoding, codec, version, page_index = case
    kind = TOKENS[token]
    seed = sum(map(ord, "".join(map(str, case))))
    if shape == "flat":
        documents = documents_of(lists("none", seed, top_of(kind), 30))
        rows: Rows = [
            None if nulls != "none" and v % 7 == 0 else v
            for document in documents
            for v in document
        ]
    else:
        rows = lists(nulls, seed, top_of(kind))
        kind = LISTS[shape](kind)
    store(path, rows, kind, encoding=encoding, codec=codec, version=version, page_index=page_index)
    found = check(path, rows, "ids")
    assert found.token_dtype == token
    assert len(found.blocks) > 3


@pytest.mark.parametrize(
    "case", random.Random(3).sample(MATRIX, 60), ids=lambda case: "-".join(map(str, case))
)
def test_matrix(tmp_path: Path, case: tuple[str, str, str, str, str, str, bool]) -> None:
    run_matrix_case(tmp_path / "x.parquet", case)


@pytest.mark.slow
@pytest.mark.parametrize("token", TOKENS)
def test_whole_matrix(tmp_path: Path, token: str) -> None:
    for case in MATRIX:
        if case[0] == token:
            run_matrix_case(tmp_path / "x.parquet", case)


@pytest.mark.parametrize("token", SMALL)
def test_narrow_types(tmp_path: Path, token: str) -> None:
    rows = lists("both", 5, 100)
    path = store(tmp_path / "x.parquet", rows, pa.list_(SMALL[token]))
    assert check(path, rows, "ids").token_dtype == token


@pytest.mark.parametrize(
    ("token", "values"),
    [
        ("int32", [-(2**31), -1, 2**31 - 1]),
        ("int64", [-(2**63), 2**63 - 1]),
        ("uint16", [65535]),
        ("uint32", [2**32 - 1]),
    ],
)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_extreme_values(tmp_path: Path, token: str, values: list[int], encoding: str) -> None:
    rows: Rows = [values, [], values[::-1]]
    check(
        store(tmp_path / "x.parquet", rows, pa.list_(TOKENS[token]), encoding=encoding), rows, "ids"
    )


@needs_pyarrow(21, "nulls that hold values")
@pytest.mark.parametrize("page_index", [False, True])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_fixed_size_lists(tmp_path: Path, version: str, page_index: bool) -> None:
    rows: Rows = [
        None if i % 5 == 1 else [i, None if i % 7 == 0 else i + 1, i + 2] for i in range(200)
    ]
    path = store(
        tmp_path / "x.parquet",
        rows,
        pa.list_(pa.int32(), 3),
        version=version,
        page_index=page_index,
    )
    check(path, rows, "ids")


@needs_pyarrow(21, "nulls that hold values")
@pytest.mark.parametrize("page_index", [False, True])
def test_nested_columns(tmp_path: Path, page_index: bool) -> None:
    rows = lists("both", 8, 999)
    inner = pa.array(rows, pa.list_(pa.int32()))
    mask = pa.array([i % 6 == 2 for i in range(len(rows))])
    record = pa.StructArray.from_arrays(
        [pa.array(range(len(rows)), pa.int64()), inner], ["id", "input_ids"], mask=mask
    )
    path = tmp_path / "x.parquet"
    pq.write_table(
        pa.table({"record": record}), path, data_page_size=300, write_page_index=page_index
    )
    seen: Rows = [None if i % 6 == 2 else row for i, row in enumerate(rows)]
    check(path, seen, "record.input_ids")
    check(path, seen, "record.input_ids.list.element")
    check(path, [None if i % 6 == 2 else i for i in range(len(rows))], "record.id")


def test_a_column_in_a_list_of_records(tmp_path: Path) -> None:
    rows: Rows = [[1, 2], None, [], [None, 3]] * 20
    records = [None if row is None else [{"id": v, "name": "x"} for v in row] for row in rows]  # type: ignore[union-attr]
    kind = pa.list_(pa.struct([("id", pa.int32()), ("name", pa.string())]))
    path = tmp_path / "x.parquet"
    pq.write_table(
        pa.table({"records": pa.array(records, kind)}), path, data_page_size=40, write_batch_size=4
    )
    check(path, rows, "records.id")


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_a_chunk_falls_back_from_dictionary_to_plain(tmp_path: Path, version: str) -> None:
    chance = random.Random(1)
    rows: Rows = [[chance.randrange(10**9) for _ in range(50)] for _ in range(200)]
    path = store(
        tmp_path / "x.parquet",
        rows,
        pa.list_(pa.int32()),
        encoding="dictionary",
        version=version,
        page_index=True,
        dictionary_pagesize_limit=4000,
        row_group_size=200,
    )
    found = check(path, rows, "ids")
    assert set(found.blocks["encoding"].tolist()) == {0, 8}


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("page_index", [False, True])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_constant_null_and_absent_values(
    tmp_path: Path, encoding: str, version: str, page_index: bool
) -> None:
    kind = pa.list_(pa.int32())
    shapes: list[Rows] = [
        [[7] * 30] * 40,
        [None] * 50,
        [[]] * 50,
        [[None] * 40] * 30,
        [[1]],
        [None],
        [],
        [[]] * 300 + [[9]],
    ]
    for rows in shapes:
        path = store(
            tmp_path / "x.parquet",
            rows,
            kind,
            encoding=encoding,
            version=version,
            page_index=page_index,
            codec="zstd",
        )
        check(path, rows, "ids")


def test_no_row_groups(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.ParquetWriter(path, pa.schema([("ids", pa.list_(pa.int32()))])).close()
    found = check(path, [])
    assert len(found.blocks) == len(found.chunks) == 0


def test_values_are_read_only(tmp_path: Path) -> None:
    for encoding, codec in itertools.product(ENCODINGS, ["none", "zstd"]):
        path = store(
            tmp_path / "x.parquet",
            [[1, 2, 3]] * 9,
            pa.list_(pa.uint16()),
            encoding=encoding,
            codec=codec,
        )
        found = index(path, "ids")
        for block in read_blocks(opened(path, "ids", found), found.blocks, found.chunks, STORAGE):
            assert not block.tokens.flags.writeable
            assert not block.offsets.flags.writeable


@pytest.mark.parametrize("page_index", [False, True])
def test_an_encoding_outside_of_the_table_is_refused_by_the_build(
    tmp_path: Path, page_index: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store(
        tmp_path / "x.parquet",
        lists("both", 0, 99),
        pa.list_(pa.int32()),
        encoding="DELTA_BINARY_PACKED",
        page_index=page_index,
    )
    monkeypatch.delitem(DECODERS, (1, 5))
    with pytest.raises(
        UnsupportedFileError,
        match=r"at byte \d+: the page: INT32 values with encoding DELTA_BINARY_PACKED are not supported",
    ):
        index(path, "ids")


@needs_pyarrow(21, "pages of at most 20,000 rows")
@pytest.mark.parametrize("encoding", ["RLE_DICTIONARY", "DELTA_BINARY_PACKED"])
def test_narrow_tokens_are_not_all_wide_at_once(tmp_path: Path, encoding: str) -> None:
    rows = np.arange(1_000_000, dtype=np.uint8) // 64
    encoded: dict[str, Any] = {"use_dictionary": encoding == "RLE_DICTIONARY"}
    if not encoded["use_dictionary"]:
        encoded["column_encoding"] = {"ids": encoding}
    pq.write_table(pa.table({"ids": rows}), path := tmp_path / "x.parquet", **encoded)
    found = index(path, "ids")
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(pa.default_memory_pool())
    POOLS.append(pool)
    pa.set_memory_pool(pool)
    try:
        blocks = read_blocks(opened(path, "ids", found), found.blocks, found.chunks, STORAGE)
    finally:
        pa.set_memory_pool(before)
    assert np.concatenate([block.tokens for block in blocks]).tolist() == rows.tolist()
    assert len(blocks) == 50
    assert 100_000 < pool.max_memory() < 2_500_000  # stored, decompressed, some of them as int32
