"""Documents that contract suites write to files, and functions that read them back."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

from megablend.formats.base import (
    ENDS_AT_DOCUMENT_END,
    HAS_EARLIER_TOKENS,
    STARTS_MID_DOCUMENT,
    Array,
    BlockReader,
    FileIndex,
)
from megablend.formats.fetch import read_blocks
from megablend.storage.base import Storage

Documents: TypeAlias = Sequence[Sequence[int] | None]
"""The tokens of each document. None is a null document, which formats without null values store as
an empty one."""


def _draw_mixed() -> Documents:
    """Draw documents of many lengths, some of them empty or null."""
    rng = random.Random(7)
    return [
        None
        if i % 17 == 3
        else [rng.randrange(-9, 50_000) for _ in range(rng.choice([0, 1, 2, 5, 30, 90]))]
        for i in range(120)
    ]


DOCUMENTS: dict[str, Documents] = {
    "mixed": _draw_mixed(),
    "one": [[5]],
    "long": [list(range(3000)), [], list(range(500))],
    "empty": [[], None, []],
    "empty first and last": [[], [], [1, 2, 3], [], None],
    "none": [],
}
"""The documents that every format is tested with, by name."""
MIXED = DOCUMENTS["mixed"]
"""Documents of many lengths, some of them empty or null."""


def list_pieces(
    reader: BlockReader, blocks: Array, chunks: Array, storage: Storage
) -> list[list[list[int]]]:
    """Read blocks, and return the tokens of each block's pieces of documents."""
    return [
        [piece.tolist() for piece in np.split(block.tokens, block.offsets[1:-1])]
        if len(block.offsets) > 1
        else []
        for block in read_blocks(reader, blocks, chunks, storage)
    ]


def join_pieces(index: FileIndex, pieces: list[list[list[int]]]) -> Iterator[list[int]]:
    """Yield the documents of a file, joined from the pieces of all its blocks. Checks that the rows
    of each block agree with its flags."""
    document: list[int] | None = None
    for block, parts in zip(index.blocks, pieces, strict=True):
        assert bool(block["flags"] & STARTS_MID_DOCUMENT) == (document is not None)
        assert bool(block["flags"] & HAS_EARLIER_TOKENS) == bool(document)
        assert len(parts) == block["rows"] + (document is not None)
        for i, part in enumerate(parts):
            document = (document or []) + part
            if i + 1 < len(parts) or block["flags"] & ENDS_AT_DOCUMENT_END:
                yield document
                document = None
    assert document is None
