"""Check and decompress the bodies of many pages, and locate their levels and values.

In V1 pages, levels and values are compressed together; in V2 pages, uncompressed levels precede the
values.

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
    """Decompressed bodies of n pages: addresses in memory, and sizes in bytes."""

    owners: list[pa.Buffer | None]
    """The buffer with the values of each page; None if they are in the buffer that all pages were
    read into."""
    levels: Int64s
    """Addresses of the bytes that begin with the levels: int64 [n]."""
    level_sizes: Int64s
    """Sizes of the bytes at `levels`: int64 [n]."""
    values: Int64s
    """Addresses of the bytes that contain the values: int64 [n]. In V1 pages they equal
    `levels`."""
    value_sizes: Int64s
    """Sizes of the bytes at `values`: int64 [n]."""


def bodies_of(
    source: FileBytes, headers: Headers, codecs: npt.NDArray[Any], addresses: Int64s
) -> PageBodies:
    """Check and decompress the bodies of data pages.

    Args:
        headers: HEADER_DTYPE [n], the pages' headers, which state the sizes of the bodies.
        codecs: [n], CompressionCodec of each page's chunk.
        addresses: int64 [n], address in memory of each body.

    Raises: CorruptFileError if a body is damaged; UnsupportedFileError if a codec is not supported.
    """
    body_sizes = headers["stored_bytes"]
    check_checksums(source, headers, addresses)
    is_v1 = headers["type"] == DATA
    level_bytes = headers["rep_bytes"] + headers["def_bytes"]
    # Uncompressed levels, which precede the values
    plain_level_bytes = np.where(is_v1, 0, np.minimum(level_bytes, body_sizes))
    decoded_sizes = headers["decoded_bytes"] - plain_level_bytes
    values = addresses + plain_level_bytes
    value_sizes = body_sizes - plain_level_bytes
    is_compressed_v2 = headers["is_compressed"] & ~is_v1
    # If a page has no values, the bytes after its levels are ignored, whatever they are
    value_sizes[is_compressed_v2 & (decoded_sizes == 0)] = 0
    compressed = (is_v1 | (is_compressed_v2 & (decoded_sizes > 0))).nonzero()[0]
    owners: list[pa.Buffer | None] = [None] * len(headers)
    buffers, buffer_addresses = decompress_pages(
        source,
        headers["offset"][compressed],
        codecs[compressed],
        values[compressed],
        value_sizes[compressed],
        decoded_sizes[compressed],
    )
    for i, buffer in zip(compressed.tolist(), buffers, strict=True):
        owners[i] = buffer
    values[compressed] = buffer_addresses
    value_sizes[compressed] = decoded_sizes[compressed]
    return PageBodies(
        owners,
        np.where(is_v1, values, addresses),
        np.where(is_v1, value_sizes, plain_level_bytes),
        values,
        value_sizes,
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
        offsets: int64 [n], offset of each part in the file, for error messages.
        codecs: [n], CompressionCodec of each part.
        addresses, sizes: int64 [n], address in memory and size of each part.
        lengths: int64 [n], decompressed size of each part in bytes.

    Returns: the buffers, None for a part that is not compressed; and the addresses of the
        decompressed bytes, int64 [n].
    Raises: CorruptFileError if a part is damaged; UnsupportedFileError if a codec is not supported.
    """
    owners: list[pa.Buffer | None] = [None] * len(offsets)
    decompressed = addresses.copy()
    with source.error_context(0, "the page") as location:

        def decompress_together(codec: int, parts: Int64s) -> Int64s:
            """Decompress parts, given by their indices, in one call. Returns the parts that still
            have to be decompressed: all if one of them is damaged, or if no function decompresses
            many at once by this codec."""
            if codec == UNCOMPRESSED:
                is_wrong: npt.NDArray[np.bool_] = sizes[parts] != lengths[parts]
                return parts[is_wrong]
            decompress_all = decompress_many(codec)
            if decompress_all is None:
                return parts
            # A wrong size must not allocate memory
            is_plausible = lengths[parts] <= max_decompressed_size(codec, sizes[parts])
            plausible = parts[is_plausible]
            buffers = []
            for i in plausible.tolist():
                location.offset = int(offsets[i])
                buffers.append(allocate_buffer(int(lengths[i])))
            out_addresses = addresses_of(buffers)
            first_damaged = decompress_all(
                addresses[plausible], sizes[plausible], out_addresses, lengths[plausible]
            )
            if first_damaged >= 0:
                return parts
            decompressed[plausible] = out_addresses
            for i, buffer in zip(plausible.tolist(), buffers, strict=True):
                owners[i] = buffer
            return parts[~is_plausible]

        for codec in sorted(set(codecs.tolist())):
            parts = (codecs == codec).nonzero()[0]
            # One by one: a damaged part raises an exact error message
            for i in decompress_together(codec, parts).tolist():
                location.offset = int(offsets[i])
                buffer = pa.py_buffer(
                    decompress(codec, memory_at(addresses[i], sizes[i]), int(lengths[i]))
                )
                owners[i] = buffer
                decompressed[i] = buffer.address
    return owners, decompressed


def check_checksums(source: FileBytes, headers: Headers, addresses: Int64s) -> None:
    """Verify the checksums of the bodies whose headers have one. addresses: int64 [n], address of
    each body in memory. Raises: CorruptFileError."""
    with_crc = headers["has_crc"].nonzero()[0].tolist()
    if not with_crc:
        return
    with source.error_context(0, "the page") as location:
        for i in with_crc:
            location.offset = int(headers["offset"][i])
            check_crc(int(headers["crc"][i]), memory_at(addresses[i], headers["stored_bytes"][i]))


def check_crc(crc: int, body: memoryview) -> None:
    """Compare a body's checksum with `crc`, the signed number in the page's header. Raises:
    MalformedError if they differ."""
    computed = zlib.crc32(body)
    expected = crc & 0xFFFF_FFFF
    if computed != expected:
        raise MalformedError(
            f"its checksum is {computed:08x}, but the checksum in its header is {expected:08x}"
        )
