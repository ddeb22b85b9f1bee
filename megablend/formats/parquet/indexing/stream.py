"""Column chunks without a page index over a network: their bytes are streamed once, and pages are
found and counted in memory.

On a local disk headers are read one by one, and most of the bytes between them are never read. Over
a network each of these reads would wait for the one before it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megablend.formats.parquet.indexing.chunk_pages import ChunkPages, PageScanContext, join_parts
from megablend.formats.parquet.metadata.column_chunk import Chunks
from megablend.storage.prefetched import stream_portions
from megablend.storage.ranges import portions

PORTION_BYTES = 32 << 20
"""About so many bytes of chunks are streamed together, or one larger chunk."""


def count_streamed(
    search: PageScanContext, chunks: Chunks, count: Callable[[PageScanContext, Chunks], ChunkPages]
) -> ChunkPages:
    """Count the pages of chunks, portion by portion, with the bytes of each in memory.

    Args:
        count: counts the pages of some chunks.

    Raises: as `count` does.
    """
    if not search.source.is_prefetched:
        return count(search, chunks)
    sizes = np.minimum(chunks["stored_bytes"], search.limit - chunks["start"])
    order = np.argsort(chunks["start"], kind="stable")
    numbers = [order[part] for part in portions(sizes[order], PORTION_BYTES)]
    ranges = [(chunks["start"][each], sizes[each]) for each in numbers]
    streamed = stream_portions(search.source.storage, search.source.path, ranges)
    parts = [(numbers[i], count(search, chunks[numbers[i]])) for i in streamed]
    return join_parts(len(chunks), parts)
