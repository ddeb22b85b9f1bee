from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megablend.errors import ConfigError
from megablend.formats.parquet.metadata.footer import read_footer
from megablend.formats.parquet.metadata.schema import OTHER_DTYPES, Column, find_column, leaves
from megablend.formats.parquet.metadata.source import FileBytes
from megablend.formats.parquet.metadata.thrift import MalformedError, Struct, read_struct
from tests.formats.parquet_files import LIST, element
from tests.storages import STORAGE

LISTS = pa.list_(pa.int32())


def schema_of(tmp_path: Path, **fields: pa.DataType) -> Sequence[Struct]:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.schema(fields).empty_table(), path)
    storage = STORAGE
    return read_footer(FileBytes(str(path), storage, storage.stat(str(path)).size)).schema


def elements(*written: bytes) -> list[Struct]:
    return [read_struct(each)[0] for each in written]


def test_levels(tmp_path: Path) -> None:
    record = pa.struct(
        [pa.field("ids", LISTS, nullable=False), pa.field("x", pa.int64(), nullable=False)]
    )
    required = pa.list_(pa.field("element", pa.int32(), nullable=False))
    found = {
        c.name: c
        for c in leaves(
            schema_of(tmp_path, flat=pa.uint16(), ids=LISTS, record=record, full=required)
        )
    }
    levels = {
        name: (c.ordinal, c.dtype, c.max_def, c.max_rep, c.slot_def) for name, c in found.items()
    }
    assert levels == {
        "flat": (0, "uint16", 1, 0, 0),
        "ids": (1, "int32", 3, 1, 2),
        "record.ids": (2, "int32", 3, 1, 2),
        "record.x": (3, "int64", 1, 0, 0),
        "full": (4, "int32", 2, 1, 2),
    }
    assert all(Column.from_meta(c.to_meta()) == c for c in found.values())


def test_the_only_column_of_integers_is_found(tmp_path: Path) -> None:
    schema = schema_of(tmp_path, text=pa.string(), ids=LISTS, day=pa.date32(), score=pa.float64())
    column, num_leaves = find_column(schema, None, "x")
    assert (column.name, column.path, num_leaves) == ("ids", ("ids", "list", "element"), 4)


def test_several_columns_need_a_name(tmp_path: Path) -> None:
    schema = schema_of(tmp_path, ids=LISTS, record=pa.struct([("others", LISTS)]))
    with pytest.raises(
        ConfigError,
        match=r"lists of integers: ids, record\.others.*set `column: ids` for this source",
    ):
        find_column(schema, None, "x")
    with pytest.raises(
        ConfigError,
        match=r"no column contains integers or lists of integers; .* tokenize the text first",
    ):
        find_column(schema_of(tmp_path, text=pa.string()), None, "x")


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("input_id", "no column 'input_id'; did you mean 'input_ids'"),
        ("record", "no column 'record'; columns of integers: input_ids, record.mask|did you mean"),
        ("record.task", "did you mean 'record.mask'"),
        ("zzz", "no column 'zzz'; columns of integers: input_ids, record.mask"),
    ],
)
def test_the_nearest_name_is_given(tmp_path: Path, name: str, match: str) -> None:
    schema = schema_of(tmp_path, input_ids=LISTS, record=pa.struct([("mask", LISTS)]))
    with pytest.raises(ConfigError, match=match):
        find_column(schema, name, "x")


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (pa.string(), "has type BYTE_ARRAY, expected integers"),
        (pa.float64(), "has type DOUBLE"),
        (pa.date32(), "has type INT32 with"),
        (pa.timestamp("us"), "has type INT64 with"),
        (pa.decimal128(5), "has type FIXED_LEN_BYTE_ARRAY"),
        (pa.uint64(), "has type uint64"),
        (pa.list_(LISTS), "is a list of lists"),
        (pa.bool_(), "has type BOOLEAN"),
    ],
    ids=str,
)
def test_other_types_are_refused(tmp_path: Path, kind: pa.DataType, match: str) -> None:
    with pytest.raises(ConfigError, match=f"x: column 'a' {match}.*; columns of integers: ids"):
        find_column(schema_of(tmp_path, a=kind, ids=LISTS), "a", "x")


@pytest.mark.parametrize("name", OTHER_DTYPES.values())
def test_numbers_of_any_kind_where_they_will_do(tmp_path: Path, name: str) -> None:
    kind = pa.from_numpy_dtype(name)
    schema = schema_of(tmp_path, a=kind, ids=LISTS)
    assert find_column(schema, "a", "x", numbers=True)[0].dtype == name
    with pytest.raises(ConfigError, match=r"'a' has type .*, expected integers"):
        find_column(schema, "a", "x")


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (pa.string(), r"has type BYTE_ARRAY, expected numbers \(int32, .*float64\)"),
        (pa.uint64(), r"has type uint64; write it as int64 or uint32"),
        (pa.float16(), r"has type float16, expected numbers \(.*\); write it as float32"),
        (pa.list_(pa.float16()), r"has type float16, expected numbers \(.*\); write it as float32"),
        (pa.decimal128(5), "has type FIXED_LEN_BYTE_ARRAY, expected numbers"),
        (pa.list_(pa.list_(pa.float32())), "is a list of lists"),
    ],
    ids=str,
)
def test_what_are_no_numbers_is_refused(tmp_path: Path, kind: pa.DataType, match: str) -> None:
    with pytest.raises(ConfigError, match=f"x: column 'a' {match}.*; columns of numbers: ids"):
        find_column(schema_of(tmp_path, a=kind, ids=LISTS), "a", "x", numbers=True)


def test_maps_are_refused(tmp_path: Path) -> None:
    schema = schema_of(tmp_path, m=pa.map_(pa.int32(), pa.int32()), ids=LISTS)
    assert find_column(schema, None, "x")[0].name == "ids"
    with pytest.raises(ConfigError, match="is in a map"):
        find_column(schema, "m.key_value.key", "x")


def test_typed_values_of_variants_are_refused(tmp_path: Path) -> None:
    """As Spark writes variants: elements of other types are in `value`, and would be left out."""
    element = pa.struct({"value": pa.binary(), "typed_value": pa.int64()})
    variant = {"metadata": pa.binary(), "value": pa.binary(), "typed_value": pa.list_(element)}
    schema = schema_of(tmp_path, v=pa.struct(variant), typed_value=LISTS)
    assert find_column(schema, None, "x")[0].name == "typed_value"
    name = "v.typed_value.typed_value"
    with pytest.raises(
        ConfigError, match=f"x: column '{name}' is part of a variant, .*; write one list"
    ):
        find_column(schema, name, "x")
    with pytest.raises(
        ConfigError, match=r"can read; column 'v\.typed_value\.value' is part of a var"
    ):
        find_column(schema_of(tmp_path, v=pa.struct(variant)), None, "x")


def test_two_columns_of_one_name() -> None:
    twice = elements(
        element("schema", children=2), element("a", 0, type=1), element("a", 0, type=1)
    )
    with pytest.raises(ConfigError, match="2 columns are named 'a'"):
        find_column(twice, "a", "x")


@pytest.mark.parametrize(
    ("written", "name", "levels"),
    [
        ([element("a", 2, type=1)], "a", (1, 1, 1)),
        ([element("a", 1, children=1, converted=3), element("array", 2, type=1)], "a", (2, 1, 2)),
        (
            [
                element("a", 0, children=1, converted=3),
                element("a_tuple", 2, children=1),
                element("x", 0, type=1),
            ],
            "a.x",
            (1, 1, 1),
        ),
        (
            [
                element("a", 0, children=1, converted=3),
                element("bag", 2, children=1),
                element("item", 1, type=1),
            ],
            "a",
            (2, 1, 1),
        ),
    ],
)
def test_lists_of_old_writers(
    written: list[bytes], name: str, levels: tuple[int, int, int]
) -> None:
    column = next(leaves(elements(element("schema", children=1), *written)))
    assert (column.name, (column.max_def, column.max_rep, column.slot_def)) == (name, levels)


@pytest.mark.parametrize(
    ("written", "match"),
    [
        ([], "empty"),
        (LIST[:2], "ends before"),
        ([*LIST, element("more", 0, type=1)], "more elements"),
        ([element("schema", children=1), element("a", 7, type=1)], "repetition type 7"),
        ([element("schema", children=1), element("a", 0)], "type of a column is missing"),
        ([element("schema", children=1), *[element("a", 1, children=1)] * 200], "deeper than 127"),
        (
            [element("schema", children=1), *[element("a", 0, children=1)] * 20_000],
            "deeper than 512 groups",
        ),
        ([element("schema", children=-1)], "num_children is -1"),
    ],
)
def test_broken_schemas(written: list[bytes], match: str) -> None:
    with pytest.raises(MalformedError, match=match):
        list(leaves(elements(*written)))
