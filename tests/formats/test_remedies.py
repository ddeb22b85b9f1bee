"""Remedies in messages about files of a kind that is not read: the file is written as the message says, and then it is read."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megablend.errors import UnsupportedFileError
from megablend.formats.arrow.flatbuffer import Table
from megablend.formats.parquet.decoding.values import DECODERS
from megablend.formats.parquet.indexing import by_headers
from tests.formats.writers import index, opened, pieces
from tests.pyarrow_versions import needs_pyarrow

TOKENS = [1, 258, 65_537, 7]
TABLE = pa.table({"ids": pa.array(TOKENS, pa.int32())})
V3, TENSOR = 2, 4
"""Values of Arrow's metadata: a version, and a kind of message."""


def read(path: Path, column: str = "ids") -> list[int]:
    found = index(path, column)
    blocks = pieces(opened(path, column, found), found.blocks, found.chunks)
    return [token for block in blocks for piece in block for token in piece]


def write_file(path: Path, table: pa.Table = TABLE) -> None:
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)


def write_stream(path: Path, table: pa.Table = TABLE) -> None:
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)


def footer_start(path: Path) -> int:
    whole = path.read_bytes()
    return len(whole) - 10 - int.from_bytes(whole[-10:-6], "little")


def set_scalar(path: Path, start: int, field: int, kind: str, value: int) -> None:
    """Change a field of the root table of the flatbuffer at byte `start`."""
    data = bytearray(path.read_bytes())
    place = Table.root(bytes(data), start)._place(field)
    assert place is not None
    struct.pack_into(kind, data, place, value)
    path.write_bytes(data)


def set_big_endian(path: Path, start: int, schema_field: int) -> None:
    """Give the schema of the flatbuffer at byte `start` an endianness that is not 0: that of its other field, which it has."""
    data = bytearray(path.read_bytes())
    schema = Table.root(bytes(data), start).table(schema_field)
    assert schema is not None
    assert schema._place(0) is None
    data[schema._vtable + 4 : schema._vtable + 6] = data[schema._vtable + 6 : schema._vtable + 8]
    path.write_bytes(data)


def write_old_file(path: Path) -> None:
    write_file(path)
    set_scalar(path, footer_start(path), 0, "<h", V3)


def write_big_endian_file(path: Path) -> None:
    write_file(path)
    set_big_endian(path, footer_start(path), 1)


def write_old_stream(path: Path) -> None:
    write_stream(path)
    set_scalar(path, 8, 0, "<h", V3)


def write_big_endian_stream(path: Path) -> None:
    write_stream(path)
    set_big_endian(path, 8, 2)


def write_tensor_in_stream(path: Path) -> None:
    """The record batch says that it is a tensor."""
    write_stream(path)
    second = 8 + int.from_bytes(path.read_bytes()[4:8], "little")
    set_scalar(path, second + 8, 1, "<B", TENSOR)


def write_with_views(path: Path) -> None:
    views = pa.ListViewArray.from_arrays([0, 0, 1, 1], [1, 0, 1, 0], pa.array([1, 2]))
    write_file(path, pa.table({"odd": views, "ids": TABLE["ids"]}))


def write_tokens_as_views(path: Path) -> None:
    write_file(path, pa.table({"ids": pa.array([TOKENS], pa.list_view(pa.int32()))}))


class Fault(NamedTuple):
    write: Callable[[Path], Any]
    says: str
    remedy: Callable[[Path], Any]


FAULTS: dict[str, Fault] = {
    "an old file": Fault(write_old_file, "has Arrow metadata version V3; rewrite it with a newer Arrow$", write_file),
    "an old stream": Fault(
        write_old_stream, "has Arrow metadata version V3; rewrite it with a newer Arrow$", write_stream
    ),
    "a big-endian file": Fault(
        write_big_endian_file, "is big-endian; rewrite it on a little-endian machine$", write_file
    ),
    "a big-endian stream": Fault(
        write_big_endian_stream, "is big-endian; rewrite it on a little-endian machine$", write_stream
    ),
    "a tensor in a stream": Fault(
        write_tensor_in_stream, "has a message of kind 4, expected record batches only", write_stream
    ),
    "a column of unknown layout": Fault(
        write_with_views,
        r"column odd has type list_view<.* not supported; write it as a list, or leave it out of the file if it has no tokens$",
        write_file,
    ),
    "tokens of unknown layout": Fault(
        write_tokens_as_views,
        r"column ids has type list_view<.* not supported; write it as a list, or leave it out of the file if it has no tokens$",
        write_file,
    ),
}


@needs_pyarrow(16, "views of lists")
@pytest.mark.parametrize("name", FAULTS)
def test_an_arrow_file(tmp_path: Path, name: str) -> None:
    fault, path = FAULTS[name], tmp_path / "a.arrow"
    fault.write(path)
    with pytest.raises(UnsupportedFileError, match=fault.says):
        read(path)
    fault.remedy(path)
    assert read(path) == TOKENS


def test_row_groups_that_are_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of an encoding that the kernels do not know are read together; the limit is lowered, as 4 GiB take long."""
    monkeypatch.delitem(DECODERS, (1, 5))
    monkeypatch.setattr(by_headers, "MAX_BYTES", 1000)
    tokens = random.Random(0).choices(range(1 << 20), k=2000)
    path, table = tmp_path / "a.parquet", pa.table({"ids": pa.array(tokens, pa.int32())})
    options: dict[str, Any] = {"use_dictionary": False, "column_encoding": {"ids": "DELTA_BINARY_PACKED"}}
    pq.write_table(table, path, **options)
    says = "its pages can only be read together, but have more than 4 GiB; write smaller row groups$"
    with pytest.raises(UnsupportedFileError, match=says):
        read(path)
    pq.write_table(table, path, row_group_size=100, **options)
    assert read(path) == tokens
