"""Files of pyarrow 18, whose list pages begin in the middle of rows; newer versions of pyarrow do not write such."""

import json
from pathlib import Path

import pytest

from megablend.formats.base import ENDS_AT_DOCUMENT_END, HAS_EARLIER_TOKENS, STARTS_MID_DOCUMENT
from tests.formats.parquet_files import check

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
