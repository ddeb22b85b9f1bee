"""Tokens out of range that a file's own statistics give away stop a build, with file and row; wrong statistics do not."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import megablend
from megablend.errors import ConfigError, DataError
from megablend.index.read.snapshot import open_snapshot
from megablend.index.tables.manifest import TOKEN_RANGES
from megablend.operations.build import build, build_index

ROWS = [[i % 90] * (1 + i % 9) for i in range(200)]


def write(
    path: Path, rows: list[Any], kind: Any = None, *, name: str = "ids", statistics: bool = True
) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({name: pa.array(rows, pa.list_(kind or pa.int32()))})
    pq.write_table(table, path, row_group_size=64, write_statistics=statistics)
    return str(path)


def config(folder: Path, *sources: dict[str, Any], **settings: Any) -> dict[str, Any]:
    named = [{"name": f"s{i}", **source} for i, source in enumerate(sources)]
    return {
        "cache": str(folder / "cache"),
        "sequence_length": 8,
        "samples": 20,
        "sources": named,
        **settings,
    }


@pytest.mark.parametrize("token", [-1, 100, 4_000_000])
@pytest.mark.parametrize("command", [build, build_index])
def test_a_build_names_file_and_row(tmp_path: Path, token: int, command: Any) -> None:
    write(tmp_path / "data" / "a.parquet", ROWS)
    path = write(tmp_path / "data" / "b.parquet", [*ROWS[:150], [7, token, token], *ROWS[150:]])
    given = config(tmp_path, {"path": f"{tmp_path}/data/*.parquet"}, vocab_size=100)
    with pytest.raises(DataError) as caught:
        command(given)
    assert str(caught.value) == (
        f"{path}: row 150 (row group 2): token {token}, expected 0 to 99 (vocab_size 100); 2 tokens of the file are out of "
        "range: rewrite the file, or set `column:` if this is not the token column"
    )
    assert not list((tmp_path / "cache").glob("runs/*")), "no run is committed"
    write(tmp_path / "data" / "b.parquet", ROWS)
    command(given)


def test_a_file_of_one_token_only(tmp_path: Path) -> None:
    write(tmp_path / "data" / "a.parquet", ROWS)
    write(tmp_path / "data" / "b.parquet", [[100] * 5] * 10)
    with pytest.raises(
        DataError, match=r"b\.parquet: row 0 \(row group 0\): token 100, expected 0 to 99"
    ):
        build(config(tmp_path, {"path": f"{tmp_path}/data/*.parquet"}, vocab_size=100))


def test_negative_ids_need_no_vocabulary(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [*ROWS, [-100]])
    with pytest.raises(
        DataError, match=r"row 200 \(row group 3\): token -100, expected 0 to 4294967295; 1 tokens"
    ):
        build(config(tmp_path, {"path": path}))


@pytest.mark.parametrize("kind", [pa.uint32(), pa.uint16(), pa.int64(), pa.int16()], ids=str)
def test_other_types(tmp_path: Path, kind: pa.DataType) -> None:
    largest = {"uint32": 4_000_000_000, "uint16": 65_535, "int64": 1 << 40, "int16": 32_767}[
        str(kind)
    ]
    path = write(tmp_path / "a.parquet", [*ROWS, [largest]], kind)
    with pytest.raises(DataError, match=f"token {largest}, expected 0 to 99"):
        build(config(tmp_path, {"path": path}, vocab_size=100))
    build(
        config(tmp_path, {"path": path}, vocab_size=min(largest + 1, 1 << 32), run="other")
        if largest < 1 << 32
        else config(tmp_path, {"path": write(tmp_path / "b.parquet", ROWS, kind)}, run="other")
    )


def test_without_statistics_a_build_says_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [*ROWS, [500]], statistics=False)
    given = config(tmp_path, {"path": path}, vocab_size=100)
    digest = build(given).index.digest
    low, high = open_snapshot(given["cache"], digest).token_ranges[0]
    assert low > high, "unknown"


def test_sources_have_vocabularies_of_their_own_and_extra_columns_have_none(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"ids": ROWS, "mask": [[-1] * len(row) for row in ROWS]}), path)
    first = {
        "path": str(path),
        "column": "ids",
        "extra_columns": ["mask"],
        "weight": 1,
        "vocab_size": 90,
    }
    build(config(tmp_path, first, first | {"vocab_size": 1000}))
    with pytest.raises(DataError, match=r"token 89, expected 0 to 88 \(vocab_size 89\)"):
        build(config(tmp_path, first, first | {"vocab_size": 89}, run="other"))


def test_wrong_statistics_stop_nothing(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a.parquet", [*ROWS, [500_000]]))
    data = path.read_bytes()
    value = (500_000).to_bytes(4, "little")
    other = (600_000).to_bytes(4, "little")
    places = [i for i in range(len(data)) if data.startswith(value, i)]
    body = places[0]  # in the page, or its dictionary; the statistics follow
    assert len(places) > 2
    path.write_bytes(
        data[:body] + (5).to_bytes(4, "little") + data[body + 4 :].replace(value, other)
    )
    given = config(tmp_path, {"path": str(path)}, vocab_size=100)
    build(given)
    assert open_snapshot(given["cache"], build(given).index.digest).token_ranges[0].tolist() == [
        0,
        600_000,
    ]


def test_an_index_without_ranges_is_as_good(tmp_path: Path) -> None:
    given = config(tmp_path, {"path": write(tmp_path / "a.parquet", ROWS)}, vocab_size=100)
    digest = build(given).index.digest
    table = tmp_path / "cache" / "generations" / digest / TOKEN_RANGES
    data = table.read_bytes()
    table.unlink()
    megablend.open(given)
    assert megablend.verify(given["cache"]).problems == ()
    build(given)
    assert table.read_bytes() == data, "the next build writes it again"
    table.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert megablend.verify(given["cache"]).problems == (
        f"{table}: damaged (its checksum is wrong); build again with the config of run 'default' to repair it "
        "(`megablend build CONFIG`)",
    )
    build(given)
    assert megablend.verify(given["cache"]).problems == ()
    shutil.rmtree(tmp_path / "cache")
    assert build(given).index.digest == digest


def test_ranges_come_through_packs_and_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megablend.index.build.packs.PACK_MIN_FILES", 2)
    monkeypatch.setattr("megablend.index.build.file_parts.PART_BYTES", 512)
    for number in range(3):
        write(tmp_path / "data" / f"{number}.parquet", [[number, 7 + number]] * 200)
    given = config(tmp_path, {"path": f"{tmp_path}/data/*.parquet"})
    for _ in range(2):  # the second build takes what the first one found
        digest = build(given).index.digest
        assert open_snapshot(given["cache"], digest).token_ranges.tolist() == [
            [0, 7],
            [1, 8],
            [2, 9],
        ]


def test_a_tokenizer_is_read_only_where_something_is_known(tmp_path: Path) -> None:
    given = config(
        tmp_path,
        {"path": write(tmp_path / "a.parquet", ROWS, statistics=False)},
        vocab_size="gone.json",
    )
    build(given)
    write(tmp_path / "a.parquet", ROWS)
    with pytest.raises(ConfigError, match=r"gone\.json: cannot read the tokenizer"):
        build(given)


def write_raw(path: Path, tokens: list[int]) -> dict[str, Any]:
    """A raw file whose documents end with token 0, and its source."""
    path.write_bytes(np.array(tokens, "<u4").tobytes())
    return {
        "path": str(path),
        "format": "raw",
        "format_options": {"dtype": "uint32", "eod_token": 0},
        "weight": 1,
    }


@pytest.mark.parametrize("part_bytes", [1 << 30, 512])
def test_tokens_that_are_read_for_their_separator_are_looked_at(
    tmp_path: Path, part_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megablend.index.build.file_parts.PART_BYTES", part_bytes)
    tokens = [1 + i % 90 if i % 10 else 0 for i in range(2000)]
    source = write_raw(tmp_path / "a.bin", tokens)
    given = config(tmp_path, source, vocab_size=91, block_bytes=256)
    assert open_snapshot(given["cache"], build(given).index.digest).token_ranges.tolist() == [
        [0, 90]
    ]
    write_raw(tmp_path / "b.bin", [*tokens[:1234], 100_000, *tokens[1234:]])
    both = config(
        tmp_path, source, source | {"path": str(tmp_path / "b.bin")}, vocab_size=91, run="other"
    )
    with pytest.raises(
        DataError, match=r"b\.bin: row 124: token 100000, expected 0 to 90 \(vocab_size 91\)"
    ):
        build(both)


def test_a_raw_file_without_a_separator_is_not_read(tmp_path: Path) -> None:
    source = write_raw(tmp_path / "a.bin", list(range(2000)))
    given = config(tmp_path, source | {"format_options": {"dtype": "uint32"}}, vocab_size=91)
    low, high = open_snapshot(given["cache"], build(given).index.digest).token_ranges[0]
    assert low > high, "unknown"
