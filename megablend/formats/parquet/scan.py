"""Counting by levels, where nothing else tells rows or tokens: V1 pages are read whole, of V2 pages the levels alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.formats.parquet.codecs import Buffer, decompress
from megablend.formats.parquet.count import Pages, count_levels
from megablend.formats.parquet.page import check_crc, check_levels, levels_of
from megablend.formats.parquet.ranges import plan_reads
from megablend.formats.parquet.schema import Column
from megablend.formats.parquet.side_by_side import side_by_side
from megablend.formats.parquet.source import ByteSource
from megablend.kernels.levels import NONE
from megablend.kernels.page_headers import DATA, Headers

Int64s = npt.NDArray[np.int64]


def scan(source: ByteSource, headers: Headers, codecs: Int64s, column: Column, pages: Pages, in_flight: int) -> int:
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

    def count(planned: tuple[range, int, int]) -> None:
        pages_of_run, start, stop = planned
        run = slice(pages_of_run.start, pages_of_run.stop)
        buffer, _ = source.read_ranges(np.array([start]), np.array([stop - start]), "a run of pages")
        data = memoryview(buffer).cast("B")
        bodies = _bodies(source, headers[run], codecs[run], data, offsets[run] - start, sizes[run])
        levels, _, _ = levels_of(headers[run], bodies, column, np.full(len(bodies), -1))
        for i in np.flatnonzero(levels["problem"] != NONE):
            with source.blamed(int(headers["offset"][run][i]), "the page"):
                check_levels(levels[i], column)
        count_levels(pages[run], levels)

    side_by_side(count, plan_reads(offsets.tolist(), sizes.tolist(), loads.tolist()), in_flight)
    return int(sizes.sum())


def _bodies(
    source: ByteSource, headers: Headers, codecs: Int64s, data: memoryview, begins: Int64s, sizes: Int64s
) -> list[Buffer]:
    """What begins with the levels of each page."""
    found: list[Buffer] = []
    fields = [headers[name].tolist() for name in ("offset", "type", "has_crc", "crc", "decoded_bytes")]
    with source.blamed(0, "the page") as place:
        for begin, size, codec, place.offset, kind, has_crc, crc, decoded in zip(
            begins.tolist(), sizes.tolist(), codecs.tolist(), *fields, strict=True
        ):
            body = data[begin : begin + size]
            if kind == DATA:
                if has_crc:
                    check_crc(crc, body)
                found.append(decompress(codec, body, decoded))
            else:
                found.append(body)
    return found
