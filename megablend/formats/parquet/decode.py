"""From the encoded values of a page to tokens: one table says who decodes what.

PLAIN is a view of the bytes; kernels decode the rest. An encoding that the table does not name is found when the file is
indexed, and read by whole row groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megablend.formats.parquet.codecs import Buffer
from megablend.formats.parquet.names import Encoding, Physical, name_of
from megablend.formats.parquet.thrift import MalformedError, UnsupportedError
from megablend.kernels.booleans import decode_bits
from megablend.kernels.byte_stream_split import join_streams
from megablend.kernels.delta import decode_delta
from megablend.kernels.dictionary import OUT_OF_RANGE, decode_dictionary

BY_ROW_GROUP = -1
"""In a block's `encoding`: the block is a whole column chunk, read through pyarrow."""
DICTIONARY_ENCODINGS = (Encoding.PLAIN_DICTIONARY, Encoding.RLE_DICTIONARY)

Array = npt.NDArray[Any]


def decode_values(
    data: Buffer,
    begin: int,
    num_tokens: int,
    physical: int,
    encoding: int,
    dtype: np.dtype[Any],
    dictionary: Array | None,
) -> Array:
    """Tokens [num_tokens] of type `dtype`, read-only; a view of `data` where the values are stored as they are.

    Args:
        data: a page's body; its values begin at data[begin], which is not beyond its end.
        dictionary: what indices stand for, int32 or int64 [num_entries]; None where the chunk has none.

    Raises: MalformedError, UnsupportedError.
    """
    decoder = DECODERS.get((physical, encoding))
    if decoder is None:
        raise UnsupportedError(f"{name_of(Physical, physical)} values in {name_of(Encoding, encoding)} cannot be read")
    if num_tokens == 0:
        tokens: Array = np.empty(0, dtype)
    else:
        tokens = _as_dtype(decoder(data, begin, num_tokens, physical, dictionary), dtype)
    tokens.setflags(write=False)
    return tokens


def plain_values(data: Buffer, begin: int, count: int, physical: int) -> Array:
    """`count` PLAIN values from data[begin] on, int32 or int64 [count], as a view. Raises MalformedError."""
    stored = STORED[physical]
    left = len(data) - begin
    if count * stored.itemsize > left:
        raise MalformedError(f"{count} values need {count * stored.itemsize} bytes, {left} are left in the page")
    values: Array = np.frombuffer(data, stored, count, begin)
    return values


STORED: dict[int, np.dtype[Any]] = {
    Physical.INT32: np.dtype("<i4"),
    Physical.INT64: np.dtype("<i8"),
    Physical.FLOAT: np.dtype("<i4"),
    Physical.DOUBLE: np.dtype("<i8"),
}
"""How PLAIN values lie in memory; floats are handled as the integers of their bits."""


def _as_dtype(values: Array, dtype: np.dtype[Any]) -> Array:
    """Narrow types are stored as 32 bits; unsigned ones of 32 bits by their bits."""
    if values.dtype == dtype:
        return values
    return values.view(dtype) if values.dtype.itemsize == dtype.itemsize else values.astype(dtype)


def copied(tokens: Array) -> Array:
    """The same tokens in memory of their own, read-only."""
    out = _room(len(tokens), tokens.dtype)
    out[:] = tokens
    out.setflags(write=False)
    return out


def _room(num_tokens: int, dtype: np.dtype[Any]) -> Array:
    """An array to be filled, in Arrow's pool (see ByteSource.read_ranges)."""
    room: Array = np.frombuffer(pa.allocate_buffer(num_tokens * dtype.itemsize), dtype, num_tokens)
    return room


def _plain(data: Buffer, begin: int, num_tokens: int, physical: int, dictionary: Array | None) -> Array:
    return plain_values(data, begin, num_tokens, physical)


def _dictionary(data: Buffer, begin: int, num_tokens: int, physical: int, dictionary: Array | None) -> Array:
    if dictionary is None:
        raise MalformedError("its values refer to a dictionary, but its column chunk has none")
    values, out = pa.py_buffer(data), _room(num_tokens, STORED[physical])
    found = decode_dictionary(values.address + begin, values.size - begin, dictionary, out)
    if found == OUT_OF_RANGE:
        raise MalformedError(f"it refers to an entry that its dictionary of {len(dictionary)} does not have")
    if found < 0:
        raise MalformedError(f"its indices break off before {num_tokens} tokens, or are too wide")
    return out


def _delta(data: Buffer, begin: int, num_tokens: int, physical: int, dictionary: Array | None) -> Array:
    values, out = pa.py_buffer(data), _room(num_tokens, STORED[physical])
    if decode_delta(values.address + begin, values.size - begin, out) < 0:
        raise MalformedError(f"its differences are damaged, or are fewer than those of {num_tokens} tokens")
    return out


def _byte_stream_split(data: Buffer, begin: int, num_tokens: int, physical: int, dictionary: Array | None) -> Array:
    values, out = pa.py_buffer(data), _room(num_tokens, STORED[physical])
    if values.size - begin != out.nbytes:
        raise MalformedError(f"{num_tokens} values need {out.nbytes} bytes, its streams have {values.size - begin}")
    join_streams(values.address + begin, out)
    return out


def _bits(data: Buffer, begin: int, num_tokens: int, physical: int, dictionary: Array | None) -> Array:
    return _booleans(data, begin, num_tokens, in_runs=False)


def _runs(data: Buffer, begin: int, num_tokens: int, physical: int, dictionary: Array | None) -> Array:
    """The bytes of the runs are counted in front."""
    size = int.from_bytes(bytes(data[begin : begin + 4]), "little")
    if begin + 4 + size > len(data):
        raise MalformedError(
            f"its booleans should take {size} bytes, {max(0, len(data) - begin - 4)} are left in the page"
        )
    return _booleans(data[: begin + 4 + size], begin + 4, num_tokens, in_runs=True)


def _booleans(data: Buffer, begin: int, num_tokens: int, *, in_runs: bool) -> Array:
    values, out = pa.py_buffer(data), _room(num_tokens, np.dtype(np.bool_))
    if decode_bits(values.address + begin, values.size - begin, in_runs, out) < 0:
        raise MalformedError(f"its booleans break off before {num_tokens} of them")
    return out


DECODERS: dict[tuple[int, int], Callable[[Buffer, int, int, int, Array | None], Array]] = {
    (physical, encoding): decoder
    for physical in STORED
    for encoding, decoder in {
        Encoding.PLAIN: _plain,
        Encoding.PLAIN_DICTIONARY: _dictionary,
        Encoding.RLE_DICTIONARY: _dictionary,
        Encoding.DELTA_BINARY_PACKED: _delta,
        Encoding.BYTE_STREAM_SPLIT: _byte_stream_split,
    }.items()
} | {(Physical.BOOLEAN, Encoding.PLAIN): _bits, (Physical.BOOLEAN, Encoding.RLE): _runs}
"""(physical type, encoding) -> decoder."""
