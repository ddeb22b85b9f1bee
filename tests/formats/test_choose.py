"""Which column is taken for that of the tokens, where none is named: never one that may be something else."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megablend.errors import ConfigError
from tests.formats.writers import index

LISTS = pa.array([[1, 2], [3]], pa.list_(pa.int32()))
SINGLE = pa.array([2, 1], pa.int64())
FLOATS = pa.array([[0.5], [0.5]])
TEXT = pa.array(["a b", "c"])
UNSIGNED = pa.array([[1, 2], [3]], pa.list_(pa.uint64()))
PAIRS = pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2))
LARGE = LISTS.cast(pa.large_list(pa.int32()))

TAKEN = [
    ({"text": TEXT, "ids": LISTS}, "ids"),
    ({"text": TEXT, "ids": LISTS, "token_count": SINGLE}, "ids"),
    ({"pairs": PAIRS}, "pairs"),
    ({"attention_mask": LISTS, "input_ids": LARGE, "labels": LISTS}, "input_ids"),
    ({"tokens": LISTS, "token_ids": LISTS}, "tokens"),
    ({"words": LISTS, "input_ids": LISTS, "tokens": SINGLE}, "input_ids"),
    ({"loss_mask": LISTS, "words": LISTS}, "words"),
    ({"Input_IDs": LISTS, "words": LISTS}, "Input_IDs"),
    ({"input_ids": SINGLE}, "input_ids"),
    ({"scores": FLOATS, "words": LISTS}, "words"),
]
REFUSED = [
    (
        {"text": TEXT, "token_count": SINGLE},
        "single integers, which may be counts or ids: token_count",
    ),
    ({"text": TEXT, "id": SINGLE}, "single integers, which may be counts or ids: id"),
    ({"text": TEXT, "tokens": SINGLE}, "single integers, which may be counts or ids: tokens"),
    ({"count": SINGLE}, "single integers, which may be counts or ids: count"),
    ({"text": TEXT, "attention_mask": LISTS}, "lists of integers: attention_mask"),
    ({"a": LISTS, "b": LISTS, "c": SINGLE}, r"lists of integers: a, b; single integers, .*: c"),
    ({"text": TEXT, "scores": FLOATS}, "no column contains integers or lists of integers"),
    (
        {"input_ids": UNSIGNED},
        r"column 'input_ids' has the name of a column of tokens, but has type .*uint64>?; write it as "
        r"int64",
    ),
    (
        {"input_ids": UNSIGNED, "places": LISTS},
        r"'input_ids' .*uint64.*if the tokens are in 'places', set `column: places`",
    ),
    (
        {"tokens": FLOATS, "places": LISTS},
        r"column 'tokens' .*if the tokens are in 'places', set `column: places`",
    ),
]


def write(folder: Path, kind: str, columns: dict[str, pa.Array]) -> Path:
    table = pa.table(columns)
    path = folder / f"x.{kind}"
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize(
    ("columns", "taken"), TAKEN, ids=lambda case: case if isinstance(case, str) else ""
)
def test_the_column_of_tokens_is_taken(
    tmp_path: Path, kind: str, columns: dict[str, pa.Array], taken: str
) -> None:
    found = index(write(tmp_path, kind, columns), None)
    assert found.column == taken
    assert found.tokens == len(
        columns[taken].flatten() if taken != "input_ids" or len(columns) > 1 else SINGLE
    )


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize(("columns", "says"), REFUSED)
def test_what_may_be_something_else_has_to_be_named(
    tmp_path: Path, kind: str, columns: dict[str, pa.Array], says: str
) -> None:
    path = write(tmp_path, kind, columns)
    with pytest.raises(ConfigError, match=says) as caught:
        index(path, None)
    if "set `column: " in str(caught.value):  # what it says to do helps
        named = str(caught.value).split("set `column: ")[1].split("`")[0]
        assert index(path, named).column == named
