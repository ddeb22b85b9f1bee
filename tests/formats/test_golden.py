"""Files by other writers read as pyarrow reads them. Made by tools/make_golden.py, and never changed."""

import json
from pathlib import Path
from typing import Any

import pytest

from megablend.testing.documents import join_pieces
from tests.formats.writers import index, opened, pieces

GOLDEN = Path(__file__).parent.parent / "golden"
EXPECTED: dict[str, Any] = json.loads((GOLDEN / "expected.json").read_text(encoding="utf-8"))
WRITERS = (
    "pyarrow14",
    "pyarrow18",
    "pyarrow21",
    "pyarrow26",
    "polars",
    "duckdb",
    "fastparquet",
    "clickhouse",
    "spark",
    "datafusion",
)


def test_the_files_are_those_expected() -> None:
    assert {path.name for path in GOLDEN.iterdir() if path.is_file()} == {
        *EXPECTED["files"],
        "expected.json",
    }
    assert {name.split("_")[0] for name in EXPECTED["files"]} == set(WRITERS)


@pytest.mark.parametrize("name", EXPECTED["files"])
def test_it_reads_as_pyarrow_reads_it(name: str) -> None:
    path = GOLDEN / name
    column = EXPECTED["files"][name]["column"]
    expected = EXPECTED["contents"][EXPECTED["files"][name]["contents"]]
    found = index(path, column)
    documents = list(
        join_pieces(found, pieces(opened(path, column, found), found.blocks, found.chunks))
    )
    assert [len(document) for document in documents] == expected["lengths"]
    assert [token for document in documents for token in document] == expected["tokens"]
    assert (found.rows, found.tokens) == (len(expected["lengths"]), len(expected["tokens"]))
    assert found.blocks["ends"].sum() == sum(1 for length in expected["lengths"] if length)
    quick = index(path, column, documents=False).blocks["tokens"]
    assert quick[quick > 0].tolist() == found.blocks["tokens"][found.blocks["tokens"] > 0].tolist()


@pytest.mark.parametrize("name", ["nulls", "lists", "full_lists"])
def test_clickhouse_counts_levels_wrong_where_a_dictionary_overflows(name: str) -> None:
    found = index(GOLDEN / f"clickhouse_{name}_overflow.parquet", "ids")
    assert found.note is not None
    assert (
        "the page indexes of 1 of 1 row groups (the first is 0) contradict the metadata of their "
        "column chunks" in found.note
    )
    assert index(GOLDEN / f"clickhouse_{name}_dictionary.parquet", "ids").note is None
