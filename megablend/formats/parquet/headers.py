"""Headers of many pages: those of pages in memory, those at known places, and those met on a walk through a column chunk.

Kernels read them; a header that a kernel leaves alone is read slowly, which names what is wrong with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megablend.formats.parquet.column_chunk import ColumnChunk
from megablend.formats.parquet.page_header import PROBE_BYTES, parse_page_header, read_page_header
from megablend.formats.parquet.source import ByteSource
from megablend.formats.parquet.thrift import MalformedError
from megablend.kernels.page_headers import (
    DATA,
    DATA_V2,
    HEADER_DTYPE,
    Headers,
    parse_headers,
    read_headers,
    walk_headers,
)

WALK_BYTES = 512
"""Read at once on a walk with a descriptor: small pages, and all but the longest headers, need no second read."""
AHEAD_BYTES = 1 << 20
"""Read at once on a walk through a storage without descriptors."""
WALK_PAGES = 1 << 12
READS_IN_FLIGHT = 16
PART_PAGES = 1 << 10
"""Headers at known places are read by several threads at once, so many pages a turn; fewer are not worth a thread."""

Int64s = npt.NDArray[np.int64]


def is_data(headers: Headers) -> npt.NDArray[np.bool_]:
    """Which pages hold values."""
    found: npt.NDArray[np.bool_] = (headers["type"] == DATA) | (headers["type"] == DATA_V2)
    return found


def headers_in(source: ByteSource, offsets: Int64s, sizes: Int64s, data: pa.Buffer, begins: Int64s) -> Headers:
    """The headers of pages that lie in memory.

    Args:
        offsets, sizes: int64 [n], where the pages begin in the file, and their bytes.
        begins: int64 [n], where they begin in `data`.

    Raises: CorruptFileError.
    """
    headers, addresses = np.zeros(len(sizes), HEADER_DTYPE), (begins + data.address).astype(np.uint64)
    done = parse_headers(addresses, sizes, headers)
    while done < len(sizes):
        with source.blamed(int(offsets[done]), "the page"):
            page = memoryview(data).cast("B")[begins[done] : begins[done] + sizes[done]]
            headers[done] = parse_page_header(page).record(0)
        done += 1
        done += parse_headers(addresses[done:], sizes[done:], headers[done:])
    headers["offset"] = offsets
    return headers


def headers_at(source: ByteSource, offsets: Int64s, limit: int) -> Headers:
    """The headers of pages at known places; none reaches beyond byte `limit`. Raises CorruptFileError."""
    headers = np.zeros(len(offsets), HEADER_DTYPE)
    with _scattered(source) as fd:

        def read(begin: int) -> None:
            part = slice(begin, begin + PART_PAGES)
            _read_headers(source, fd, offsets[part], limit, headers[part])

        begins = range(0, len(offsets), PART_PAGES)
        if len(begins) < 2:
            list(map(read, begins))
        else:
            with ThreadPoolExecutor(READS_IN_FLIGHT) as threads:
                list(threads.map(read, begins))
    return headers


def walk_pages(source: ByteSource, chunk: ColumnChunk, limit: int) -> Headers:
    """The headers of all pages of a chunk in order, dictionary included, until its values are complete.

    `limit` bounds the walk rather than the chunk's own size: some writers leave the dictionary's header out of that.

    Raises: CorruptFileError.
    """
    parts = []
    offset, left = chunk.start, chunk.num_values
    with _scattered(source) as fd:
        while left > 0:
            part = np.zeros(WALK_PAGES, HEADER_DTYPE)
            if fd >= 0:
                probe, probe_offset = np.empty(WALK_BYTES, np.uint8), limit
            else:
                ahead = source.read(offset, max(0, min(AHEAD_BYTES, limit - offset)), "pages")
                probe, probe_offset = np.frombuffer(ahead, np.uint8).copy(), offset
            filled, end, rest = walk_headers(fd, probe, probe_offset, offset, limit, left, part)
            if filled == 0:
                header = read_page_header(source, offset, limit)
                part[0] = header.record(offset)
                filled, end = 1, offset + header.header_bytes + header.stored_bytes
                rest = left - header.num_values * bool(is_data(part[:1])[0])
            parts.append(part[:filled])
            offset, left = end, rest
    with source.blamed(offset, "the column chunk"):
        if left:
            raise MalformedError(f"its pages have {-left} values more than the {chunk.num_values} of its metadata")
    return np.concatenate(parts) if parts else np.zeros(0, HEADER_DTYPE)


def _read_headers(source: ByteSource, fd: int, offsets: Int64s, limit: int, headers: Headers) -> None:
    probe = np.empty(PROBE_BYTES, np.uint8)
    done = 0
    while done < len(offsets):
        if fd >= 0:
            done += read_headers(fd, offsets[done:], limit, probe, headers[done:])
        if done < len(offsets):
            offset = int(offsets[done])
            headers[done] = read_page_header(source, offset, limit).record(offset)
            done += 1


@contextmanager
def _scattered(source: ByteSource) -> Iterator[int]:
    """A descriptor for small reads far from each other (-1 where there is none): reading ahead would read the whole file."""
    with source.storage.descriptor(source.path) as fd:
        if fd >= 0:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        try:
            yield fd
        finally:
            if fd >= 0:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_NORMAL)
