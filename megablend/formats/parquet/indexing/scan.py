"""Counting by levels, if nothing else determines rows or tokens: V1 pages are read whole, of V2
pages only the levels."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from megablend.arrays import Int64s
from megablend.formats.parquet.decoding.bodies import check_checksums, decompress_pages
from megablend.formats.parquet.decoding.levels import check_levels, levels_of
from megablend.formats.parquet.indexing.count import Pages, count_levels
from megablend.formats.parquet.indexing.stream import PORTION_BYTES
from megablend.formats.parquet.metadata.schema import Column
from megablend.formats.parquet.metadata.source import FileBytes
from megablend.kernels.parquet.levels import NONE
from megablend.kernels.parquet.page_headers import DATA, Headers
from megablend.storage.parallel_map import parallel_map
from megablend.storage.prefetched import stream_portions
from megablend.storage.ranges import merge_ranges, portions


def scan(
    source: FileBytes,
    headers: Headers,
    codecs: Int64s,
    column: Column,
    pages: Pages,
    in_flight: int,
) -> int:
    """Count pages by their levels; returns the bytes that were read.

    Args:
        headers: HEADER_DTYPE [n], of data pages in the order of the file.
        codecs: int64 [n], how each is compressed.
        pages: PAGE_DTYPE [n], counts are filled.

    Raises: CorruptFileError, UnsupportedFileError.
    """
    offsets = headers["offset"] + headers["header_bytes"]
    is_v1 = headers["type"] == DATA
    sizes = np.where(is_v1, headers["stored_bytes"], headers["rep_bytes"] + headers["def_bytes"])
    loads = np.where(is_v1, np.maximum(sizes, headers["decoded_bytes"]), sizes)

    merged = merge_ranges(offsets, sizes, source.limits, loads)
    # Pages are in the order of the file
    bounds = np.searchsorted(merged.runs, np.arange(len(merged.starts) + 1))

    def count(number: int) -> None:
        run = slice(bounds[number], bounds[number + 1])
        start = merged.starts[number]
        stop = merged.stops[number]
        data, _ = source.read_ranges(np.array([start]), np.array([stop - start]), "a run of pages")
        owners, addresses, held = _level_bytes(
            source, headers[run], codecs[run], data.address + offsets[run] - start, sizes[run]
        )
        levels, _, _ = levels_of(headers[run], addresses, held, column, np.full(len(held), -1))
        del owners, data  # which own the memory that the levels were read from
        for i in np.flatnonzero(levels["problem"] != NONE):
            with source.error_context(int(headers["offset"][run][i]), "the page"):
                check_levels(levels[i], column)
        count_levels(pages[run], levels)

    if source.is_prefetched:
        stored = merged.stops - merged.starts
        parts = portions(stored, PORTION_BYTES)
        for part in stream_portions(
            source.storage, source.path, [(merged.starts[each], stored[each]) for each in parts]
        ):
            for number in range(parts[part].start, parts[part].stop):
                count(number)
    else:
        parallel_map(count, range(len(merged.starts)), in_flight)
    return int(sizes.sum())


def _level_bytes(
    source: FileBytes, headers: Headers, codecs: Int64s, addresses: Int64s, sizes: Int64s
) -> tuple[list[pa.Buffer | None], Int64s, Int64s]:
    """The bytes that begin with the levels of each page: owner, address, size."""
    is_v1 = np.flatnonzero(headers["type"] == DATA)
    check_checksums(source, headers[is_v1], addresses[is_v1])
    addresses = addresses.copy()
    sizes = sizes.copy()
    v1 = headers[is_v1]
    parts = addresses[is_v1], sizes[is_v1], v1["decoded_bytes"]
    owners, found = decompress_pages(source, v1["offset"], codecs[is_v1], *parts)
    addresses[is_v1] = found
    sizes[is_v1] = v1["decoded_bytes"]
    return owners, addresses, sizes
