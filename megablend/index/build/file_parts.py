"""Divide a large file into parts that are indexed separately, and join the indexes of the parts.

The file's bytes are divided equally, and each part consists of the chunks that begin in its share.
The number of parts depends only on the size of the file, so if a build is killed, the next build
can reuse its parts with any number of ranks. The joined parts equal the result of indexing the
whole file.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megablend.formats.base import FileIndex
from megablend.formats.blocks import join_token_ranges

PART_BYTES = 512 << 20
"""Minimum size of a part in bytes. It is large, since indexing a part includes reading the
footer."""
MAX_PARTS = 256


def num_parts(size: int) -> int:
    """Return the number of parts into which a file of `size` bytes is divided, if its format allows
    that."""
    return min(MAX_PARTS, max(1, size // PART_BYTES))


def part_span(size: int, part: int, count: int) -> tuple[int, int]:
    """Return the range of bytes [start, stop) of one of `count` parts of a file."""
    return size * part // count, size * (part + 1) // count


def join(parts: Sequence[FileIndex]) -> FileIndex:
    """Join the indexes of all parts of a file into an index of the whole file. Its chunks are in
    the order of row groups. The parts must have the same structure."""
    chunks = np.concatenate([part.chunks for part in parts])
    first_chunks = np.cumsum([0, *(len(part.chunks) for part in parts[:-1])])
    blocks = np.concatenate([part.blocks for part in parts])
    # The chunk of each block, first by its number among `chunks`, then by its number in the joined
    # index
    unsorted_chunk = np.concatenate(
        [part.blocks["chunk"] + first for part, first in zip(parts, first_chunks, strict=True)]
    )
    by_row_group = np.argsort(chunks["row_group"], kind="stable")
    sorted_number = np.empty(len(chunks), np.int64)
    sorted_number[by_row_group] = np.arange(len(chunks))
    chunk = sorted_number[unsorted_chunk]
    in_file_order = np.argsort(chunk, kind="stable")
    chunks = chunks[by_row_group]
    blocks = blocks[in_file_order]
    blocks["chunk"] = chunk[in_file_order]
    # Some parts may have counted documents, and others not
    if (blocks["rows"] < 0).any():
        blocks["rows"] = blocks["ends"] = -1
        blocks["flags"] = 0
    blocks["first_token"] = _sums_before(blocks["tokens"])
    tokens = np.zeros(len(chunks), np.int64)
    np.add.at(tokens, blocks["chunk"], blocks["tokens"])
    chunks["first_token"] = _sums_before(tokens)
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
        token_range=join_token_ranges(part.token_range for part in parts),
    )


def _sums_before(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    sums: npt.NDArray[np.int64] = np.cumsum(counts) - counts
    return sums
