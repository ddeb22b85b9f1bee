"""Rows of their files in which pieces of samples begin, where the index has a table of the source's documents."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.index.document_table import PartDocuments, table_bytes
from megablend.order.base import Spans, by_value
from megablend.plan.run import Run

Int64s = npt.NDArray[np.int64]
UNKNOWN = -1


def find_rows(run: Run, sources: npt.NDArray[np.int32], spans: Spans) -> Int64s:
    """The row of its file in which each span's first token is; UNKNOWN where no table has the source's documents: int64 [m].

    Args:
        sources: of each span, int32 [m].

    Raises: CacheError where a table is damaged.
    """
    rows = np.full(len(spans.blocks), UNKNOWN)
    generation, numbers = run.store.generation, {entry.name: n for n, entry in enumerate(run.store.generation.sources)}
    names = list(run.config.sources_of(run.split))
    for source, positions in by_value(sources):
        number = numbers[names[source]]
        if table_bytes(generation, number) is None:
            continue
        blocks, first_row = (
            run.blocks(source),
            generation.running("rows_before", [generation.sources[number].blocks.start]),
        )
        local = blocks.local_blocks(spans.blocks[positions])
        stored = blocks.before(local) + spans.starts[positions] - blocks.clips(local)
        listed = blocks.documents
        documents = listed.table_rows(_find_documents(listed, stored))
        files = generation.file_of(spans.blocks[positions])
        first_blocks = np.array([generation.file(file).first_block for file in files.tolist()], np.int64)
        rows[positions] = documents - (generation.running("rows_before", first_blocks) - first_row)
    return rows


def _find_documents(documents: PartDocuments, stored: Int64s) -> Int64s:
    """The document of each stored token, int64 [n]: the last that begins at or before it."""
    low, high = np.zeros(len(stored), np.int64), np.full(len(stored), documents.num_blocks)
    while (high - low > 1).any():
        middle = (low + high) // 2
        begins_before = documents.before(middle) <= stored
        low, high = np.where(begins_before, middle, low), np.where(begins_before, high, middle)
    return low
