"""Counting column chunks without a page index over a network: their bytes are streamed once, and
pages are found and counted in memory.

On a local disk, headers are read one by one, and most of the bytes between them are never read.
Over a network, each of these reads would wait for the previous one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megablend.formats.parquet.indexing.chunk_pages import ChunkPages, PageScanContext, join_parts
from megablend.formats.parquet.metadata.column_chunk import Chunks
from megablend.storage.prefetched import stream_portions
from megablend.storage.ranges import portions

PORTION_BYTES = 32 << 20
"""Approximate bytes of the chunks that are streamed together; a larger chunk is streamed by
itself."""


def count_streamed(
    search: PageScanContext, chunks: Chunks, count: Callable[[PageScanContext, Chunks], ChunkPages]
) -> ChunkPages:
    """Count the pages of chunks. If reads are prefetched, count portion by portion, with the bytes
    of a portion in memory.

    Args:
        count: counts the pages of some of the chunks.

    Raises: the same errors as `count`.
    """
    if not search.source.is_prefetched:
        return count(search, chunks)
    sizes = np.minimum(chunks["stored_bytes"], search.limit - chunks["start"])
    order = np.argsort(chunks["start"], kind="stable")
    portion_chunks = [order[part] for part in portions(sizes[order], PORTION_BYTES)]
    ranges = [(chunks["start"][numbers], sizes[numbers]) for numbers in portion_chunks]
    parts = []
    for i in stream_portions(search.source.storage, search.source.path, ranges):
        numbers = portion_chunks[i]
        parts.append((numbers, count(search, chunks[numbers])))
    return join_parts(len(chunks), parts)
