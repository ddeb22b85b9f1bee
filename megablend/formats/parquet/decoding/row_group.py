"""Fallback: a whole column chunk through pyarrow, for pages that cannot be read one by one."""

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
    """Tokens [num_tokens] of a column chunk, and its rows: row i is
    tokens[offsets[i]:offsets[i+1]].

    Args:
        fetched: bytes of the file that were fetched, by offset; others, such as the footer, are
            read.

    Raises: MalformedError.
    """
    import pyarrow.parquet as pq  # few files need it, and it takes some 50 ms

    try:
        with pq.ParquetFile(
            pa.PythonFile(_open(source, fetched or {}), "r"), page_checksum_verification=True
        ) as file:
            table = file.read_row_group(
                row_group, columns=[".".join(column.path)], use_threads=False
            )
    except (pa.ArrowException, OSError) as error:
        raise MalformedError(f"pyarrow cannot read it ({error})") from error
    return flatten(table.column(0).combine_chunks(), column.dtype)


def flatten(rows: Any, dtype: str) -> tuple[npt.NDArray[Any], Int64s]:
    """Tokens and rows, as of `read_row_group`, of an Arrow array of integers, of lists of them, or
    of structs around either."""
    import pyarrow.compute as pc

    num_rows = len(rows)
    parents = np.arange(num_rows)
    while rows.type.num_fields:  # pyarrow 15's is_nested leaves out lists of a fixed size
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
    """A file for pyarrow, some bytes of which were fetched."""

    def read(offset: int, size: int) -> bytes:
        for start, data in fetched.items():
            if start <= offset and offset + size <= start + len(data):
                return data[offset - start : offset - start + size].tobytes()
        return source.read(offset, size, "a column chunk")

    return FileObject(source.size, read)
