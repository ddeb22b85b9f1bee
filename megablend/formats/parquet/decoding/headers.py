"""Headers of many pages: of pages in memory, of pages at known offsets, or of pages found by
scanning column chunks.

Kernels parse them. A header that a kernel rejects is parsed in Python, which reports what is wrong
with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s, running_totals
from megablend.formats.buffers import memory_at
from megablend.formats.parquet.decoding.levels import check_level_encodings
from megablend.formats.parquet.metadata.checks import chunk_of, refuse_pages
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
"""Number of bytes per read when scanning with a descriptor: small pages, and all but the longest
headers, need no second read."""
AHEAD_BYTES = 1 << 20
"""Number of bytes per read when scanning a storage without descriptors."""
WALK_PAGES = 1 << 12
"""Maximum number of headers that one call of the scanning kernel returns."""
READS_IN_FLIGHT = 16
"""Number of threads that read headers at known offsets."""
TURNS = 4
"""Number of batches of chunks per thread when scanning; several, since chunks differ in length."""
PART_PAGES = 1 << 10
"""Number of pages per batch when several threads read headers at known offsets; fewer are not worth
a thread."""

NO_DICTIONARY = (-1, 0)
"""Offset and size of a dictionary page that does not exist."""


def is_data(headers: Headers) -> npt.NDArray[np.bool_]:
    """Return whether each page is a data page: bool [n]."""
    are_data: npt.NDArray[np.bool_] = (headers["type"] == DATA) | (headers["type"] == DATA_V2)
    return are_data


def headers_in(
    source: FileBytes,
    offsets: Int64s,
    sizes: Int64s,
    addresses: Int64s,
    what: str = "the page",
) -> Headers:
    """Parse the headers of pages in memory.

    Args:
        offsets, sizes: int64 [n], offset of each page in the file, and its size in bytes.
        addresses: int64 [n], address of each page in memory.
        what: describes a page in messages.

    Raises: CorruptFileError.
    """
    headers = np.zeros(len(sizes), HEADER_DTYPE)
    unsigned = addresses.astype(np.uint64)
    done = parse_headers(unsigned, sizes, headers)
    while done < len(sizes):
        with source.error_context(int(offsets[done]), what):
            headers[done] = parse_page_header(memory_at(addresses[done], sizes[done]))
        done += 1
        done += parse_headers(unsigned[done:], sizes[done:], headers[done:])
    headers["offset"] = offsets
    return headers


def headers_at(source: FileBytes, offsets: Int64s, limits: Int64s) -> Headers:
    """Read the headers of pages, and check that each page ends at or before its limit.

    Args:
        offsets, limits: int64 [n], offset of each page in the file, and its limit.

    Raises: CorruptFileError.
    """
    headers = np.zeros(len(offsets), HEADER_DTYPE)
    with _scattered_descriptor(source) as fd:

        def read(begin: int) -> None:
            part = slice(begin, begin + PART_PAGES)
            _read_headers(source, fd, offsets[part], limits[part], headers[part])

        parallel_map(read, range(0, len(offsets), PART_PAGES), READS_IN_FLIGHT)
    return headers


def request_headers(source: FileBytes, offsets: Int64s) -> None:
    """Announce that `headers_at` will read the headers at `offsets`; see `FileBytes.request`."""
    source.request(offsets, np.minimum(PROBE_BYTES, source.size - offsets))


def walk_pages(
    source: FileBytes, chunks: Chunks, limit: int, in_flight: int
) -> tuple[Headers, Int64s]:
    """Find the pages of chunks by reading one page header after another, until all values of the
    chunk have been found.

    Args:
        limit: offset in the file at or before which all pages end; a chunk's own size is not used,
            since some writers do not count the dictionary's header in it.
        in_flight: number of threads that read in parallel.

    Returns: the headers of all pages in order, dictionaries included; and the number of each
        chunk's first page, int64 [num_chunks + 1].
    Raises: CorruptFileError.
    """
    size = -(-len(chunks) // (in_flight * TURNS)) if in_flight > 1 else max(1, len(chunks))
    parts = [chunks[begin : begin + size] for begin in range(0, len(chunks), size)]
    with _scattered_descriptor(source) as fd:
        walked = parallel_map(lambda part: _walk(source, fd, part, limit), parts, in_flight)
    headers = np.concatenate([part for found_parts, _ in walked for part in found_parts])
    return headers, running_totals(np.concatenate([counts for _, counts in walked]))


def dictionaries_before(source: FileBytes, starts: Int64s, firsts: Int64s) -> Int64s:
    """Find the dictionary page of each chunk, which precedes the first data page. OffsetIndexes do
    not list dictionary pages.

    Args:
        starts, firsts: int64 [num_chunks], offset of each chunk, and of its first data page.

    Returns: int64 [num_chunks, 2], offset and stored size of each chunk's dictionary page;
        NO_DICTIONARY if the chunk has none.
    Raises: CorruptFileError.
    """
    with_gap = np.flatnonzero(starts != firsts)
    dictionaries = np.full((len(starts), 2), NO_DICTIONARY)
    if len(with_gap):
        headers = headers_at(source, starts[with_gap], firsts[with_gap])
        dictionaries[with_gap] = dictionaries_among(headers, np.arange(len(with_gap) + 1))
    return dictionaries


def dictionaries_among(headers: Headers, first_page: Int64s) -> Int64s:
    """Find the first dictionary page among the pages of each chunk. The result has the same form as
    that of `dictionaries_before`.

    Args:
        headers: HEADER_DTYPE [num_pages].
        first_page: int64 [num_chunks + 1], number of each chunk's first page.
    """
    pages = np.flatnonzero(headers["type"] == PageType.DICTIONARY)
    # Position in `pages` of the first dictionary page of each chunk, or of a later one
    firsts = np.searchsorted(pages, first_page)
    chunks = np.flatnonzero(np.diff(firsts))
    dictionaries = np.full((len(first_page) - 1, 2), NO_DICTIONARY)
    chosen = headers[pages[firsts[chunks]]]
    dictionaries[chunks, 0] = chosen["offset"]
    dictionaries[chunks, 1] = chosen["header_bytes"] + chosen["stored_bytes"]
    return dictionaries


def check_headers(headers: Headers, first_page: Int64s, column: Column) -> None:
    """Check that the headers are those of data pages, and that their levels do not use an old
    encoding. Raises: MalformedError, UnsupportedError."""
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
    """Scan chunks. Returns the headers of their pages, in parts, and the number of pages of each
    chunk. `fd`: descriptor of the file, or -1."""
    # For each chunk: the offset of its next page, and the number of values in its remaining pages
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
        previous = chunk
        filled, chunk = walk_headers(
            fd, probe, probe_offset, chunk, offsets, limit, left, counts, part
        )
        made_no_progress = filled == 0 and chunk == previous
        if made_no_progress:
            filled = 1
            header = read_page_header(source, offset, limit)
            part[0] = header
            offsets[chunk] += header["header_bytes"] + header["stored_bytes"]
            left[chunk] -= header["num_values"] * is_data(part[:1])[0]
            counts[chunk] += 1
        parts.append(part[:filled].copy())
    if left.any():
        i = int(np.argmax(left != 0))
        with source.error_context(int(offsets[i]), "the column chunk"):
            stated = chunks["num_values"][i]
            raise MalformedError(
                f"its pages have {-left[i]} more values than the {stated} in its metadata"
            )
    return parts, counts


def _ahead_bytes(source: FileBytes, chunk: np.void, offset: int, limit: int) -> int:
    """Return how many bytes to read at once, beginning with the page at `offset` of a chunk."""
    stop = limit
    # Only whole chunks were announced, so reading beyond this one would need a request
    chunk_stop = int(chunk["start"] + chunk["stored_bytes"])
    if source.is_prefetched and offset < chunk_stop:
        stop = min(chunk_stop, limit)
    return max(0, min(AHEAD_BYTES, stop - offset))


def _read_headers(
    source: FileBytes, fd: int, offsets: Int64s, limits: Int64s, headers: Headers
) -> None:
    """Fill `headers` with the headers of the pages at `offsets`; see `headers_at`."""
    probe = np.empty(PROBE_BYTES, np.uint8)
    # Without a descriptor, the beginnings of all pages are read at the same time
    if fd < 0:
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
            headers[done] = read_page_header(source, offset, int(limits[done]))
            done += 1


def _parse_probes(
    addresses: npt.NDArray[np.uint64],
    sizes: Int64s,
    offsets: Int64s,
    limits: Int64s,
    headers: Headers,
) -> int:
    """Parse headers in memory up to the first header that the kernel rejects, or whose page extends
    beyond its limit. Returns the number of that header."""
    done = parse_headers(addresses, sizes, headers)
    headers["offset"][:done] = offsets[:done]
    ends = offsets + headers["header_bytes"] + headers["stored_bytes"]
    beyond = np.flatnonzero(ends[:done] > limits[:done])
    return int(beyond[0]) if len(beyond) else done


@contextmanager
def _scattered_descriptor(source: FileBytes) -> Iterator[int]:
    """Yield a file descriptor for small scattered reads, or -1 if the storage has none. The
    system's read-ahead, which would read the whole file, is turned off."""
    with source.storage.descriptor(source.path) as fd:
        if fd >= 0:
            _advise(fd, os.POSIX_FADV_RANDOM)
        try:
            yield fd
        finally:
            if fd >= 0:
                _advise(fd, os.POSIX_FADV_NORMAL)


def _advise(fd: int, advice: int) -> None:
    # The advice is only a hint, which some file systems do not support
    with suppress(OSError):
        os.posix_fadvise(fd, 0, 0, advice)
