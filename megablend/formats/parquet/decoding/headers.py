"""Headers of many pages: of pages in memory, at known offsets, or found by scanning column chunks.

Kernels parse them; a header that a kernel rejects is parsed in Python,
which reports what is wrong with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.formats.buffers import memory_at
from megablend.formats.parquet.decoding.levels import check_level_encodings
from megablend.formats.parquet.metadata.checks import chunk_of, refuse_pages, starts_of
from megablend.formats.parquet.metadata.column_chunk import Chunks
from megablend.formats.parquet.metadata.names import Encoding, PageType
from megablend.formats.parquet.metadata.page_header import (
    PROBE_BYTES,
    parse_page_header,
    read_page_header,
)
from megablend.formats.parquet.metadata.schema import Column
from megablend.formats.parquet.metadata.source import FileBytes
from megablend.formats.parquet.metadata.thrift import MalformedError, UnsupportedError
from megablend.kernels.parquet.page_headers import (
    DATA,
    DATA_V2,
    HEADER_DTYPE,
    Headers,
    parse_headers,
    read_headers,
    walk_headers,
)
from megablend.storage.parallel_map import parallel_map

WALK_BYTES = 512
"""Bytes per read when scanning with a descriptor: small pages, and all but the longest headers,
need no second read."""
AHEAD_BYTES = 1 << 20
"""Bytes per read when scanning a storage without descriptors."""
WALK_PAGES = 1 << 12
READS_IN_FLIGHT = 16
TURNS = 4
"""Batches of chunks per thread when scanning: some chunks are longer than others."""
PART_PAGES = 1 << 10
"""Pages per batch when several threads read headers at known offsets; fewer are not worth a
thread."""

NO_DICTIONARY = (-1, 0)


def is_data(headers: Headers) -> npt.NDArray[np.bool_]:
    """Which pages are data pages."""
    found: npt.NDArray[np.bool_] = (headers["type"] == DATA) | (headers["type"] == DATA_V2)
    return found


def headers_in(source: FileBytes, offsets: Int64s, sizes: Int64s, addresses: Int64s) -> Headers:
    """Parse the headers of pages in memory.

    Args:
        offsets, sizes: int64 [n], where the pages begin in the file, and their bytes.
        addresses: int64 [n], where they begin in memory.

    Raises: CorruptFileError.
    """
    headers = np.zeros(len(sizes), HEADER_DTYPE)
    places = addresses.astype(np.uint64)
    done = parse_headers(places, sizes, headers)
    while done < len(sizes):
        with source.error_context(int(offsets[done]), "the page"):
            headers[done] = parse_page_header(memory_at(addresses[done], sizes[done])).record(0)
        done += 1
        done += parse_headers(places[done:], sizes[done:], headers[done:])
    headers["offset"] = offsets
    return headers


def headers_at(source: FileBytes, offsets: Int64s, limits: Int64s) -> Headers:
    """Read the headers of pages at known offsets; no page extends beyond its limit.
    Raises CorruptFileError."""
    headers = np.zeros(len(offsets), HEADER_DTYPE)
    with _scattered(source) as fd:

        def read(begin: int) -> None:
            part = slice(begin, begin + PART_PAGES)
            _read_headers(source, fd, offsets[part], limits[part], headers[part])

        parallel_map(read, range(0, len(offsets), PART_PAGES), READS_IN_FLIGHT)
    return headers


def request_headers(source: FileBytes, offsets: Int64s) -> None:
    """Announce that `headers_at` will read these pages; see `FileBytes.request`."""
    source.request(offsets, np.minimum(PROBE_BYTES, source.size - offsets))


def walk_pages(
    source: FileBytes, chunks: Chunks, limit: int, in_flight: int
) -> tuple[Headers, Int64s]:
    """Scan chunks from header to header until the values of each are complete.

    `limit` bounds the scan instead of the chunk's own size: some writers do not count the
    dictionary's header there.

    Returns: the headers of all pages in order, dictionaries included; the pages of each chunk,
        int64 [num_chunks + 1].
    Raises: CorruptFileError.
    """
    size = -(-len(chunks) // (in_flight * TURNS)) if in_flight > 1 else max(1, len(chunks))
    parts = [chunks[begin : begin + size] for begin in range(0, len(chunks), size)]
    with _scattered(source) as fd:
        walked = parallel_map(lambda part: _walk(source, fd, part, limit), parts, in_flight)
    headers = np.concatenate([part for found, _ in walked for part in found])
    return headers, starts_of(np.concatenate([counts for _, counts in walked]))


def dictionaries_before(source: FileBytes, starts: Int64s, firsts: Int64s) -> Int64s:
    """Find the dictionary pages between the chunks' starts and their first data pages:
    OffsetIndexes do not list them.

    Returns: int64 [num_chunks, 2], offset and stored size; NO_DICTIONARY if there is none. Raises
        CorruptFileError.
    """
    between = np.flatnonzero(starts != firsts)
    found = np.full((len(starts), 2), NO_DICTIONARY)
    if len(between):
        headers = headers_at(source, starts[between], firsts[between])
        found[between] = dictionaries_among(headers, np.arange(len(between) + 1))
    return found


def dictionaries_among(headers: Headers, first_page: Int64s) -> Int64s:
    """The first dictionary page of each chunk's pages; see `dictionaries_before`."""
    places = np.flatnonzero(headers["type"] == PageType.DICTIONARY)
    firsts = np.searchsorted(places, first_page)
    chunks = np.flatnonzero(np.diff(firsts))
    found = np.full((len(first_page) - 1, 2), NO_DICTIONARY)
    chosen = headers[places[firsts[chunks]]]
    found[chunks, 0] = chosen["offset"]
    found[chunks, 1] = chosen["header_bytes"] + chosen["stored_bytes"]
    return found


def check_headers(headers: Headers, first_page: Int64s, column: Column) -> None:
    """Reject headers of pages that are not data pages, or whose levels use an old encoding.

    Raises: MalformedError, UnsupportedError.
    """
    refuse_pages(
        ~is_data(headers),
        first_page,
        lambda _: "its OffsetIndex points to a page that is not a data page",
    )
    try:
        check_level_encodings(headers, column)
    except UnsupportedError as error:
        is_old = (headers["def_encoding"] != Encoding.RLE) & (column.max_def > 0)
        is_old |= (headers["rep_encoding"] != Encoding.RLE) & (column.max_rep > 0)
        raise UnsupportedError(str(error), chunk_of(int(np.argmax(is_old)), first_page)) from error


def _walk(source: FileBytes, fd: int, chunks: Chunks, limit: int) -> tuple[list[Headers], Int64s]:
    """The headers of the pages of chunks, in parts, and the number of each chunk."""
    offsets = chunks["start"].copy()
    left = chunks["num_values"].copy()
    counts = np.zeros(len(chunks), np.int64)
    probe = np.empty(WALK_BYTES, np.uint8)
    probe_offset = limit
    part = np.empty(WALK_PAGES, HEADER_DTYPE)
    parts = []
    chunk = 0
    while chunk < len(chunks):
        offset = int(offsets[chunk])
        if fd < 0:
            ahead = source.read(offset, _ahead_bytes(source, chunks[chunk], offset, limit), "pages")
            probe = np.frombuffer(ahead, np.uint8).copy()
            probe_offset = offset
        before = chunk
        filled, chunk = walk_headers(
            fd, probe, probe_offset, chunk, offsets, limit, left, counts, part
        )
        if filled == 0 and chunk == before:
            filled = 1
            header = read_page_header(source, offset, limit)
            part[0] = header.record(offset)
            offsets[chunk] += header.header_bytes + header.stored_bytes
            left[chunk] -= header.num_values * bool(is_data(part[:1])[0])
            counts[chunk] += 1
        parts.append(part[:filled].copy())
    for i in np.flatnonzero(left):
        with source.error_context(int(offsets[i]), "the column chunk"):
            known = chunks["num_values"][i]
            raise MalformedError(
                f"its pages have {-left[i]} more values than the {known} in its metadata"
            )
    return parts, counts


def _ahead_bytes(source: FileBytes, chunk: np.void, offset: int, limit: int) -> int:
    """How much is read at a page of a chunk; what was announced are whole chunks."""
    stop = int(chunk["start"] + chunk["stored_bytes"])
    return max(
        0,
        min(
            AHEAD_BYTES,
            (stop if source.is_prefetched and offset < stop else limit) - offset,
            limit - offset,
        ),
    )


def _read_headers(
    source: FileBytes, fd: int, offsets: Int64s, limits: Int64s, headers: Headers
) -> None:
    probe = np.empty(PROBE_BYTES, np.uint8)
    if fd < 0:  # all at the same time
        sizes = np.clip(limits - offsets, 0, PROBE_BYTES)
        data, begins = source.read_ranges(offsets, sizes, "the page header")
        addresses = (begins + data.address).astype(np.uint64)
    done = 0
    while done < len(offsets):
        rest = slice(done, None)
        if fd >= 0:
            done += read_headers(fd, offsets[rest], limits[rest], probe, headers[rest])
        else:
            done += _parse_probes(
                addresses[rest], sizes[rest], offsets[rest], limits[rest], headers[rest]
            )
        if done < len(offsets):
            offset = int(offsets[done])
            headers[done] = read_page_header(source, offset, int(limits[done])).record(offset)
            done += 1


def _parse_probes(
    addresses: npt.NDArray[np.uint64],
    sizes: Int64s,
    offsets: Int64s,
    limits: Int64s,
    headers: Headers,
) -> int:
    """Parse headers in memory; returns the number of the first that needs care, also for a page
    beyond its limit."""
    done = parse_headers(addresses, sizes, headers)
    headers["offset"][:done] = offsets[:done]
    ends = offsets + headers["header_bytes"] + headers["stored_bytes"]
    beyond = np.flatnonzero(ends[:done] > limits[:done])
    return int(beyond[0]) if len(beyond) else done


@contextmanager
def _scattered(source: FileBytes) -> Iterator[int]:
    """A descriptor for small scattered reads (-1 if there is none):
    read-ahead would read the whole file."""
    with source.storage.descriptor(source.path) as fd:
        if fd >= 0:
            _advise(fd, os.POSIX_FADV_RANDOM)
        try:
            yield fd
        finally:
            if fd >= 0:
                _advise(fd, os.POSIX_FADV_NORMAL)


def _advise(fd: int, advice: int) -> None:
    with suppress(OSError):  # only a hint: a file system that does not support it is fine
        os.posix_fadvise(fd, 0, 0, advice)
