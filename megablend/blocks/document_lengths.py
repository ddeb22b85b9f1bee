"""Lengths of documents, counted block by block; the pieces of a document in several blocks are added up."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megablend.blocks.block_store import BlockStore
from megablend.formats.base import STARTS_MID_DOCUMENT, Array
from megablend.index.snapshot import Snapshot

_BATCH_BLOCKS = 64


def count_documents(store: BlockStore, first: int, end: int) -> Iterator[tuple[int, Array, int]]:
    """Lengths of the documents that begin in blocks first:end, a batch at a time.

    The first block must begin with a document; tokens of a document beyond `end` are not counted.

    Args:
        store: of an index whose documents were counted.

    Yields: number of the batch's first document; int64 [n], tokens, end-of-document ones not included; data bytes read.
    Raises: as BlockStore.read does.
    """
    while first < end:
        stop = next_cut(store.snapshot, min(first + _BATCH_BLOCKS, end), end)
        ids = np.arange(first, stop)
        rows = store.snapshot.running("rows_before", np.append(ids, stop))
        lengths = np.zeros(int(rows[-1] - rows[0]), np.int64)
        continues = store.snapshot.blocks(ids)["flags"] & STARTS_MID_DOCUMENT
        offsets, scanned_bytes = store.pieces(ids)
        for row, pieces, continued in zip(rows[:-1].tolist(), offsets, continues, strict=True):
            begin = row - int(rows[0]) - bool(continued)
            lengths[begin : begin + len(pieces) - 1] += np.diff(pieces)
        yield int(rows[0]), lengths, scanned_bytes
        first = stop


def next_cut(snapshot: Snapshot, block: int, end: int) -> int:
    """The first block from `block` on that begins with a new document; `end` if there is none before it."""
    while block < end and snapshot.blocks(np.array([block]))["flags"][0] & STARTS_MID_DOCUMENT:
        block += 1
    return block
