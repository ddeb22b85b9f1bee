"""The tables of a snapshot as Arrow IPC files. Each contains one uncompressed record batch, so that
its columns can be memory-mapped.

Block tables may be larger than memory. A TableWriter therefore appends to one temporary file per
long column, and joins the columns at the end.
"""

from __future__ import annotations

import hashlib
import mmap
import operator
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from tempfile import SpooledTemporaryFile
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megablend.errors import DamagedCacheError
from megablend.system.atomic_write import flush, reading
from megablend.system.safe_open import map_descriptor, open_regular

_SMALL_BYTES = 1 << 16
"""Tables of up to this size in bytes are read instead of mapped."""

BLOCK_COLUMNS = np.dtype(
    [
        ("chunk", "<i4"),  # row of the chunk table
        ("offset", "<i8"),  # first byte in the file
        ("stored_bytes", "<u4"),
        ("decoded_bytes", "<u4"),
        ("encoding", "<i1"),
        ("flags", "<u1"),
        ("tokens_before", "<i8"),  # tokens of all earlier blocks of the snapshot
        # documents that begin in earlier blocks, in sources whose documents were counted
        ("rows_before", "<i8"),
        ("ends_before", "<i8"),  # documents with tokens that end in earlier blocks
    ]
)
"""The columns of the block table, 46 bytes per block. The table has one row more than there are
blocks. The last row contains the totals, and zeros in all other columns."""

CHUNK_COLUMNS = np.dtype(
    [
        ("file", "<i4"),  # row of the file table
        ("row_group", "<i4"),
        ("codec", "<i1"),
        ("dictionary_offset", "<i8"),
        ("dictionary_bytes", "<i4"),
        ("first_row", "<i8"),
        ("first_token", "<i8"),
    ]
)

FILE_SCHEMA = pa.schema(
    [
        ("source", pa.int32()),
        ("name", pa.string()),  # relative to the source's root
        ("size", pa.int64()),
        ("rows", pa.int64()),
        ("tokens", pa.int64()),
        ("token_dtype", pa.string()),
        ("first_block", pa.int64()),
        ("first_chunk", pa.int64()),
        ("structure", pa.string()),  # digest of the footer or the .idx
        ("body", pa.string()),  # digest of sampled ranges of the body
        ("meta", pa.string()),  # JSON: metadata that the format needs to open the file
    ]
)

_NULL_COUNT = operator.attrgetter("null_count")


class TableWriter:
    """Writes a table of fixed-width columns in constant memory. Use it as a context manager, which
    removes its temporary files on exit.

    Args:
        kept_bytes: a column up to this size is kept in memory, since for a small table, writing a
            file for each column would take longer than everything else.
    """

    def __init__(
        self, path: Path, columns: np.dtype[np.void], *, kept_bytes: int = 1 << 20
    ) -> None:
        self._path = path
        self._dtypes = columns
        self._kept_bytes = kept_bytes
        self._columns = {
            name: SpooledTemporaryFile(kept_bytes, dir=str(path.parent))  # noqa: SIM115  # closed at the end
            for name in columns.names or ()
        }

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for column in self._columns.values():
            column.close()

    def append(self, rows: Mapping[str, npt.NDArray[Any]] | npt.NDArray[np.void]) -> None:
        """Append rows, given as one array per column, or as a structured array."""
        for name, column in self._columns.items():
            values = np.ascontiguousarray(rows[name], self._dtypes[name])
            # Without this, `write` would move the column to a file only after it had held all of it
            # in memory
            if column.tell() + values.nbytes > self._kept_bytes:
                column.rollover()
            column.write(values.data)

    def finish(self) -> str:
        """Join the columns into the table. Return a digest of their values that does not depend on
        the version of the Arrow library."""
        digest = hashlib.blake2b(digest_size=16)
        arrays = []
        for name, column in self._columns.items():
            dtype = self._dtypes[name]
            buffer = self._take(column)
            digest.update(buffer)
            length = buffer.size // dtype.itemsize
            arrays.append(pa.Array.from_buffers(pa.from_numpy_dtype(dtype), length, [None, buffer]))
        write_batch(self._path, pa.RecordBatch.from_arrays(arrays, names=list(self._columns)))
        return digest.hexdigest()

    def _take(self, column: SpooledTemporaryFile[bytes]) -> pa.Buffer:
        """Return the values of a column, memory-mapped if they are in a file."""
        size = column.tell()
        if size > self._kept_bytes:
            column.flush()
            return pa.py_buffer(map_descriptor(column.fileno(), size))
        column.seek(0)
        return pa.py_buffer(column.read())


def write_batch(path: Path, batch: pa.RecordBatch) -> None:
    """Write a table of one record batch to a new file, and wait until it is on disk."""
    with path.open("xb") as file:
        with pa.ipc.new_file(file, batch.schema) as writer:
            writer.write_batch(batch)
        flush(file)


def read_batch(path: str, schema: pa.Schema) -> pa.RecordBatch:
    """Open a table with the given schema; see `map_file`. Raises: CacheError if it is damaged, or
    cannot be read."""
    with reading(path), open_regular(path) as file:
        data = map_file(file)
    return parse_batch(path, pa.py_buffer(data), schema)


def map_file(file: BinaryIO) -> bytes | mmap.mmap:
    """Return the content of a table's file: memory-mapped, or read if it is so small that reading
    it takes less time than the accesses to new pages of a mapping."""
    # Do not use pa.memory_map: threads of Arrow would read the pages
    size = os.fstat(file.fileno()).st_size
    if size <= _SMALL_BYTES:
        return file.read(size)
    return map_descriptor(file.fileno(), size)


@lru_cache(maxsize=8)
def schema_of(columns: np.dtype[np.void]) -> pa.Schema:
    """Return the schema of a table of fixed-width columns."""
    return pa.schema([(name, pa.from_numpy_dtype(columns[name])) for name in columns.names or ()])


def parse_batch(path: Path | str, data: pa.Buffer, schema: pa.Schema) -> pa.RecordBatch:
    """Parse a table with the given schema from `data`, the bytes of its file. Raises: CacheError if
    it is damaged."""
    try:
        reader = pa.ipc.open_file(pa.BufferReader(data))
        if reader.num_record_batches != 1:
            raise DamagedCacheError.of(
                f"{path}: damaged table: it has {reader.num_record_batches} record batches, expected 1"
            )
        batch = reader.get_batch(0)
        # This does not read the values of columns of numbers
        batch.validate(full=True)
    except (pa.ArrowException, OSError) as error:  # OSError: invalid flatbuffer
        raise DamagedCacheError.of(f"{path}: damaged table ({error})") from error
    if batch.schema != schema or any(map(_NULL_COUNT, batch.columns)):
        raise DamagedCacheError.of(
            f"{path}: damaged table: its columns are not {', '.join(schema.names)}"
        )
    return batch
