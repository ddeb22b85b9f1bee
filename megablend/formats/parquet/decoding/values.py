"""Decoding the values of pages to tokens: a table selects the decoder,
one kernel contains all of them.

PLAIN values stay in the decompressed buffer; others are decoded into new memory. An encoding that
is not in the table is detected when the file is indexed, and read by whole row groups.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megablend.arrays import Int64s
from megablend.formats.buffers import LARGE_BYTES, allocate_buffer
from megablend.formats.decoded import address_of, addresses_of
from megablend.formats.parquet.decoding.codecs import Buffer
from megablend.formats.parquet.metadata.names import Encoding, Physical, name_of
from megablend.formats.parquet.metadata.source import FileBytes
from megablend.formats.parquet.metadata.thrift import MalformedError, UnsupportedError
from megablend.kernels.parquet.values import (
    BYTE_STREAM_SPLIT,
    DELTA_BINARY_PACKED,
    PLAIN,
    PLAIN_BOOLEANS,
    RLE_BOOLEANS,
    RLE_DICTIONARY,
    SOUND,
    UNLISTED,
    VALUES_DTYPE,
    decode_values,
)
from megablend.storage.ranges import portions

BY_ROW_GROUP = -1
"""In a block's `encoding`: the block is a whole column chunk, read through pyarrow."""
_DICTIONARY = (int(Encoding.PLAIN_DICTIONARY), int(Encoding.RLE_DICTIONARY))
"""As plain integers: NumPy compares arrays with enum members slowly."""

Array = npt.NDArray[Any]

STORED: dict[int, np.dtype[Any]] = {
    Physical.BOOLEAN: np.dtype("u1"),
    Physical.INT32: np.dtype("<i4"),
    Physical.INT64: np.dtype("<i8"),
    Physical.FLOAT: np.dtype("<i4"),
    Physical.DOUBLE: np.dtype("<i8"),
}
"""Types of values in memory; floats are handled as integers with the same bits."""
WIDE_BYTES = 1 << 20
"""Values converted at a time to tokens of a narrower type."""
DECODERS: dict[tuple[int, int], int] = {
    (physical, int(encoding)): decoder
    for physical in STORED
    if physical != Physical.BOOLEAN
    for encoding, decoder in {
        Encoding.PLAIN: PLAIN,
        Encoding.PLAIN_DICTIONARY: RLE_DICTIONARY,
        Encoding.RLE_DICTIONARY: RLE_DICTIONARY,
        Encoding.DELTA_BINARY_PACKED: DELTA_BINARY_PACKED,
        Encoding.BYTE_STREAM_SPLIT: BYTE_STREAM_SPLIT,
    }.items()
} | {
    (Physical.BOOLEAN, Encoding.PLAIN): PLAIN_BOOLEANS,
    (Physical.BOOLEAN, Encoding.RLE): RLE_BOOLEANS,
}
"""(physical type, encoding) -> how the kernel decodes it."""


class Encoded(NamedTuple):
    """The encoded values of n pages."""

    offsets: Int64s
    """int64 [n], bytes of the file, for error messages."""
    owners: list[pa.Buffer | None]
    """Owner of the values' memory, of that page only; None if it contains other pages' bytes,
    too."""
    addresses: Int64s
    sizes: Int64s
    """int64 [n], in bytes."""
    counts: Int64s
    """int64 [n], values."""
    encodings: Int64s
    dictionaries: list[Array | None]
    """Dictionaries, int32 or int64 [num_entries]; None if a chunk has none, or none is needed."""


def tokens_of(
    source: FileBytes, encoded: Encoded, physical: int, dtype: np.dtype[Any]
) -> tuple[list[pa.Buffer | Array], Int64s]:
    """Decode the values of pages to tokens of type `dtype`.

    Returns: the owner of the tokens' memory, of that page only; their addresses, int64 [n].
    Raises: CorruptFileError, UnsupportedFileError.
    """
    stored = STORED[physical]
    if dtype.itemsize == stored.itemsize:
        return _as_stored(source, encoded, physical)
    owners = list[pa.Buffer | Array]()
    found = np.zeros(len(encoded.counts), np.int64)
    for part in portions(encoded.counts * stored.itemsize, WIDE_BYTES):
        mine = Encoded._make(column[part] for column in encoded)
        wide = _as_stored(source, mine, physical)
        for owner, address, count in zip(
            wide[0], wide[1].tolist(), mine.counts.tolist(), strict=True
        ):
            owners.append(_narrowed(owner, address, count, stored, dtype))
        found[part] = [address_of(owner) for owner in owners[part]]
    return owners, found


def _as_stored(
    source: FileBytes, encoded: Encoded, physical: int
) -> tuple[list[pa.Buffer | Array], Int64s]:
    """`tokens_of` in the type in which they are stored."""
    stored = STORED[physical]
    offsets = encoded.offsets
    counts = encoded.counts
    decoders = _choose_decoders(source, offsets, encoded.encodings, physical)
    owners = list[pa.Buffer | Array](encoded.owners)
    found = encoded.addresses.copy()
    in_place = np.array([owner is not None for owner in owners]) & (decoders == PLAIN)
    made = (~in_place | (counts * stored.itemsize > encoded.sizes)).nonzero()[0]
    if not len(made):
        return owners, found
    pages = np.zeros(len(offsets), VALUES_DTYPE)
    pages["decoder"] = decoders
    pages["count"] = counts
    pages["address"] = encoded.addresses
    pages["size"] = encoded.sizes
    with source.error_context(0, "the page") as place:
        for place.offset, i, count in zip(
            offsets[made].tolist(), made.tolist(), counts[made].tolist(), strict=True
        ):
            owners[i] = allocate_buffer(count * stored.itemsize)
        for i in np.flatnonzero(decoders == RLE_DICTIONARY).tolist():
            if (dictionary := encoded.dictionaries[i]) is not None:
                pages["dictionary"][i] = address_of(dictionary)
                pages["entries"][i] = len(dictionary)
            elif counts[i]:
                place.offset = int(offsets[i])
                raise MalformedError(
                    "its values are dictionary-encoded, but its column chunk has no dictionary"
                )
        found[made] = pages["out"][made] = addresses_of([owners[i] for i in made.tolist()])
        mine = pages[made]
        decode_values(mine, np.empty(0, stored))
        for i in np.flatnonzero(mine["problem"] != SOUND).tolist():
            place.offset = int(offsets[made[i]])
            raise MalformedError(_problem(mine[i], stored.itemsize))
    return owners, found


def is_by_dictionary(encodings: Array) -> npt.NDArray[np.bool_]:
    """Which pages, by the encodings [n] of their values, are dictionary-encoded: bool [n]."""
    found: npt.NDArray[np.bool_] = (encodings == _DICTIONARY[0]) | (encodings == _DICTIONARY[1])
    return found


def plain_values(data: Buffer, count: int, physical: int) -> Array:
    """`count` PLAIN values at the start of `data`, int32 or int64 [count], as a view.
    Raises MalformedError."""
    stored = STORED[physical]
    if count * stored.itemsize > len(data):
        raise MalformedError(
            f"{count} values need {count * stored.itemsize} bytes, but only {len(data)} are left in the page"
        )
    values: Array = np.frombuffer(data, stored, count)
    return values


def _choose_decoders(
    source: FileBytes, offsets: Int64s, encodings: Int64s, physical: int
) -> Int64s:
    """The decoder of each page's values: int64 [n]. Raises UnsupportedFileError."""
    decoders = np.zeros(len(encodings), np.int64)
    for encoding in sorted(set(encodings.tolist())):
        mine = encodings == encoding
        if (decoder := DECODERS.get((physical, encoding))) is None:
            with source.error_context(int(offsets[mine][0]), "the page"):
                name = name_of(Encoding, encoding)
                raise UnsupportedError(
                    f"{name_of(Physical, physical)} values with encoding {name} are not supported"
                )
        decoders[mine] = decoder
    return decoders


def _problem(page: np.void, itemsize: int) -> str:
    """The message for a page (VALUES_DTYPE) that could not be decoded."""
    decoder = page["decoder"]
    count = page["count"]
    needed = page["count"] * itemsize
    size = page["size"]
    if page["problem"] == UNLISTED:
        return f"dictionary index out of range (its dictionary has {page['entries']} entries)"
    return {
        PLAIN: f"{count} values need {needed} bytes, but only {size} are left in the page",
        RLE_DICTIONARY: f"truncated dictionary indices (expected {count}), or an invalid bit width",
        DELTA_BINARY_PACKED: f"its DELTA_BINARY_PACKED data is damaged, or has fewer than {count} values",
        BYTE_STREAM_SPLIT: f"{count} values need {needed} bytes, but its BYTE_STREAM_SPLIT data has {size}",
        PLAIN_BOOLEANS: f"truncated booleans (expected {count})",
        RLE_BOOLEANS: f"truncated booleans (expected {count}), or a length above the {size} bytes left in the page",
    }[int(decoder)]


def _narrowed(
    owner: Any, address: int, count: int, stored: np.dtype[Any], dtype: np.dtype[Any]
) -> Array:
    """Values of a type narrower than the one they are stored as."""
    if not count:
        return np.empty(0, dtype)
    held = pa.py_buffer(owner)
    wide = np.frombuffer(held, stored, count, address - held.address)
    if count * dtype.itemsize < LARGE_BYTES:
        return wide.astype(dtype)
    narrow: Array = np.frombuffer(allocate_buffer(count * dtype.itemsize), dtype)
    np.copyto(narrow, wide, casting="unsafe")
    return narrow
