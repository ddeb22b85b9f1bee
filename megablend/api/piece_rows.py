"""Rows of their files in which pieces of samples begin, where the index has a table of the source's documents."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.index.document_table import PartDocuments, table_bytes
from megablend.order.base import Spans, by_value
from megablend.plan.locator import Reading
from megablend.plan.run import Run

UNKNOWN = -1


def find_rows(run: Run, sources: npt.NDArray[np.int32], spans: Spans) -> Int64s:
    """The row of its file in which each span's first token is; UNKNOWN where no table has the source's documents: int64 [m].

    Args:
        sources: of each span, int32 [m].

    Raises: CacheError where a table is damaged.
    """
    rows = np.full(len(spans.blocks), UNKNOWN)
    names = run.data.index_names
    for source, positions in by_value(sources):
        readings = run.locator.readings(source)
        firsts = np.array([each.first_block for each in readings])
        order = np.argsort(firsts, kind="stable")  # an earlier part of the run may read a later snapshot
        owners = order[np.searchsorted(firsts[order], spans.blocks[positions], side="right") - 1]
        for number, here in by_value(owners):
            rows[positions[here]] = _find_in(readings[number], names[source], spans, positions[here])
    return rows


def _find_in(reading: Reading, name: str, spans: Spans, positions: Int64s) -> Int64s:
    """The rows of spans at `positions` int64 [n], which are of blocks of this reading; UNKNOWN without a table: int64 [n]."""
    blocks, numbers = reading.blocks, spans.blocks[positions] - reading.first_block
    snapshot = blocks.snapshot
    source = next(number for number, entry in enumerate(snapshot.sources) if entry.name == name)
    is_counted = snapshot.sources[source].documents  # a table may be of another snapshot of the same files
    if not is_counted or table_bytes(snapshot, source) is None:
        return np.full(len(positions), UNKNOWN)
    first_row = snapshot.running("rows_before", [snapshot.sources[source].blocks.start])
    local = blocks.local_blocks(numbers)
    stored = blocks.before(local) + spans.starts[positions] - blocks.clips(local)
    listed = blocks.documents
    documents = listed.index_blocks(_find_documents(listed, stored))
    first_blocks = np.array([snapshot.file(file).first_block for file in snapshot.file_of(numbers).tolist()], np.int64)
    rows: Int64s = documents - (snapshot.running("rows_before", first_blocks) - first_row)
    return rows


def _find_documents(documents: PartDocuments, stored: Int64s) -> Int64s:
    """The document of each stored token, int64 [n]: the last that begins at or before it."""
    low, high = np.zeros(len(stored), np.int64), np.full(len(stored), documents.num_blocks)
    while (high - low > 1).any():
        middle = (low + high) // 2
        begins_before = documents.before(middle) <= stored
        low, high = np.where(begins_before, middle, low), np.where(begins_before, high, middle)
    return low
