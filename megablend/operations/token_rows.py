"""Find the rows of a file that contain given tokens. The file is indexed once more, since an index
does not store where rows begin."""

from __future__ import annotations

import dataclasses

import numpy as np

from megablend.arrays import Int64s
from megablend.errors import CHANGED_REMEDY, ChangedFileError
from megablend.formats.base import STARTS_MID_DOCUMENT, FileIndex, OpenedFile
from megablend.formats.blocks import place_blocks
from megablend.formats.fetch import read_pieces
from megablend.index.tables.source_entry import SourceEntry
from megablend.storage.base import Storage


def find_row(
    path: str, entry: SourceEntry, token: int, num_tokens: int, storage: Storage
) -> tuple[int, int]:
    """Return the row of a file that contains token number `token`, and the row's row group.

    Args:
        num_tokens: the number of tokens that the file had when it was indexed.

    Raises: the errors of `Format.index`; ChangedFileError if the file is not the one that was
    indexed.
    """
    index = _index_again(path, entry, num_tokens, storage)
    first_tokens = index.blocks["first_token"]
    block = int(np.searchsorted(first_tokens, token, side="right")) - 1
    first_row, offsets = _read_rows(path, entry, index, block, storage)
    token_in_block = token - int(first_tokens[block])
    row_in_block = int(np.searchsorted(offsets, token_in_block, side="right")) - 1
    row_group = int(index.chunks["row_group"][index.blocks["chunk"][block]])
    return first_row + row_in_block, row_group


def read_rows(
    path: str, entry: SourceEntry, block: int, num_tokens: int, storage: Storage
) -> tuple[int, Int64s]:
    """Find the positions at which the rows of a block begin.

    Args:
        block: number of the block in the file.
    Returns: the number of the first row of the file that has tokens in the block; and the positions
        in the block at which this row and the following ones begin, followed by the block's number
        of tokens, as int64 [n + 1].
    Raises: see `find_row`.
    """
    index = _index_again(path, entry, num_tokens, storage)
    return _read_rows(path, entry, index, block, storage)


def _index_again(path: str, entry: SourceEntry, num_tokens: int, storage: Storage) -> FileIndex:
    """Index a file again, counting its documents. Raises: see `find_row`."""
    read = dataclasses.replace(entry.read, column=entry.column_taken, count_documents=True)
    index = entry.kind.index(path, read, storage=storage)
    if index.tokens != num_tokens:
        raise ChangedFileError(
            path, f"has {index.tokens:,} tokens, but {num_tokens:,} were indexed; {CHANGED_REMEDY}"
        )
    return index


def _read_rows(
    path: str, entry: SourceEntry, index: FileIndex, block: int, storage: Storage
) -> tuple[int, Int64s]:
    """Find the positions at which the rows of a block begin, given the index of the file; see
    `read_rows`."""
    first_row = int(index.blocks["rows"][:block].sum())
    if index.blocks["flags"][block] & STARTS_MID_DOCUMENT:
        first_row -= 1  # the row began in an earlier block, which counted it
    opened = OpenedFile(
        size=storage.stat(path).size,
        token_dtype=index.token_dtype,
        structure=index.structure,
        meta=index.meta,
    )
    reader = entry.kind.open(path, entry.column_taken, opened, storage=storage)
    (offsets,), _ = read_pieces(
        reader, place_blocks(index.blocks)[block : block + 1], index.chunks, storage
    )
    return first_row, offsets
