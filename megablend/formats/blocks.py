"""Functions on block and chunk tables: they make the chunk table of a file without chunks, join
tables and token ranges, estimate sizes, and convert blocks to the form that readers take."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from megablend.formats.base import CHUNK_DTYPE, PLACED_BLOCK_DTYPE, Array

_TOKEN_BYTES = 4
"""Assumed bytes per token in estimates of memory; tokens of 8 bytes need twice as much."""


def single_chunk() -> Array:
    """Make the chunk table of a file without chunks: one chunk that is the whole file (CHUNK_DTYPE
    [1])."""
    chunks = np.zeros(1, CHUNK_DTYPE)
    chunks["dictionary_offset"] = -1
    return chunks


def join_tables(tables: Iterable[Array], columns: np.dtype[np.void]) -> Array:
    """Concatenate tables that have these columns. The bytes of the tables are joined, since numpy
    would concatenate column by column, which is slower."""
    return np.frombuffer(
        bytearray().join(np.ascontiguousarray(table, columns).data for table in tables), columns
    )


def join_token_ranges(ranges: Iterable[tuple[int, int] | None]) -> tuple[int, int] | None:
    """Return the smallest and the largest token of all known ranges, or None if none is known."""
    known = [known_range for known_range in ranges if known_range is not None]
    if not known:
        return None
    return min(low for low, _ in known), max(high for _, high in known)


def decoded_sizes(blocks: Array) -> npt.NDArray[np.int64]:
    """Estimate the memory of each block while it is decoded, in bytes, int64 [n]: the memory of its
    tokens or of its decompressed page, whichever is larger.

    The two sizes differ widely: a dictionary-encoded page may be a thousand times smaller than its
        tokens.
    """
    sizes: npt.NDArray[np.int64] = np.maximum(
        blocks["decoded_bytes"].astype(np.int64), blocks["tokens"] * _TOKEN_BYTES
    )
    return sizes


def place_blocks(blocks: Array) -> Array:
    """Convert a file's entire block table, BLOCK_DTYPE [n], to the form that readers use:
    PLACED_BLOCK_DTYPE [n]."""
    placed = np.empty(len(blocks), PLACED_BLOCK_DTYPE)
    for name in blocks.dtype.names or ():
        placed[name] = blocks[name]
    known = len(blocks) > 0 and bool((blocks["rows"] >= 0).all())
    placed["first_row"] = np.cumsum(blocks["rows"]) - blocks["rows"] if known else -1
    return placed
