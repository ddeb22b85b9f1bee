"""From the encoded values of a page to tokens: one table says who decodes what.

PLAIN is a view of the bytes; what pyarrow alone knows goes through a file in memory; an encoding that the table does not
name is found when the file is indexed, and read by whole row groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from megablend.formats.parquet.minifile import decode_by_minifile
from megablend.formats.parquet.names import Encoding, Physical, name_of
from megablend.formats.parquet.thrift import MalformedError, UnsupportedError

BY_ROW_GROUP = -1
"""In a block's `encoding`: the block is a whole column chunk, read through pyarrow."""
DICTIONARY_ENCODINGS = (Encoding.PLAIN_DICTIONARY, Encoding.RLE_DICTIONARY)

Array = npt.NDArray[Any]
Dictionary = tuple[memoryview, int]
"""PLAIN values, and their number."""


def decode_values(
    values: memoryview, num_tokens: int, physical: int, encoding: int, dtype: str, dictionary: Dictionary | None
) -> Array:
    """Tokens [num_tokens] of type `dtype`, read-only. Raises MalformedError, UnsupportedError."""
    decoder = DECODERS.get((physical, encoding))
    if decoder is None:
        raise UnsupportedError(f"{name_of(Physical, physical)} values in {name_of(Encoding, encoding)} cannot be read")
    if num_tokens == 0:
        tokens = np.empty(0, dtype)
    else:
        tokens = _as_dtype(decoder(values, num_tokens, physical, encoding, dictionary), dtype)
    tokens.flags.writeable = False
    return tokens


def plain_values(data: memoryview, count: int, physical: int) -> Array:
    """The first `count` PLAIN values, int32 or int64 [count], as a view. Raises MalformedError."""
    stored = np.dtype("<i4" if physical == Physical.INT32 else "<i8")
    if count * stored.itemsize > len(data):
        raise MalformedError(f"{count} values need {count * stored.itemsize} bytes, {len(data)} are left in the page")
    return np.frombuffer(data, stored, count)


def _as_dtype(values: Array, dtype: str) -> Array:
    """Narrow types are stored as 32 bits; unsigned ones of 32 bits by their bits."""
    if values.dtype == dtype:
        return values
    return values.view(dtype) if values.dtype.itemsize == np.dtype(dtype).itemsize else values.astype(dtype)


def _plain(values: memoryview, num_tokens: int, physical: int, encoding: int, dictionary: Dictionary | None) -> Array:
    return plain_values(values, num_tokens, physical)


def _minifile(
    values: memoryview, num_tokens: int, physical: int, encoding: int, dictionary: Dictionary | None
) -> Array:
    return decode_by_minifile(values, num_tokens, physical, encoding, None)


def _dictionary(
    values: memoryview, num_tokens: int, physical: int, encoding: int, dictionary: Dictionary | None
) -> Array:
    if dictionary is None:
        raise MalformedError("its values refer to a dictionary, but its column chunk has none")
    return decode_by_minifile(values, num_tokens, physical, encoding, dictionary)


DECODERS: dict[tuple[int, int], Callable[[memoryview, int, int, int, Dictionary | None], Array]] = {
    (physical, encoding): decoder
    for physical in (Physical.INT32, Physical.INT64)
    for encoding, decoder in {
        Encoding.PLAIN: _plain,
        Encoding.PLAIN_DICTIONARY: _dictionary,
        Encoding.RLE_DICTIONARY: _dictionary,
        Encoding.DELTA_BINARY_PACKED: _minifile,
        Encoding.BYTE_STREAM_SPLIT: _minifile,
    }.items()
}
"""(physical type, encoding) -> decoder."""
