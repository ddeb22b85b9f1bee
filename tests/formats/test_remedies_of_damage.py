"""Remedies in messages about files that are damaged, too large or of another writer: written again, they are read."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import megablend
from megablend.errors import ChangedFileError, DataError, MegablendError
from megablend.formats.arrow import count_batches
from megablend.formats.megatron import lengths, reader
from megablend.formats.parquet.decoding.codecs import CODECS
from tests.formats.parquet_files import data_page, write
from tests.formats.writers import RAW_EOD, index, opened, pieces
from tests.pairs import write_pair
from tests.runs import make_config

ROWS = [list(range(1, 1 + i % 40)) for i in range(200)]
Config = dict[str, Any]
Write = Callable[[Path], Any]


def read_all(config: Config) -> list[list[int]]:
    """The samples of a run that is built."""
    notes = megablend.build(config).index.notes
    assert not notes, notes
    dataset = megablend.open(config)
    return [dataset[k]["tokens"].tolist() for k in range(len(dataset))]


def parquet(path: Path, rows: Any = ROWS, **options: Any) -> None:
    pq.write_table(pa.table({"ids": rows}), path, **options)


def arrow(path: Path, rows: int | None = None) -> None:
    table = pa.table({"ids": ROWS})
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)


def old_levels(path: Path) -> None:
    write(path, [data_page(b"\x2c" + np.array([1, 3, 4, 6], "<i4").tobytes(), 6, levels=4)], num_values=6, num_rows=6)


def damaged_footer(path: Path) -> None:
    parquet(path)
    data = path.read_bytes()
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    path.write_bytes(data[:start] + bytes(20) + data[start + 20 :])


def long_footer(path: Path) -> None:
    parquet(path)
    data = path.read_bytes()
    path.write_bytes(data[:-8] + (1 << 24).to_bytes(4, "little") + data[-4:])


def without_page_index(path: Path) -> None:
    """Its page index would be behind the end of the file."""
    parquet(path, write_page_index=True, data_page_size=100, write_batch_size=5, use_dictionary=False)
    chunk = pq.read_metadata(path).row_group(0).column(0)
    end = chunk.data_page_offset + chunk.total_compressed_size
    data = path.read_bytes()
    path.write_bytes(data[:end] + data[-8 - int.from_bytes(data[-8:-4], "little") :])


class Fault(NamedTuple):
    name: str
    write: Write
    says: str
    remedies: list[tuple[Write, Config]]
    """What writes the file again, and changes of its source."""
    limit: tuple[Any, str, Any] | None = None
    """Of a module, which is lowered, as what is larger takes long; or a codec that is removed."""


FAULTS: dict[str, Fault] = {
    "an old encoding of levels": Fault(
        "a.parquet",
        old_levels,
        "its levels are encoded as BIT_PACKED, .*; rewrite the file with a current writer",
        [(parquet, {})],
    ),
    "a footer that is damaged": Fault(
        "a.parquet", damaged_footer, "the footer is damaged: .*; rewrite or re-download the file", [(parquet, {})]
    ),
    "a footer that is too long": Fault(
        "a.parquet",
        long_footer,
        r"there are only [\d,]+ bytes before it; rewrite or re-download the file",
        [(parquet, {})],
    ),
    "a file whose page index was cut out": Fault(
        "a.parquet",
        without_page_index,
        "the footer is damaged: offset_index has bytes .*; rewrite or re-download the file",
        [(parquet, {})],
    ),
    "a codec that is not supported": Fault(
        "a.parquet",
        lambda path: parquet(path, compression="brotli"),
        "codec BROTLI is not supported; write the file with (zstd) or (lz4)",
        [(lambda path: parquet(path, compression="zstd"), {}), (lambda path: parquet(path, compression="lz4"), {})],
        (CODECS, "", 4),
    ),
    "batches that are too large": Fault(
        "a.arrow",
        arrow,
        r"bytes of tokens, more than 2000; write smaller batches \(max_chunksize of RecordBatchFileWriter.write_table\)",
        [(lambda path: arrow(path, 5), {})],
        (count_batches, "MAX_BYTES", 2000),
    ),
    "a block that is too large": Fault(
        "a.bin",
        lambda path: write_pair(path.with_suffix(""), [500] * 20),
        "is larger than the limit of 999; choose a smaller block_bytes, or split the longest sequences",
        [(lambda path: write_pair(path.with_suffix(""), [250] * 40), {"block_bytes": 500})],
        (reader, "_MAX_BYTES", 999),
    ),
    "a block that is too large, of many sequences": Fault(
        "a.bin",
        lambda path: write_pair(path.with_suffix(""), [5] * 500),
        "is larger than the limit of 99; choose a smaller block_bytes, or split the longest sequences",
        [(lambda path: None, {"block_bytes": 64})],
        (reader, "_MAX_BYTES", 99),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fault = FAULTS[name]
    if fault.limit is not None:
        holder, attribute, value = fault.limit
        monkeypatch.setattr(holder, attribute, value) if attribute else monkeypatch.delitem(holder, value)
    path = tmp_path / fault.name
    for number, (remedy, changes) in enumerate(fault.remedies):
        fault.write(path)
        source = {"name": "a", "path": str(path)} | ({} if path.suffix == ".bin" else {"column": "ids"})
        config = make_config(tmp_path, [source], samples=20, block_bytes=2048, run=f"r{number}")
        with pytest.raises(MegablendError) as caught:
            read_all(config)
        assert re.search(fault.says, str(caught.value)), str(caught.value)
        remedy(path)
        assert len(read_all(config | changes)) == 20


def test_an_extra_column_of_half_floats(tmp_path: Path) -> None:
    def write_weights(dtype: Any) -> None:
        weights = [np.ones(len(row), dtype) for row in ROWS]
        pq.write_table(pa.table({"ids": ROWS, "weight": weights}), tmp_path / "a.parquet")

    source = {"name": "a", "path": str(tmp_path / "a.parquet"), "column": "ids", "extra_columns": ["weight"]}
    config = make_config(tmp_path, [source], samples=20)
    write_weights(np.float16)
    with pytest.raises(MegablendError, match=r"has type float16, expected numbers .*; write it as (float32)"):
        read_all(config)
    write_weights(np.float32)
    assert len(read_all(config)) == 20


def test_a_bin_that_is_longer_than_its_idx_says(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "a", [9] * 60)
    write_pair(tmp_path / "b", [9] * 70)
    (tmp_path / "a.bin").write_bytes((tmp_path / "b.bin").read_bytes())
    config = make_config(tmp_path, [{"name": "a", "path": prefix}], samples=20)
    (note,) = megablend.build(config).index.notes
    assert re.search(r"a\.idx describes the first 1,080; the rest is never read; check that the two files belong", note)
    (tmp_path / "a.idx").write_bytes((tmp_path / "b.idx").read_bytes())
    assert len(read_all(config | {"run": "together"})) == 20


def test_an_idx_that_is_still_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "WHOLE_BYTES", 100)
    monkeypatch.setattr(lengths, "WHOLE_BYTES", 100)
    prefix = write_pair(tmp_path / "a", [9] * 60)
    digest = lengths.digest_idx

    def digest_while_it_is_written(*arguments: Any) -> Any:
        write_pair(tmp_path / "a", [8, 10] * 30)
        return digest(*arguments)

    config = make_config(tmp_path, [{"name": "a", "path": prefix}], samples=20)
    with monkeypatch.context() as patch:
        patch.setattr(reader, "digest_idx", digest_while_it_is_written)
        says = "a.idx: changed while it was being indexed; wait until its writer has finished, then build again"
        with pytest.raises(ChangedFileError, match=says):
            megablend.build(config)
    assert len(read_all(config)) == 20


@pytest.mark.parametrize("remedy", ["restore", "another run"])
def test_documents_that_begin_elsewhere(tmp_path: Path, remedy: str) -> None:
    """Between the bytes that a digest of the content takes, a change is only seen when the tokens are read."""
    path = tmp_path / "a.npy"
    tokens = np.tile(np.array([1, 2, 3, RAW_EOD], np.uint16), 500)
    np.save(path, tokens)
    found = index(path, None)
    expected = pieces(opened(path, None, found), found.blocks, found.chunks)
    np.save(path, np.tile(np.array([1, RAW_EOD, 3, RAW_EOD], np.uint16), 500))
    says = r"when it was indexed; restore the original file; or give the run another name"
    with pytest.raises(DataError, match=says):
        pieces(opened(path, None, found), found.blocks, found.chunks)
    if remedy == "restore":
        np.save(path, tokens)
        assert pieces(opened(path, None, found), found.blocks, found.chunks) == expected
    else:
        found = index(path, None)
        assert pieces(opened(path, None, found), found.blocks, found.chunks)[0][0] == [1, RAW_EOD]
