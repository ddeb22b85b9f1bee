"""The data pages of a column's chunks, and the parameters for finding them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np

from megablend.arrays import Int64s, running_totals
from megablend.formats.parquet.decoding.headers import NO_DICTIONARY
from megablend.formats.parquet.indexing.count import PAGE_DTYPE, Pages
from megablend.formats.parquet.metadata.column_chunk import Chunks
from megablend.formats.parquet.metadata.schema import Column
from megablend.formats.parquet.metadata.source import FileBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PageScanContext:
    """Parameters for finding the pages of a column."""

    source: FileBytes
    column: Column
    limit: int
    """First byte of the footer: pages end before it."""
    documents: bool
    """Whether the rows of each page, and the documents that end in it, must be exact, even if that
    requires reading levels."""
    in_flight: int
    """Number of threads that read and decompress in parallel."""

    def error_context(self, chunks: Chunks) -> AbstractContextManager[None]:
        """Convert errors about a chunk into errors that name the place of the chunk in the file;
        see `FileBytes.error_context_of_items`."""
        return self.source.error_context_of_items(
            chunks["start"], chunks["row_group"], "the column chunk"
        )


@dataclass(frozen=True, slots=True)
class ChunkPages:
    """The data pages of chunks."""

    first_page: Int64s
    """Number of each chunk's first page: int64 [num_chunks + 1]."""
    pages: Pages
    """The data pages, chunk by chunk: PAGE_DTYPE [num_pages]."""
    dictionaries: Int64s
    """Offset and stored size of each chunk's dictionary page: int64 [num_chunks, 2]; NO_DICTIONARY
    if it has none."""
    scanned_bytes: int
    """Number of bytes of pages that were read for counting."""
    note: str | None = None
    """A warning about chunks whose metadata is wrong, but was not needed."""


def join_parts(num_chunks: int, parts: Sequence[tuple[Int64s, ChunkPages]]) -> ChunkPages:
    """Join the pages of parts of the chunks.

    Args:
        parts: for each part the numbers of its chunks, int64 [n], and their pages. A chunk that is
            in no part has no pages.
    """
    if len(parts) == 1:
        numbers, pages_of_part = parts[0]
        if np.array_equal(numbers, np.arange(num_chunks)):
            return pages_of_part
    counts = np.zeros(num_chunks, np.int64)
    dictionaries = np.full((num_chunks, 2), NO_DICTIONARY)
    for chunks, part in parts:
        counts[chunks] = np.diff(part.first_page)
        dictionaries[chunks] = part.dictionaries
    first_page = running_totals(counts)
    pages = np.zeros(first_page[-1], PAGE_DTYPE)
    for chunks, part in parts:
        # For each chunk: the number of a page among all pages minus its number in the part
        shifts = first_page[chunks] - part.first_page[:-1]
        new_numbers = np.arange(len(part.pages)) + np.repeat(shifts, counts[chunks])
        pages[new_numbers] = part.pages
    return ChunkPages(first_page, pages, dictionaries, sum(part.scanned_bytes for _, part in parts))


def without_empty(found: ChunkPages) -> ChunkPages:
    """Remove pages that have neither rows nor tokens."""
    is_kept = (found.pages["rows"] != 0) | (found.pages["tokens"] > 0)
    if is_kept.all():
        return found
    kept = np.flatnonzero(is_kept)
    first_page = np.searchsorted(kept, found.first_page).astype(np.int64)
    return replace(found, first_page=first_page, pages=found.pages[kept])
