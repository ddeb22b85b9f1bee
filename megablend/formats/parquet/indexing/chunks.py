"""The pages of column chunks, located and counted in the cheapest exact way;
chunks that allow the same way are done together.

    OffsetIndex + ColumnIndex     no page is read
    OffsetIndex + page headers    if the ColumnIndex has no counts, or counts that do not add up to the chunk's values
    scan from header to header    if there is no page index
    levels                        if none of these determines tokens or rows: V1 pages are read whole, V2 pages in part

The counts of nulls and rows in V2 headers are not used: the levels are available, exact, and small.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.formats.parquet.indexing.by_headers import (
    count_by_scanning_headers,
    count_from_offset_index,
)
from megablend.formats.parquet.indexing.by_page_index import (
    locate_from_page_index,
    read_page_indexes,
    uniform_page_encodings,
)
from megablend.formats.parquet.indexing.chunk_pages import (
    ChunkPages,
    PageScanContext,
    join_parts,
    without_empty,
)
from megablend.formats.parquet.indexing.count import (
    find_miscounted,
    has_histogram,
    has_token_counts,
)
from megablend.formats.parquet.indexing.stream import count_streamed
from megablend.formats.parquet.metadata.checks import refuse
from megablend.formats.parquet.metadata.column_chunk import Chunks
from megablend.formats.parquet.metadata.schema import Column
from megablend.kernels.parquet.document_counts import sum_chunks


def find_pages(search: PageScanContext, chunks: Chunks) -> ChunkPages:
    """Locate and count the pages of chunks; those without rows and tokens are left out.

    Raises: CorruptFileError, UnsupportedFileError.
    """
    has_values = chunks["num_values"] > 0
    has_index = has_values & (chunks["offset_index_bytes"] > 0)
    indexed = np.flatnonzero(has_index)
    walked = np.flatnonzero(has_values & ~has_index)
    miscounted = (chunks["num_levels"] >= 0) & (chunks["all_levels"] != chunks["num_values"])
    parts = []
    if len(indexed):
        of_indexed = chunks[indexed]
        places, counts = read_page_indexes(search, of_indexed)
        miscounted[indexed] |= find_miscounted(counts, places.first_page, of_indexed)
        encodings = uniform_page_encodings(of_indexed, search.column)
        by_index = (
            (of_indexed["column_index_bytes"] > 0)
            & (encodings >= 0)
            & has_token_counts(counts, search.column)
        )
        by_index &= ~miscounted[indexed]
        if by_index.any():
            of_counted = places.of(by_index), counts.of(by_index, places.first_page)
            parts.append(
                (
                    indexed[by_index],
                    locate_from_page_index(
                        search, of_indexed[by_index], encodings[by_index], *of_counted
                    ),
                )
            )
        if not by_index.all():
            parts.append(
                (
                    indexed[~by_index],
                    count_from_offset_index(search, of_indexed[~by_index], places.of(~by_index)),
                )
            )
    if len(walked):
        parts.append((walked, count_streamed(search, chunks[walked], count_by_scanning_headers)))
    found = replace(join_parts(len(chunks), parts), note=_note(chunks, miscounted))
    sums = np.empty((3, len(chunks)), np.int64)
    all_filled = sum_chunks(found.pages, found.first_page, sums)
    with search.error_context(chunks):
        _check_sums(sums, chunks, search.column)
    return found if all_filled else without_empty(found)


def _note(chunks: Chunks, miscounted: npt.NDArray[np.bool_]) -> str | None:
    """The warning about wrong level histograms, as ClickHouse 26 writes them
    when a dictionary overflows."""
    if not miscounted.any():
        return None
    first = int(np.argmax(miscounted))
    return (
        f"{miscounted.sum()} of {len(chunks)} row groups (the first is {chunks['row_group'][first]}) have histograms "
        f"of levels that do not add up to their {chunks['num_values'][first]:,} values, so their pages were counted "
        "by their headers"
    )


def _check_sums(sums: Int64s, chunks: Chunks, column: Column) -> None:
    """Check the sums over pages against the metadata of chunks and row groups.
    Raises MalformedError."""
    rows, tokens, continues = sums
    refuse(continues > 0, lambda _: "its first page begins in the middle of a row")
    refuse(
        (rows >= 0) & (rows != chunks["num_rows"]),
        lambda i: f"its pages have {rows[i]} rows, but its row group has {chunks['num_rows'][i]}",
    )
    refuse(
        has_histogram(chunks, column) & (tokens != chunks["top_level"]),
        lambda i: (
            f"its pages have {tokens[i]} tokens, but its metadata states {chunks['top_level'][i]}"
        ),
    )
