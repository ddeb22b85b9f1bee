"""Count pages by their levels, if nothing else determines their rows or tokens. V1 pages are read
whole; of V2 pages, only the levels are read."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from megablend.arrays import Int64s
from megablend.formats.parquet.decoding.bodies import check_checksums, decompress_pages
from megablend.formats.parquet.decoding.levels import check_levels, levels_of
from megablend.formats.parquet.indexing.count import Pages, count_levels
from megablend.formats.parquet.metadata.schema import Column
from megablend.formats.parquet.metadata.source import FileBytes
from megablend.kernels.parquet.levels import NONE
from megablend.kernels.parquet.page_headers import DATA, Headers
from megablend.storage.parallel_map import parallel_map
from megablend.storage.ranges import merge_ranges


def scan(
    source: FileBytes,
    headers: Headers,
    codecs: Int64s,
    column: Column,
    pages: Pages,
    in_flight: int,
) -> int:
    """Count pages by their levels. Returns the number of bytes that were read.

    Args:
        headers: HEADER_DTYPE [n], headers of data pages in the order of the file.
        codecs: int64 [n], CompressionCodec of each page.
        pages: PAGE_DTYPE [n], whose counts are filled.

    Raises: CorruptFileError, UnsupportedFileError.
    """
    offsets = headers["offset"] + headers["header_bytes"]
    is_v1 = headers["type"] == DATA
    sizes = np.where(is_v1, headers["stored_bytes"], headers["rep_bytes"] + headers["def_bytes"])
    memory = np.where(is_v1, np.maximum(sizes, headers["decoded_bytes"]), sizes)

    merged = merge_ranges(offsets, sizes, source.limits, memory)
    # Pages are in the order of the file, so the pages of a run are neighbours
    bounds = np.searchsorted(merged.runs, np.arange(len(merged.starts) + 1))

    def count(number: int) -> None:
        run = slice(bounds[number], bounds[number + 1])
        start = merged.starts[number]
        stop = merged.stops[number]
        data, _ = source.read_ranges(np.array([start]), np.array([stop - start]), "a run of pages")
        owners, addresses, level_sizes = _level_bytes(
            source, headers[run], codecs[run], data.address + offsets[run] - start, sizes[run]
        )
        unknown_pieces = np.full(len(level_sizes), -1)
        levels, _, _ = levels_of(headers[run], addresses, level_sizes, column, unknown_pieces)
        # These own the memory of the encoded levels, and had to live until here
        del owners, data
        for i in np.flatnonzero(levels["problem"] != NONE):
            with source.error_context(int(headers["offset"][run][i]), "the page"):
                check_levels(levels[i], column)
        count_levels(pages[run], levels)

    if source.is_prefetched:
        for part in source.stream(merged.starts, merged.stops - merged.starts):
            for number in range(part.start, part.stop):
                count(number)
    else:
        parallel_map(count, range(len(merged.starts)), in_flight)
    return int(sizes.sum())


def _level_bytes(
    source: FileBytes, headers: Headers, codecs: Int64s, addresses: Int64s, sizes: Int64s
) -> tuple[list[pa.Buffer | None], Int64s, Int64s]:
    """Decompress V1 pages, and return for each page the bytes that begin with its levels: the
    owners of decompressed bytes; and the addresses and sizes of all pages' bytes, arrays of
    int64 [n]."""
    v1 = np.flatnonzero(headers["type"] == DATA)
    v1_headers = headers[v1]
    check_checksums(source, v1_headers, addresses[v1])
    addresses = addresses.copy()
    sizes = sizes.copy()
    owners, decompressed = decompress_pages(
        source,
        v1_headers["offset"],
        codecs[v1],
        addresses[v1],
        sizes[v1],
        v1_headers["decoded_bytes"],
    )
    addresses[v1] = decompressed
    sizes[v1] = v1_headers["decoded_bytes"]
    return owners, addresses, sizes
