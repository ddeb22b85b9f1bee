"""Decode the values of pages to tokens: a table selects the decoder of a page, and one kernel
contains all decoders.

PLAIN values stay in the decompressed buffer; others are decoded into new memory. The table lists
all encodings that Parquet allows for numbers; indexing refuses pages with any other encoding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megablend.arrays import Int64s
from megablend.formats.buffers import LARGE_BYTES, allocate_buffer
from megablend.formats.decoded import address_of
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

_DICTIONARY = (int(Encoding.PLAIN_DICTIONARY), int(Encoding.RLE_DICTIONARY))
"""Plain integers, since NumPy compares arrays with members of an enum slowly."""

Array = npt.NDArray[Any]

STORED: dict[int, np.dtype[Any]] = {
    Physical.BOOLEAN: np.dtype("u1"),
    Physical.INT32: np.dtype("<i4"),
    Physical.INT64: np.dtype("<i8"),
    Physical.FLOAT: np.dtype("<i4"),
    Physical.DOUBLE: np.dtype("<i8"),
}
"""The dtype of decoded values of each physical type; floats are decoded as integers with the same
bits."""
WIDE_BYTES = 1 << 20
"""Number of bytes of values that are decoded at a time if tokens are narrower than values."""
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
"""The kernel's decoder for each physical type and encoding."""


class Encoded(NamedTuple):
    """The encoded values of n pages."""

    offsets: Int64s
    """Offset of each page in the file, for error messages: int64 [n]."""
    owners: list[pa.Buffer | None]
    """The buffer with the values of each page; None if it also has bytes of other pages."""
    addresses: Int64s
    """Address in memory of each page's values: int64 [n]."""
    sizes: Int64s
    """Size in bytes of each page's values: int64 [n]."""
    counts: Int64s
    """Number of values of each page: int64 [n]."""
    encodings: Int64s
    """Encoding of each page's values: int64 [n]."""
    dictionaries: list[Array | None]
    """The dictionary of each page, int32 or int64 [num_entries]; None if the page needs none, or
    its chunk has none."""


def tokens_of(
    source: FileBytes, encoded: Encoded, physical: int, dtype: np.dtype[Any]
) -> tuple[list[pa.Buffer | Array], Int64s]:
    """Decode the values of pages to tokens of type `dtype`.

    Returns: for each page, the buffer or array that holds its tokens and nothing of other pages;
        and the addresses of the tokens, int64 [n].
    Raises: CorruptFileError if values are damaged; UnsupportedFileError if an encoding is not
        supported.
    """
    stored = STORED[physical]
    if dtype.itemsize == stored.itemsize:
        return _decode_as_stored(source, encoded, physical)
    owners = list[pa.Buffer | Array]()
    addresses = np.zeros(len(encoded.counts), np.int64)
    for part in portions(encoded.counts * stored.itemsize, WIDE_BYTES):
        encoded_part = Encoded._make(column[part] for column in encoded)
        wide_owners, wide_addresses = _decode_as_stored(source, encoded_part, physical)
        for owner, address, count in zip(
            wide_owners, wide_addresses.tolist(), encoded_part.counts.tolist(), strict=True
        ):
            owners.append(_narrow(owner, address, count, stored, dtype))
        addresses[part] = [address_of(owner) for owner in owners[part]]
    return owners, addresses


def _decode_as_stored(
    source: FileBytes, encoded: Encoded, physical: int
) -> tuple[list[pa.Buffer | Array], Int64s]:
    """Decode the values of pages as `tokens_of` does, to tokens of the type STORED[physical]."""
    stored = STORED[physical]
    offsets = encoded.offsets
    counts = encoded.counts
    decoders = choose_decoders(source, offsets, encoded.encodings, physical)
    owners = list[pa.Buffer | Array](encoded.owners)
    addresses = encoded.addresses.copy()
    in_place = np.array([owner is not None for owner in owners]) & (decoders == PLAIN)
    # Pages whose values are decoded into new memory; the kernel reports those that are too short
    decoded = (~in_place | (counts * stored.itemsize > encoded.sizes)).nonzero()[0]
    if not len(decoded):
        return owners, addresses
    pages = np.zeros(len(offsets), VALUES_DTYPE)
    pages["decoder"] = decoders
    pages["count"] = counts
    pages["address"] = encoded.addresses
    pages["size"] = encoded.sizes
    with source.error_context(0, "the page") as location:
        for i in decoded.tolist():
            location.offset = int(offsets[i])
            buffer = allocate_buffer(int(counts[i]) * stored.itemsize)
            owners[i] = buffer
            addresses[i] = buffer.address
        for i in np.flatnonzero(decoders == RLE_DICTIONARY).tolist():
            dictionary = encoded.dictionaries[i]
            if dictionary is not None:
                pages["dictionary"][i] = address_of(dictionary)
                pages["entries"][i] = len(dictionary)
            elif counts[i]:
                location.offset = int(offsets[i])
                raise MalformedError(
                    "its values are dictionary-encoded, but its column chunk has no dictionary"
                )
        pages["out"] = addresses
        decoded_pages = pages[decoded]
        # The empty array gives the kernel the type of values
        decode_values(decoded_pages, np.empty(0, stored))
        is_damaged = decoded_pages["problem"] != SOUND
        if is_damaged.any():
            i = int(np.argmax(is_damaged))
            location.offset = int(offsets[decoded[i]])
            raise MalformedError(_problem(decoded_pages[i], stored.itemsize))
    return owners, addresses


def is_by_dictionary(encodings: Array) -> npt.NDArray[np.bool_]:
    """Return whether encodings [n] are dictionary encodings: bool [n]."""
    plain_dictionary, rle_dictionary = _DICTIONARY
    is_dictionary: npt.NDArray[np.bool_] = (encodings == plain_dictionary) | (
        encodings == rle_dictionary
    )
    return is_dictionary


def plain_values(data: Buffer, count: int, physical: int) -> Array:
    """Return `count` PLAIN values at the start of `data` as a view, int32 or int64 [count].
    Raises: MalformedError if `data` is too short."""
    stored = STORED[physical]
    if count * stored.itemsize > len(data):
        raise MalformedError(
            f"{count} values need {count * stored.itemsize} bytes, but only {len(data)} are left in the page"
        )
    values: Array = np.frombuffer(data, stored, count)
    return values


def choose_decoders(source: FileBytes, offsets: Int64s, encodings: Int64s, physical: int) -> Int64s:
    """Return the decoder of each page's values: int64 [n]. Raises: UnsupportedFileError if an
    encoding is not supported."""
    decoders = np.zeros(len(encodings), np.int64)
    for encoding in sorted(set(encodings.tolist())):
        has_encoding = encodings == encoding
        decoder = DECODERS.get((physical, encoding))
        if decoder is None:
            with source.error_context(int(offsets[has_encoding][0]), "the page"):
                name = name_of(Encoding, encoding)
                raise UnsupportedError(
                    f"{name_of(Physical, physical)} values with encoding {name} are not supported; "
                    "write them with encoding PLAIN"
                )
        decoders[has_encoding] = decoder
    return decoders


def _problem(page: np.void, itemsize: int) -> str:
    """Return the message for a page, a record of VALUES_DTYPE, that could not be decoded."""
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


def _narrow(
    owner: Any, address: int, count: int, stored: np.dtype[Any], dtype: np.dtype[Any]
) -> Array:
    """Convert `count` values of type `stored`, at an address in the memory of `owner`, to a
    narrower type."""
    if not count:
        return np.empty(0, dtype)
    memory = pa.py_buffer(owner)
    wide = np.frombuffer(memory, stored, count, address - memory.address)
    if count * dtype.itemsize < LARGE_BYTES:
        return wide.astype(dtype)
    # Mapped, so that its memory returns to the system
    narrow: Array = np.frombuffer(allocate_buffer(count * dtype.itemsize), dtype)
    np.copyto(narrow, wide, casting="unsafe")
    return narrow
