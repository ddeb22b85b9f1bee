"""Any encoding through pyarrow: a Parquet file in memory that holds the values of one page.

The page's levels are decoded by us and its body decompressed, so what goes in is one required column without nulls: the
dictionary page, if there is one, the values, and a fresh footer. pyarrow then knows every encoding, and neither a page
that begins in the middle of a row nor a codec can trouble it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from megablend.formats.parquet.footer import MAGIC
from megablend.formats.parquet.names import CodecId, Encoding, PageType, Repetition
from megablend.formats.parquet.thrift import Kind, MalformedError, write_struct

Fields = list[tuple[int, Kind, object]]


def decode_by_minifile(
    values: memoryview, num_tokens: int, physical: int, encoding: int, dictionary: tuple[memoryview, int] | None
) -> npt.NDArray[Any]:
    """Values of one page.

    Args:
        values: the encoded values, decompressed, without levels.
        num_tokens: how many there are; above 0.
        physical: INT32 or INT64.
        encoding: of the values.
        dictionary: PLAIN values of the dictionary page, decompressed, and their number.

    Returns: int32 or int64 [num_tokens].

    Raises: MalformedError.
    """
    data = minifile(values, num_tokens, physical, encoding, dictionary)
    try:
        table = pq.ParquetFile(pa.BufferReader(data), pre_buffer=False).read(use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise MalformedError(f"its values cannot be decoded ({error})") from error
    return np.asarray(table.column(0).to_numpy())


def minifile(
    values: memoryview, num_tokens: int, physical: int, encoding: int, dictionary: tuple[memoryview, int] | None
) -> bytes:
    """The bytes of the file; arguments as those of `decode_by_minifile`."""
    body = [MAGIC]
    if dictionary is not None:
        plain, num_entries = dictionary
        counts: Fields = [(1, Kind.I32, num_entries), (2, Kind.I32, int(Encoding.PLAIN))]
        body += [_page(PageType.DICTIONARY, 7, len(plain), counts), bytes(plain)]
    data_offset = sum(map(len, body))
    rle = int(Encoding.RLE)
    counts = [(1, Kind.I32, num_tokens), (2, Kind.I32, encoding), (3, Kind.I32, rle), (4, Kind.I32, rle)]
    body += [_page(PageType.DATA, 5, len(values), counts), bytes(values)]
    size = sum(map(len, body)) - len(MAGIC)
    meta: Fields = [
        (1, Kind.I32, physical),
        (2, Kind.LIST, (Kind.I32, [encoding])),
        (3, Kind.LIST, (Kind.BINARY, [b"tokens"])),
        (4, Kind.I32, int(CodecId.UNCOMPRESSED)),
        (5, Kind.I64, num_tokens),
        (6, Kind.I64, size),
        (7, Kind.I64, size),
        (9, Kind.I64, data_offset),
    ]
    if dictionary is not None:
        meta.append((11, Kind.I64, len(MAGIC)))
    chunk = write_struct([(2, Kind.I64, len(MAGIC)), (3, Kind.STRUCT, write_struct(meta))])
    group = write_struct([(1, Kind.LIST, (Kind.STRUCT, [chunk])), (2, Kind.I64, size), (3, Kind.I64, num_tokens)])
    root = write_struct([(4, Kind.BINARY, b"schema"), (5, Kind.I32, 1)])
    leaf = write_struct([(1, Kind.I32, physical), (3, Kind.I32, int(Repetition.REQUIRED)), (4, Kind.BINARY, b"tokens")])
    footer = write_struct(
        [
            (1, Kind.I32, 1),
            (2, Kind.LIST, (Kind.STRUCT, [root, leaf])),
            (3, Kind.I64, num_tokens),
            (4, Kind.LIST, (Kind.STRUCT, [group])),
        ]
    )
    return b"".join([*body, footer, len(footer).to_bytes(4, "little"), MAGIC])


def _page(kind: PageType, field: int, size: int, counts: Fields) -> bytes:
    sizes: Fields = [(1, Kind.I32, int(kind)), (2, Kind.I32, size), (3, Kind.I32, size)]
    return write_struct([*sizes, (field, Kind.STRUCT, write_struct(counts))])
