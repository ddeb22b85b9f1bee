"""Block tables: of the formats that have no column chunks, and as readers take them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from megablend.formats.base import CHUNK_DTYPE, PLACED_BLOCK_DTYPE, Array


def single_chunk() -> Array:
    """CHUNK_DTYPE [1]: the whole file as one chunk."""
    chunks = np.zeros(1, CHUNK_DTYPE)
    chunks["dictionary_offset"] = -1
    return chunks


def join_tables(tables: Iterable[Array], columns: np.dtype[np.void]) -> Array:
    """Tables of these columns, one after the other. Joins bytes: numpy's own way looks at all columns of each of them."""
    return np.frombuffer(bytearray().join(np.ascontiguousarray(table, columns).data for table in tables), columns)


def place_blocks(blocks: Array) -> Array:
    """A file's whole block table, BLOCK_DTYPE [n], as readers take it: PLACED_BLOCK_DTYPE [n]."""
    placed = np.empty(len(blocks), PLACED_BLOCK_DTYPE)
    for name in blocks.dtype.names or ():
        placed[name] = blocks[name]
    known = len(blocks) > 0 and bool((blocks["rows"] >= 0).all())
    placed["first_row"] = np.cumsum(blocks["rows"]) - blocks["rows"] if known else -1
    return placed
