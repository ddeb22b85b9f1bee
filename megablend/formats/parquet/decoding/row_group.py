"""Reading a whole column chunk by pyarrow: the fallback for pages that cannot be decoded one by
one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megablend.arrays import Int64s
from megablend.formats.buffers import as_numpy
from megablend.formats.parquet.metadata.schema import Column
from megablend.formats.parquet.metadata.source import FileBytes
from megablend.formats.parquet.metadata.thrift import MalformedError
from megablend.storage.base import Bytes
from megablend.storage.file_object import FileObject


def read_row_group(
    source: FileBytes, column: Column, row_group: int, fetched: Mapping[int, Bytes] | None = None
) -> tuple[npt.NDArray[Any], Int64s]:
    """Read a column chunk.

    Args:
        fetched: bytes of the file that were fetched, by their offsets; other bytes, such as the
            footer, are read.

    Returns: tokens [num_tokens], and offsets, int64 [num_rows + 1]: row i is
        tokens[offsets[i]:offsets[i+1]].
    Raises: MalformedError.
    """
    # Few files need pyarrow.parquet, and importing it takes about 50 ms
    import pyarrow.parquet as pq

    python_file = pa.PythonFile(_open(source, fetched or {}), "r")
    try:
        with pq.ParquetFile(python_file, page_checksum_verification=True) as file:
            table = file.read_row_group(
                row_group, columns=[".".join(column.path)], use_threads=False
            )
    except (pa.ArrowException, OSError) as error:
        raise MalformedError(f"pyarrow cannot read it ({error})") from error
    return flatten(table.column(0).combine_chunks(), column.dtype)


def flatten(rows: Any, dtype: str) -> tuple[npt.NDArray[Any], Int64s]:
    """Convert an Arrow array of integers, of lists of integers, or of structs around either, to
    tokens and offsets as `read_row_group` returns them."""
    import pyarrow.compute as pc

    num_rows = len(rows)
    # The row that each item of the current level belongs to
    parents = np.arange(num_rows)
    # Not `is_nested`, which in pyarrow 15 is false for lists of a fixed size
    while rows.type.num_fields:
        valid = rows.is_valid()
        rows = rows.filter(valid)
        parents = parents[as_numpy(valid)]
        if pa.types.is_struct(rows.type):
            rows = rows.field(0)
        else:
            parents = parents[as_numpy(pc.list_parent_indices(rows))]
            rows = pc.list_flatten(rows)
    valid = as_numpy(rows.is_valid())
    tokens = as_numpy(rows.drop_null()).astype(dtype, copy=False)
    tokens.flags.writeable = False
    lengths = np.bincount(parents[valid], minlength=num_rows)
    return tokens, np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


def _open(source: FileBytes, fetched: Mapping[int, Bytes]) -> FileObject:
    """Return a file object for pyarrow, which reads bytes that were not fetched from the source."""

    def read(offset: int, size: int) -> bytes:
        for start, data in fetched.items():
            if start <= offset and offset + size <= start + len(data):
                return data[offset - start : offset - start + size].tobytes()
        return source.read(offset, size, "a column chunk")

    return FileObject(source.size, read)
