"""Lengths of documents, counted block by block: a document's pieces in several blocks are put together."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megablend.formats.base import CONTINUES, Array
from megablend.index.cache import Generation
from megablend.index.store import BlockStore

_BATCH_BLOCKS = 64


def share_of(generation: Generation, rank: int, size: int) -> tuple[int, int]:
    """A rank's blocks, first and end: about equally many tokens, cut where a document begins."""
    tokens = generation.tokens_before
    num_blocks = len(tokens) - 1
    first, end = (int(np.searchsorted(tokens, int(tokens[-1]) * part // size)) for part in (rank, rank + 1))
    last = num_blocks if rank + 1 == size else _next_cut(generation, end, num_blocks)
    return (_next_cut(generation, first, num_blocks) if rank else 0), last


def count_documents(store: BlockStore, first: int, end: int) -> Iterator[tuple[int, Array]]:
    """Lengths of the documents that begin in blocks first:end, the first of which continues none, a batch at a time.

    Args:
        store: of a generation whose documents were counted.

    Yields: number of the batch's first document, and int64 [n], tokens, end-of-document tokens included.
    Raises: as BlockStore.read does.
    """
    rows = store.generation.rows_before
    while first < end:
        stop = _next_cut(store.generation, min(first + _BATCH_BLOCKS, end), end)
        ids = np.arange(first, stop)
        lengths = np.zeros(int(rows[stop] - rows[first]), np.int64)
        continues = store.generation.blocks(ids)["flags"] & CONTINUES
        for number, block, continued in zip(ids, store.read(ids), continues, strict=True):
            begin = int(rows[number] - rows[first]) - bool(continued)
            lengths[begin : begin + len(block.offsets) - 1] += np.diff(block.offsets)
        yield int(rows[first]), lengths
        first = stop


def _next_cut(generation: Generation, block: int, end: int) -> int:
    """The first block from `block` on that continues no document; `end` where there is none before it."""
    while block < end and generation.blocks(np.array([block]))["flags"][0] & CONTINUES:
        block += 1
    return block
