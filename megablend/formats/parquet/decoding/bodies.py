"""Bodies of many pages: their checksums are compared, they are decompressed,
and their levels and values are located.

V1 compresses levels and values together; V2 leaves the levels uncompressed in front.

Source: parquet-format, README.md ("Data Pages", "Checksumming").
"""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megablend.arrays import Int64s
from megablend.formats.buffers import allocate_buffer, memory_at
from megablend.formats.decoded import addresses_of
from megablend.formats.parquet.decoding.codecs import (
    decompress,
    decompress_many,
    max_decompressed_size,
)
from megablend.formats.parquet.metadata.names import CodecId
from megablend.formats.parquet.metadata.source import FileBytes
from megablend.formats.parquet.metadata.thrift import MalformedError
from megablend.kernels.parquet.page_headers import DATA, Headers

UNCOMPRESSED = int(CodecId.UNCOMPRESSED)


class PageBodies(NamedTuple):
    """Decompressed bodies of n pages: addresses and sizes in memory."""

    owners: list[pa.Buffer | None]
    """Owner of the values' memory, of that page only; None if that is the buffer that all pages
    were read into."""
    levels: Int64s
    """int64 [n], of the bytes that begin with the levels."""
    level_sizes: Int64s
    values: Int64s
    """int64 [n], of the bytes that contain the values; in V1 these are the same."""
    value_sizes: Int64s


def bodies_of(
    source: FileBytes, headers: Headers, codecs: npt.NDArray[Any], addresses: Int64s
) -> PageBodies:
    """Check and decompress the bodies of data pages.

    Args:
        headers: HEADER_DTYPE [n].
        codecs: [n], CompressionCodec of each page's chunk.
        addresses: int64 [n], where in memory each begins; its size is that of its header.

    Raises: CorruptFileError, UnsupportedFileError.
    """
    sizes = headers["stored_bytes"]
    check_checksums(source, headers, addresses)
    is_v1 = headers["type"] == DATA
    in_front = np.where(is_v1, 0, np.minimum(headers["rep_bytes"] + headers["def_bytes"], sizes))
    lengths = headers["decoded_bytes"] - in_front
    values = addresses + in_front
    stored = sizes - in_front
    is_packed = headers["is_compressed"] & ~is_v1
    stored[is_packed & (lengths == 0)] = 0  # whatever these bytes are, they are not values
    packed = (is_v1 | (is_packed & (lengths > 0))).nonzero()[0]
    owners: list[pa.Buffer | None] = [None] * len(headers)
    found, at = decompress_pages(
        source,
        headers["offset"][packed],
        codecs[packed],
        values[packed],
        stored[packed],
        lengths[packed],
    )
    for i, owner in zip(packed.tolist(), found, strict=True):
        owners[i] = owner
    values[packed] = at
    stored[packed] = lengths[packed]
    return PageBodies(
        owners,
        np.where(is_v1, values, addresses),
        np.where(is_v1, stored, in_front),
        values,
        stored,
    )


def decompress_pages(
    source: FileBytes,
    offsets: Int64s,
    codecs: npt.NDArray[Any],
    addresses: Int64s,
    sizes: Int64s,
    lengths: Int64s,
) -> tuple[list[pa.Buffer | None], Int64s]:
    """Decompress parts of memory, each into a buffer of its own.

    Args:
        offsets: int64 [n], bytes of the file, for error messages.
        codecs: [n], CompressionCodec.
        addresses, sizes: int64 [n], of the parts.
        lengths: int64 [n], their decompressed sizes in bytes.

    Returns: the buffers, None for a part that is not compressed; the addresses of the decompressed
        bytes, int64 [n].
    Raises: CorruptFileError, UnsupportedFileError.
    """
    owners: list[pa.Buffer | None] = [None] * len(offsets)
    found = addresses.copy()
    with source.error_context(0, "the page") as place:
        for codec in sorted(set(codecs.tolist())):
            mine = (codecs == codec).nonzero()[0]
            if codec == UNCOMPRESSED:
                mine = mine[sizes[mine] != lengths[mine]]
            elif (many := decompress_many(codec)) is not None:
                is_likely = lengths[mine] <= max_decompressed_size(codec, sizes[mine])
                likely = mine[is_likely]
                buffers = []
                for place.offset, length in zip(
                    offsets[likely].tolist(), lengths[likely].tolist(), strict=True
                ):
                    buffers.append(allocate_buffer(length))
                outs = addresses_of(buffers)
                if many(addresses[likely], sizes[likely], outs, lengths[likely]) < 0:
                    found[likely] = outs
                    mine = mine[~is_likely]
                    for i, buffer in zip(likely.tolist(), buffers, strict=True):
                        owners[i] = buffer
            for i in mine.tolist():  # one by one, for an exact error message
                place.offset = int(offsets[i])
                buffer = pa.py_buffer(
                    decompress(codec, memory_at(addresses[i], sizes[i]), int(lengths[i]))
                )
                owners[i] = buffer
                found[i] = buffer.address
    return owners, found


def check_checksums(source: FileBytes, headers: Headers, addresses: Int64s) -> None:
    """Verify the checksums that are present, of bodies that begin at `addresses`, int64 [n].
    Raises CorruptFileError."""
    with_crc = headers["has_crc"].nonzero()[0].tolist()
    if not with_crc:
        return
    with source.error_context(0, "the page") as place:
        for i in with_crc:
            place.offset = int(headers["offset"][i])
            check_crc(int(headers["crc"][i]), memory_at(addresses[i], headers["stored_bytes"][i]))


def check_crc(crc: int, body: memoryview) -> None:
    """Compare the body's checksum with the header's, a signed number. Raises MalformedError."""
    found = zlib.crc32(body)
    expected = crc & 0xFFFF_FFFF
    if found != expected:
        raise MalformedError(
            f"its checksum is {found:08x}, but the checksum in its header is {expected:08x}"
        )
