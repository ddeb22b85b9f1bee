"""Files of every format, sound and spoilt, and runs of one source that read them."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

import megablend
from megablend.formats.arrow.flatbuffer import Table
from tests.behaviour.remedies.driver import Bench, Step
from tests.pairs import write_pair

Write = Callable[[Path], Any]
ROWS = [list(range(1, 1 + i % 40)) for i in range(200)]
TOKENS = np.concatenate([np.array(row, np.uint16) for row in ROWS])
TABLE = pa.table({"ids": pa.array(ROWS, pa.list_(pa.int32()))})
TEXT = ["x"] * len(ROWS)
COUNTS = [1] * len(ROWS)


class Data(Bench):
    """A run of one source, which is one file; the settings that change are those of the source."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder / "data"
        self.patch = patch
        self.folder.mkdir()
        self.source: dict[str, Any] = {"name": "a"}
        self.has_other_tokens = False
        """Whether the file's tokens are not those of ROWS."""
        self.settings: dict[str, Any] = {
            "cache": str(folder / "cache"),
            "sequence_length": 8,
            "samples": 20,
        }

    @property
    def path(self) -> Path:
        return Path(self.source["path"])

    @property
    def config(self) -> dict[str, Any]:
        return self.settings | {"sources": [self.source]}

    def change(self, settings: Mapping[str, Any]) -> None:
        self.source = {
            key: value for key, value in {**self.source, **settings}.items() if value is not None
        }

    def set(self, **settings: Any) -> None:
        self.settings |= settings

    def use(self) -> str:
        notes = megablend.build(self.config).index.notes
        dataset = megablend.open(self.config)
        for k in range(len(dataset)):
            tokens = dataset[k]["tokens"].tolist()
            assert len(tokens) == 8
            if self.has_other_tokens:
                continue
            # within a row tokens ascend by one, and a row begins with 1: other bytes would not
            assert all(b in (1, a + 1) for a, b in pairwise(tokens)), tokens
        return "\n".join(notes)


def file(name: str, write: Write, **source: Any) -> Step:
    """A file, and other settings of its source."""

    def make(bench: Data) -> None:
        bench.change({"path": str(bench.folder / name), **source})
        write(bench.path)

    return make


def other_tokens(bench: Data) -> None:
    """The file has other tokens than those of ROWS."""
    bench.has_other_tokens = True


def again(write: Write) -> Step:
    """Write the file again."""
    return lambda bench: write(bench.path)


def column(name: str, write: Write, **source: Any) -> Step:
    """A file whose tokens are in column `ids`, as its source says."""
    return file(name, write, column="ids", **source)


def npy(array: Any) -> Write:
    return lambda path: np.save(path, array)


def raw(data: bytes = TOKENS.tobytes()) -> Write:
    return lambda path: path.write_bytes(data)


def parquet(columns: Any = None, **options: Any) -> Write:
    return lambda path: pq.write_table(pa.table(columns or {"ids": ROWS}), path, **options)


def arrow(columns: Any = TABLE, rows: int | None = None) -> Write:
    def write(path: Path) -> None:
        table = pa.table(columns) if isinstance(columns, dict) else columns
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=rows)

    return write


def stream(path: Path) -> None:
    with pa.ipc.new_stream(path, TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=50)


def pair(
    lengths: Sequence[int] = (9,) * 60, idx: bytes | None = None, *, half: bool = False
) -> Write:
    """A `.bin/.idx`: the `.idx` has these bytes, or is not there."""

    def write(path: Path) -> None:
        write_pair(path.with_suffix(""), lengths)
        if half:
            path.with_suffix(".idx").unlink()
        elif idx is not None:
            path.with_suffix(".idx").write_bytes(idx)

    return write


def cut(write: Write, suffix: str | None = None) -> Write:
    """The file without its last 20 bytes, or the one beside it with this suffix."""

    def write_and_cut(path: Path) -> None:
        write(path)
        short = path.with_suffix(suffix or path.suffix)
        short.write_bytes(short.read_bytes()[:-20])

    return write_and_cut


def spoilt(write: Write, spoil: Callable[[bytes], bytes]) -> Write:
    """The file with its bytes changed."""
    return lambda path: (write(path), path.write_bytes(spoil(path.read_bytes())))


def footer_start(data: bytes) -> int:
    """Of a Parquet file."""
    return len(data) - 8 - int.from_bytes(data[-8:-4], "little")


def first_feather(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        feather.write_feather(pa.table({"ids": TOKENS}), path, version=1)


def without_page_index(path: Path) -> None:
    """Its page index would be behind the end of the file."""
    parquet(write_page_index=True, data_page_size=100, write_batch_size=5, use_dictionary=False)(
        path
    )
    chunk = pq.read_metadata(path).row_group(0).column(0)
    end = chunk.data_page_offset + chunk.total_compressed_size
    data = path.read_bytes()
    path.write_bytes(data[:end] + data[footer_start(data) :])


def arrow_start(data: bytes) -> int:
    """Where the footer of an Arrow file begins, or the first message of a stream."""
    return (
        len(data) - 10 - int.from_bytes(data[-10:-6], "little") if data.startswith(b"ARROW1") else 8
    )


def of_version_3(data: bytes) -> bytes:
    return with_scalar(data, arrow_start(data), 0, "<h", 2)


def as_tensor(data: bytes) -> bytes:
    """The record batch of a stream says that it is a tensor."""
    return with_scalar(data, 16 + int.from_bytes(data[4:8], "little"), 1, "<B", 4)


def with_scalar(data: bytes, start: int, field: int, kind: str, value: int) -> bytes:
    """Change a field of the root table of the flatbuffer at byte `start`."""
    changed = bytearray(data)
    place = Table.root(data, start)._field_position(field)
    assert place is not None
    struct.pack_into(kind, changed, place, value)
    return bytes(changed)


def big_endian(data: bytes) -> bytes:
    """Give the schema an endianness that is not 0: that of its other field, which it has."""
    changed = bytearray(data)
    schema = Table.root(data, arrow_start(data)).table(1 if data.startswith(b"ARROW1") else 2)
    assert schema is not None
    assert schema._field_position(0) is None
    changed[schema._vtable + 4 : schema._vtable + 6] = changed[
        schema._vtable + 6 : schema._vtable + 8
    ]
    return bytes(changed)


def views() -> Any:
    return pa.ListViewArray.from_arrays([0] * 200, [1] * 200, pa.array([1, 2]))
