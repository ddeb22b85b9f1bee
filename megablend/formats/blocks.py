"""Block tables: for formats without column chunks, and as passed to readers."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from megablend.formats.base import CHUNK_DTYPE, PLACED_BLOCK_DTYPE, Array

_TOKEN_BYTES = 4
"""Of nearly all tokens; where they have 8, the memory is at most twice as much."""


def single_chunk() -> Array:
    """CHUNK_DTYPE [1]: the whole file as one chunk."""
    chunks = np.zeros(1, CHUNK_DTYPE)
    chunks["dictionary_offset"] = -1
    return chunks


def join_tables(tables: Iterable[Array], columns: np.dtype[np.void]) -> Array:
    """Concatenate tables with these columns. Joins bytes,
    since numpy's own concatenation processes each column."""
    return np.frombuffer(
        bytearray().join(np.ascontiguousarray(table, columns).data for table in tables), columns
    )


def decoded_sizes(blocks: Array) -> npt.NDArray[np.int64]:
    """The least memory of blocks while they are decoded, in bytes: int64 [n], of tokens or of
    pages, whichever are larger.

    A page of numbers of dictionary entries may be a thousandth of its tokens.
    """
    found: npt.NDArray[np.int64] = np.maximum(
        blocks["decoded_bytes"].astype(np.int64), blocks["tokens"] * _TOKEN_BYTES
    )
    return found


def place_blocks(blocks: Array) -> Array:
    """Convert a file's entire block table, BLOCK_DTYPE [n], to what readers take:
    PLACED_BLOCK_DTYPE [n]."""
    placed = np.empty(len(blocks), PLACED_BLOCK_DTYPE)
    for name in blocks.dtype.names or ():
        placed[name] = blocks[name]
    known = len(blocks) > 0 and bool((blocks["rows"] >= 0).all())
    placed["first_row"] = np.cumsum(blocks["rows"]) - blocks["rows"] if known else -1
    return placed
