"""Indexing large files in parts, so that several ranks can index one file together, and progress is reported meanwhile.

A part consists of the chunks that begin in an equal share of the file's bytes. The number of parts depends only on the size of
the file, so the next build can reuse the parts of a killed one, with any number of ranks. The joined parts equal the result of
indexing the whole file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from megablend.formats.base import FileIndex

PART_BYTES = 512 << 20
"""Files smaller than two of these are indexed as a whole: each part has to read the footer."""
MAX_PARTS = 256


def num_parts(size: int) -> int:
    """Number of parts in which a file of `size` bytes is indexed, if its format supports parts."""
    return min(MAX_PARTS, max(1, size // PART_BYTES))


def part_span(size: int, part: int, count: int) -> tuple[int, int]:
    """Bytes [start, stop) of part number `part` of `count`."""
    return size * part // count, size * (part + 1) // count


def join(parts: Sequence[FileIndex]) -> FileIndex:
    """Join the indexes of all parts of a file (with the same structure), in the order of the file's chunks."""
    chunks = np.concatenate([part.chunks for part in parts])
    firsts = np.cumsum([0, *(len(part.chunks) for part in parts[:-1])])
    blocks = np.concatenate([part.blocks for part in parts])
    chunk = np.concatenate([part.blocks["chunk"] + first for part, first in zip(parts, firsts, strict=True)])
    by_row_group = np.argsort(chunks["row_group"], kind="stable")
    place = np.empty(len(chunks), np.int64)
    place[by_row_group] = np.arange(len(chunks))
    in_file_order = np.argsort(place[chunk], kind="stable")
    chunks, blocks = chunks[by_row_group], blocks[in_file_order]
    blocks["chunk"] = place[chunk][in_file_order]
    if (blocks["rows"] < 0).any():  # counted only in some parts
        blocks["rows"] = blocks["ends"] = -1
        blocks["flags"] = 0
    blocks["first_token"] = _before(blocks["tokens"])
    tokens = np.zeros(len(chunks), np.int64)
    np.add.at(tokens, blocks["chunk"], blocks["tokens"])
    chunks["first_token"] = _before(tokens)
    return FileIndex(
        rows=sum(part.rows for part in parts),
        tokens=sum(part.tokens for part in parts),
        token_dtype=parts[0].token_dtype,
        chunks=chunks,
        blocks=blocks,
        structure=parts[0].structure,
        meta=parts[0].meta,
        scanned_bytes=sum(part.scanned_bytes for part in parts),
        column=parts[0].column,
        token_range=join_ranges(part.token_range for part in parts),
    )


def join_ranges(ranges: Iterable[tuple[int, int] | None]) -> tuple[int, int] | None:
    """The smallest and the largest token of all known ranges; None if none is known."""
    known = [each for each in ranges if each is not None]
    return (min(low for low, _ in known), max(high for _, high in known)) if known else None


def _before(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    before: npt.NDArray[np.int64] = np.cumsum(counts) - counts
    return before
