"""Files of pyarrow 18, whose list pages begin in the middle of rows, and of writers whose page indexes are wrong."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megablend.formats.base import ENDS_AT_DOCUMENT_END, HAS_EARLIER_TOKENS, STARTS_MID_DOCUMENT
from tests.formats.parquet_files import check
from tests.pyarrow_versions import INSTALLED

GOLDEN = Path(__file__).parent.parent / "golden"
NAMES = ["mid_row_v1_plain", "mid_row_v1_zstd_nulls", "mid_row_v1_dictionary", "mid_row_v1_delta"]


@pytest.mark.parametrize("name", NAMES)
def test_pages_that_begin_in_the_middle_of_a_row(name: str) -> None:
    expected = json.loads((GOLDEN / f"{name}.json").read_text())
    found = check(GOLDEN / f"{name}.parquet", expected["rows"], "input_ids")
    assert found.token_dtype == expected["dtype"]
    flags = found.blocks["flags"].tolist()
    assert {
        ENDS_AT_DOCUMENT_END,
        STARTS_MID_DOCUMENT | HAS_EARLIER_TOKENS,
        STARTS_MID_DOCUMENT | HAS_EARLIER_TOKENS | ENDS_AT_DOCUMENT_END,
    } & set(flags)
    assert sum(bool(flag & STARTS_MID_DOCUMENT) for flag in flags) >= 5
    assert not all(flag & ENDS_AT_DOCUMENT_END for flag in flags)
    assert (found.blocks["rows"] == 0).any(), "a page that holds the middle of a row alone"
    assert found.scanned_bytes > 0


LENGTHS = [20, 0, 0, 50_000, 3_000, 0, 70_000, 100, 0, 20_000, 0, 0]
"""Of rows; more than 16,384 elements are written at once."""
OPTIONS: dict[str, dict[str, Any]] = {
    "indexed": {"write_page_index": True},
    # Also in this one, empty rows come late in what is written at once, and are not counted at all
    "large_batches": {"write_page_index": True, "write_batch_size": 1 << 20},
    "unindexed": {},
    "without_statistics": {"write_page_index": True, "write_statistics": False},
}


def write_long_rows(folder: Path, name: str) -> None:
    """Write `{name}_long_{required|nullable}_{options}.parquet`; the golden files are by pyarrow 25.0.1."""
    tokens = pa.array(np.arange(sum(LENGTHS), dtype=np.int32) % 7)
    offsets = pa.array(np.cumsum([0, *LENGTHS], dtype=np.int32))
    for kind in ("required", "nullable"):
        ids = pa.list_(pa.field("element", pa.int32(), nullable=kind == "nullable"))
        schema = pa.schema([pa.field("ids", ids, nullable=kind == "nullable")])
        table = pa.table([pa.ListArray.from_arrays(offsets, tokens, type=ids)], schema=schema)
        for case, options in OPTIONS.items():
            pq.write_table(
                table,
                folder / f"{name}_long_{kind}_{case}.parquet",
                compression="zstd",
                use_dictionary=False,
                data_page_size=1 << 16,
                **options,
            )


@pytest.mark.parametrize("kind", ["required", "nullable"])
@pytest.mark.parametrize("case", OPTIONS)
def test_long_rows_whose_levels_are_counted_wrong(tmp_path: Path, kind: str, case: str) -> None:
    """Arrow C++ 19 to 25 writes wrong histograms of levels for rows of more than 16,384 elements (apache/arrow#50778)."""
    tokens = iter(np.arange(sum(LENGTHS)) % 7)
    rows = [[int(next(tokens)) for _ in range(length)] for length in LENGTHS]
    write_long_rows(tmp_path, "now")
    golden = check(GOLDEN / f"pyarrow25_long_{kind}_{case}.parquet", rows)
    now = check(tmp_path / f"now_long_{kind}_{case}.parquet", rows)
    if INSTALLED >= 19:  # earlier ones divide long rows into other pages
        assert golden.blocks["tokens"].tolist() == now.blocks["tokens"].tolist()
    # Levels of required lists are 0 and 1 alone, so both of their histograms are wrong
    is_told = kind == "required" and case in ("indexed", "large_batches")
    assert (golden.note is not None) == is_told


def test_a_flat_column_whose_levels_are_counted_wrong() -> None:
    """Its nulls suffice, so it is read without a scan, and nothing is told; by pyarrow 25.0.0, in a batch of 60,000 values."""
    rows = [None if i in (3, 5, 17_000, 40_000, 59_999) else i % 7 for i in range(60_000)]
    found = check(GOLDEN / "pyarrow25_flat_large_batches.parquet", rows, "ids")
    assert found.note is None
    assert found.scanned_bytes == 0


def test_first_rows_that_count_elements() -> None:
    """ClickHouse up to 25.6 writes them (ClickHouse#83876); the file, of pages of 2,000 bytes, is by chdb 3.6.0."""
    path = GOLDEN / "clickhouse25_lists.parquet"
    rows = [[(number * 7 + x) % 11 for x in range(100 + number % 5 * 200)] for number in range(40)]
    found = check(path, rows)
    assert len(found.blocks) == 7
    assert found.note is not None
    assert (
        "row groups (the first is 0) contradict the metadata of their column chunks" in found.note
    )
