import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from megablend.config.read_spec import ReadSpec
from megablend.errors import ConfigError, CorruptFileError, UnsupportedFileError
from megablend.formats import FORMATS
from megablend.formats.arrow import buffers
from megablend.formats.arrow.buffers import decompress
from megablend.formats.arrow.column import find_column
from megablend.formats.arrow.count_batches import expect_ranges, load_batch
from megablend.formats.arrow.flatbuffer import FlatbufferError, Table
from megablend.formats.arrow.footer import batch_places, read_footer, read_schema
from megablend.formats.arrow.message import BatchError, needed_ranges
from megablend.storage.base import Bytes
from megablend.storage.prefetched import PrefetchedStorage
from tests.formats.writers import index, opened, pieces
from tests.pyarrow_versions import needs_pyarrow
from tests.storages import STORAGE

ROWS = [[1, 2], None, [3, None], [], [7, 8], [9, None], [], [6]]


def write(path: Path, table: pa.Table, *, rows: int = 3, codec: str | None = None) -> Path:
    with pa.ipc.new_file(
        path, table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)
    ) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def read(path: Path, column: str | None = "ids") -> list[list[int]]:
    """All documents; Arrow's blocks hold whole ones."""
    found = index(path, column)
    blocks = pieces(opened(path, column, found), found.blocks, found.chunks)
    assert [len(block) for block in blocks] == found.blocks["rows"].tolist()
    assert [sum(map(len, block)) for block in blocks] == found.blocks["tokens"].tolist()
    assert [sum(map(bool, block)) for block in blocks] == found.blocks["ends"].tolist()
    return [piece for block in blocks for piece in block]


def expected(values: list[Any]) -> list[list[int]]:
    """What a column's python values mean: the non-null elements of each row."""
    rows = [value if isinstance(value, list) else [value] for value in values]
    return [[element for element in row if element is not None] for row in rows]


@pytest.mark.parametrize("codec", [None, "lz4", "zstd"])
@pytest.mark.parametrize(
    "element", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"]
)
def test_integer_types(tmp_path: Path, element: str, codec: str | None) -> None:
    limits = np.iinfo(element)
    values = [[0, limits.max], [limits.min, None], None, []]
    path = write(
        tmp_path / "x.arrow",
        pa.table({"ids": pa.array(values, pa.list_(pa.type_for_alias(element)))}),
        codec=codec,
    )
    assert read(path) == expected(values)
    assert index(path, "ids").token_dtype == element


@needs_pyarrow(16, "views of strings")
@pytest.mark.parametrize("codec", [None, "lz4", "zstd"])
@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.list_(pa.int32()), ROWS),
        (pa.large_list(pa.int32()), ROWS),
        (pa.list_(pa.int32(), 2), [[1, 2], None, [3, None], [None, None], [5, 6], [7, 8], None]),
        (pa.int32(), [1, None, 3, 4, None, None, None, 5]),
        (pa.list_(pa.int32()), [[1], [2, 3]]),
        (pa.int32(), [1, 2, 3, 4]),
        (pa.list_(pa.int32()), []),
    ],
    ids=str,
)
def test_layouts_beside_and_inside_other_columns(
    tmp_path: Path, kind: Any, values: list[Any], codec: str | None
) -> None:
    num_rows = len(values)
    ids = pa.array(values, kind)
    texts = ["x" * (i * 9) for i in range(num_rows)]
    mask = [i % 4 == 2 for i in range(num_rows)]
    table = pa.table(
        {
            "view": pa.array(texts, pa.string_view()),
            "text": texts,
            "binary": pa.array([text.encode() for text in texts], pa.large_binary()),
            "fixed": pa.array([b"abc"] * num_rows, pa.binary(3)),
            "nothing": pa.nulls(num_rows),
            "flag": [True] * num_rows,
            "price": pa.array([None] * num_rows, pa.decimal128(9, 2)),
            "map": pa.array([{"k": 1}] * num_rows, pa.map_(pa.string(), pa.int8())),
            "word": pa.array(texts).dictionary_encode(),
            "deep": pa.array([[[1.5]]] * num_rows, pa.list_(pa.list_(pa.float32(), 1))),
            "record": pa.StructArray.from_arrays(
                [pa.array(texts, pa.string_view()), ids],
                ["view", "ids"],
                mask=pa.array(mask, pa.bool_()),
            ),
            "ids": ids,
            "last": texts,
        }
    )
    path = write(tmp_path / "x.arrow", table, codec=codec)
    assert read(path) == expected(values)
    inside = [None if mask[i] else value for i, value in enumerate(values)]
    assert read(path, "record.ids") == expected(inside)
    # Where the first message is known, buffers are expected where the first batch has them
    for column in ("ids", "record.ids"):
        ahead = PrefetchedStorage(STORAGE)
        ahead.request(str(path), np.array([0]), np.array([path.stat().st_size // 2]))
        assert (
            index(path, column, storage=ahead).blocks.tolist()
            == index(path, column).blocks.tolist()
        )


def test_null_rows_may_have_slots(tmp_path: Path) -> None:
    ids = pa.ListArray.from_arrays(
        pa.array([0, 2, 3, 5], pa.int32()), pa.array([1, 2, 3, 4, 5], pa.int32())
    )
    valid = pa.py_buffer(b"\x05")
    ids = pa.ListArray.from_buffers(
        ids.type, 3, [valid, ids.buffers()[1]], null_count=1, children=[ids.values]
    )
    assert read(write(tmp_path / "x.arrow", pa.table({"ids": ids}))) == [[1, 2], [], [4, 5]]


def test_slices(tmp_path: Path) -> None:
    table = pa.table({"ids": pa.array(ROWS, pa.list_(pa.int32()))}).slice(2, 5)
    assert read(write(tmp_path / "x.arrow", table, rows=2)) == expected(ROWS[2:7])


def test_an_extension_type_is_read_as_it_is_stored(tmp_path: Path) -> None:
    kind = pa.fixed_shape_tensor(pa.int32(), (2,))
    ids = pa.ExtensionArray.from_storage(kind, pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2)))
    assert read(write(tmp_path / "x.arrow", pa.table({"ids": ids}))) == [[1, 2], [3, 4]]


def test_only_the_column_is_read(tmp_path: Path) -> None:
    table = pa.table(
        {"text": ["x" * 10_000] * 4, "ids": pa.array([[1, 2]] * 4, pa.list_(pa.int32()))}
    )
    found = index(write(tmp_path / "x.arrow", table, rows=2), "ids")
    assert found.scanned_bytes == 2 * 3 * 4  # the offsets of two batches
    assert found.blocks["stored_bytes"].max() < 1000


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (pa.float32(), [1.0], "column 'ids' has type float, expected integers"),
        (pa.list_(pa.string()), [["a"]], r"has type list<item: string>, expected integers"),
        (pa.list_(pa.list_(pa.int32())), [[[1]]], "has type list<item: list<.*, expected integers"),
        (pa.uint64(), [1], "has type uint64; write it as int64 or uint32"),
        (
            pa.dictionary(pa.int32(), pa.int32()),
            [1],
            "is dictionary-encoded; decode it before writing",
        ),
        (
            pa.list_(pa.dictionary(pa.int8(), pa.int32())),
            [[1]],
            "is dictionary-encoded; decode it before writing",
        ),
        (pa.list_(pa.int32(), 0), [[]], "contains lists of size 0"),
    ],
    ids=str,
)
def test_columns_that_hold_no_tokens(
    tmp_path: Path, kind: Any, values: list[Any], message: str
) -> None:
    path = write(tmp_path / "x.arrow", pa.table({"ids": pa.array(values, kind)}))
    with pytest.raises(ConfigError, match=message):
        index(path, "ids")


def test_beside_the_tokens_any_numbers_will_do() -> None:
    kinds = [pa.bool_(), pa.float16(), pa.float32(), pa.float64(), pa.int8()]
    schema = pa.schema(
        [(str(kind), kind) for kind in kinds]
        + [("text", pa.string()), ("lists", pa.list_(pa.uint64()))]
    )
    found = [find_column("x", str(kind), schema, numbers=True)[1].token_dtype for kind in kinds]
    assert found == ["bool", "float16", "float32", "float64", "int8"]
    with pytest.raises(
        ConfigError,
        match=r"x: column 'text' has type string, expected integers, floats, booleans or li",
    ):
        find_column("x", "text", schema, numbers=True)
    with pytest.raises(
        ConfigError, match=r"'lists' has type list<item: uint64>; write it as int64 or uint32"
    ):
        find_column("x", "lists", schema, numbers=True)


@needs_pyarrow(16, "views of lists")
def test_columns_of_unknown_layout_are_named(tmp_path: Path) -> None:
    views = pa.ListViewArray.from_arrays([0], [1], pa.array([1]))
    path = write(tmp_path / "x.arrow", pa.table({"odd": views, "ids": [1]}))
    with pytest.raises(
        UnsupportedFileError, match=r"column odd has type list_view<.*leave it out of the file"
    ):
        index(path, "ids")


def test_the_layout_of_a_union_without_fields_is_unknown(tmp_path: Path) -> None:
    odd = pa.UnionArray.from_sparse(pa.array([], pa.int8()), [])
    path = write(tmp_path / "x.arrow", pa.table({"odd": odd, "ids": pa.array([], pa.int64())}))
    with pytest.raises(
        UnsupportedFileError, match=r"column odd has type .*leave it out of the file"
    ):
        index(path, "ids")


def test_the_column_must_be_clear(tmp_path: Path) -> None:
    table = pa.table({"a": [[1]], "b": [1], "record": [{"input_id": [1]}]})
    path = write(tmp_path / "x.arrow", table)
    with pytest.raises(
        ConfigError,
        match=r"lists of integers: a, record\.input_id; single integers, which may be counts or ids: b",
    ):
        index(path, None)
    with pytest.raises(
        ConfigError, match=r"no column 'record.input_ids'; did you mean 'record.input_id'"
    ):
        index(path, "record.input_ids")
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["a", "a"])
    with pytest.raises(UnsupportedFileError, match="has two columns named a; rename one"):
        index(write(tmp_path / "y.arrow", twice), "a")


def test_streams_named_files_and_old_feather_are_refused_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "x.arrow"
    table = pa.table({"ids": [[1]]})
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(
        UnsupportedFileError,
        match=r"is an Arrow stream, not an Arrow file; set `format: arrow-stream`",
    ):
        FORMATS["arrow"].index(str(path), ReadSpec(column="ids"), storage=STORAGE)
    path.write_bytes(b"FEA1" + bytes(40) + b"FEA1")
    with pytest.raises(
        UnsupportedFileError,
        match=r"is a Feather V1 file, which cannot contain lists; write the tokens to a Parquet file",
    ):
        index(path, "ids")


def test_damaged_ends(tmp_path: Path) -> None:
    path = write(tmp_path / "x.arrow", pa.table({"ids": [[1]]}))
    whole = path.read_bytes()
    footer = len(whole) - 10 - int.from_bytes(whole[-10:-6], "little")
    for damaged, message in (
        (b"", "0 bytes, too few"),
        (b"PAR1" + whole[4:], "at byte 0: begins with b'PAR1"),
        (whole[:-1] + b"2", r"ends with b'ARROW2', not with b'ARROW1': truncated"),
        (
            whole[:-10] + struct.pack("<i", -5) + whole[-6:],
            "has an invalid footer length: -5 bytes",
        ),
        (
            whole[:-10] + struct.pack("<i", 1 << 30) + whole[-6:],
            "has an invalid footer length: 1073741824 bytes",
        ),
        (
            whole[:footer] + b"\xff" * 8 + whole[footer + 8 :],
            f"at byte {footer}: invalid footer: an offset points to byte",
        ),
    ):
        path.write_bytes(damaged)
        with pytest.raises(CorruptFileError, match=message):
            index(path, "ids")


@pytest.mark.parametrize("make", [pa.ipc.new_file, pa.ipc.new_stream])
def test_integers_of_128_bits_are_no_damage(tmp_path: Path, make: Any) -> None:
    """polars writes them; pyarrow does not read the schemas that have them."""
    path = tmp_path / "x.arrow"
    with make(path, pa.schema({"ids": pa.int64()})):
        pass
    path.write_bytes(path.read_bytes().replace(struct.pack("<i", 64), struct.pack("<i", 128)))
    message = "cannot be read by pyarrow: .*64 bits.*; leave out or cast the column"
    with pytest.raises(UnsupportedFileError, match=message):
        index(path, "ids")


def stored(data: bytes) -> Bytes:
    """As it comes from a file."""
    return np.frombuffer(data, np.uint8)


def test_compressed_buffers_must_have_the_size_they_claim() -> None:
    for codec in ("lz4", "zstd"):
        packed = pa.Codec(codec).compress(b"x" * 100, asbytes=True)
        assert bytes(decompress(stored(struct.pack("<q", 100) + packed), codec)) == b"x" * 100
        for claim, message in (
            (99, "decompresses to more"),
            (101, "decompresses to 100"),
            (-2, "with an invalid uncompressed size: -2"),
        ):
            with pytest.raises(BatchError, match=message):
                decompress(stored(struct.pack("<q", claim) + packed), codec)
        with pytest.raises(BatchError, match=codec):
            decompress(stored(struct.pack("<q", 100) + b"junk" * 20), codec)
    assert bytes(decompress(stored(b"\xff" * 8 + b"as it is"), "lz4")) == b"as it is"
    with pytest.raises(BatchError, match="of 3 bytes, which is too short for its size field"):
        decompress(stored(b"abc"), "lz4")
    with pytest.raises(
        BatchError, match=f"invalid uncompressed size: {buffers.MAX_BYTES + 1} bytes"
    ):
        decompress(stored(struct.pack("<q", buffers.MAX_BYTES + 1)), "zstd")


def test_flatbuffer_tables_are_checked() -> None:
    sink = io.BytesIO()
    table = pa.table({"ids": [[1]]})
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    data = sink.getvalue()
    footer = data[-10 - int.from_bytes(data[-10:-6], "little") : -10]
    assert Table.root(footer).scalar(0, "<h", 0) == 4
    assert Table.root(footer).scalar(99, "<h", 7) == 7
    assert Table.root(footer).table(99) is None
    assert len(Table.root(footer).vector(99, "<i8")) == 0
    for size in range(len(footer) - 1):
        cut = footer[:size]
        try:
            root = Table.root(cut)
            root.vector(3, "V24")
            root.table(1)
        except FlatbufferError:
            continue


@pytest.mark.parametrize("codec", [None, "zstd"])
def test_expected_buffers_are_within_the_bodies(tmp_path: Path, codec: str | None) -> None:
    """Of batches that are shorter than the first one, down to empty ones."""
    path = write(
        tmp_path / "x.arrow", pa.table({"first": range(8), "ids": ROWS}), rows=8, codec=codec
    )
    size = path.stat().st_size
    footer = read_footer(str(path), size, STORAGE)
    column = find_column(str(path), "ids", read_schema(str(path), size, footer), numbers=False)[1]
    (place,) = batch_places(str(path), size, footer)
    batch = load_batch(str(path), place, column, STORAGE)
    needed = needed_ranges(batch, column, tokens=False)
    body_bytes = np.array([place["body_bytes"], 1, needed[-1][0] + 1, 0, place["body_bytes"]])
    numbers, starts, sizes = expect_ranges(batch, column, body_bytes)
    assert ((starts >= 0) & (sizes > 0) & (starts + sizes <= body_bytes[numbers])).all()
    for number in (0, 4):
        ranges = [(a, a + b) for i, a, b in zip(numbers, starts, sizes, strict=True) if i == number]
        assert all(any(a <= begin and begin + n <= b for a, b in ranges) for begin, n in needed)
