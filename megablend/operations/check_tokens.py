"""Find the smallest and the largest token id of a file, and ids that are out of range.

`build` refuses files that have ids out of range according to their stored statistics. Such a file
is read, so that the error can name the row; if the statistics turn out to be wrong, they are
ignored. Files without statistics are not checked by `build`; `megablend check --data` reads
everything.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megablend.config import Config
from megablend.errors import ConfigError, DataError
from megablend.index.blocks.block_store import BlockStore
from megablend.index.read.snapshot import Snapshot
from megablend.index.tables.file_table import FileEntry
from megablend.index.tables.source_entry import SourceEntry
from megablend.operations.token_rows import find_row
from megablend.operations.vocabulary import vocab_sizes
from megablend.run.open_store import open_block_store
from megablend.storage.base import Storage

MAX_IDS = 1 << 32
"""Vocabulary size if no `vocab_size` is given."""
BATCH_BYTES = 16 << 20
"""Number of bytes of tokens that are decoded together. Each thread has one such batch in memory."""


class FileTokens(NamedTuple):
    """The token ids of a file."""

    smallest: int | None
    """Smallest id; None if no token was read."""
    largest: int | None
    """Largest id; None if no token was read."""
    problem: DataError | None
    """The error about the first token out of range, or the error with which reading failed; None if
    there was no error."""
    is_read: bool
    """Whether the whole file could be read."""


def check_file(
    store: BlockStore, entry: SourceEntry, number: int, vocab_size: int | None
) -> FileTokens:
    """Read all tokens of file `number` of the index, and check that they are less than
    `vocab_size` (MAX_IDS if None)."""
    snapshot = store.snapshot
    file = snapshot.files.entry(number)
    path = snapshot.path(number, store.roots)
    first_token = int(snapshot.tokens_before[file.first_block])
    limit = vocab_size or MAX_IDS
    lows = list[int]()
    highs = list[int]()
    num_wrong = 0
    problem: DataError | None = None
    is_read = True
    try:
        for ids in _batches(snapshot, file):
            tokens = store.read_blocks(ids).tokens
            if not len(tokens):
                continue
            lows.append(int(tokens.min()))
            highs.append(int(tokens.max()))
            if lows[-1] < 0 or highs[-1] >= limit:
                wrong = np.flatnonzero((tokens < 0) | (tokens >= limit))
                if not num_wrong:
                    first_of_batch = int(snapshot.tokens_before[ids[0]]) - first_token
                    first_wrong = first_of_batch + int(wrong[0])
                    wrong_id = int(tokens[wrong[0]])
                num_wrong += len(wrong)
        if num_wrong:
            where = _describe_place(path, entry, first_wrong, file.tokens, store.storage)
            expected = f"0 to {limit - 1}" + (f" (vocab_size {vocab_size})" if vocab_size else "")
            problem = DataError(
                path,
                f"{where}: token {wrong_id}, expected {expected}; {num_wrong:,} tokens of the file are out of range: rewrite "
                "the file, or set `column:` if this is not the token column",
            )
    except DataError as error:
        problem = error
        is_read = False
    return FileTokens(min(lows, default=None), max(highs, default=None), problem, is_read=is_read)


def refuse_known_outliers(config: Config, snapshot: Snapshot, storage: Storage) -> None:
    """Refuse an index whose files have tokens outside the vocabulary, according to their
    statistics.

    Raises: DataError, which names the file, row and value of the first such token; ConfigError if a
        tokenizer cannot be read.
    """
    lows, highs = snapshot.token_ranges.T
    is_known = lows <= highs
    if not is_known.any():
        return
    sizes = vocab_sizes(config)
    store = None
    for entry in snapshot.sources:
        if entry.name not in sizes:  # an extra column, which may have any numbers
            continue
        limit = sizes[entry.name] or MAX_IDS
        files = np.arange(entry.files.start, entry.files.stop)
        is_outside = is_known[files] & ((lows[files] < 0) | (highs[files] >= limit))
        for number in files[is_outside].tolist():
            store = store or open_block_store(config, snapshot, storage, number=0)
            problem = check_file(store, entry, number, sizes[entry.name]).problem
            if problem is not None:
                raise problem


def _batches(snapshot: Snapshot, file: FileEntry) -> list[npt.NDArray[np.int64]]:
    """Return the numbers of a file's blocks in order, divided into batches of about BATCH_BYTES of
    tokens.

    Returns: arrays of int64 [n].
    """
    if not file.num_blocks:
        return []
    blocks = np.arange(file.first_block, file.first_block + file.num_blocks)
    tokens_before = snapshot.tokens_before[blocks]
    token_bytes = np.dtype(file.opened.token_dtype).itemsize
    batch = (tokens_before - tokens_before[0]) * token_bytes // BATCH_BYTES
    return np.split(blocks, np.flatnonzero(np.diff(batch)) + 1)


def _describe_place(
    path: str, entry: SourceEntry, token_number: int, num_tokens: int, storage: Storage
) -> str:
    """Return a description of the position of a token in a file, for messages: its row, or its
    number in the file if the row cannot be found."""
    try:
        row, row_group = find_row(path, entry, token_number, num_tokens, storage)
    except ConfigError:
        # The index is from an earlier release, which chose a column without storing its name; this
        # release would need the name
        return f"the file's token number {token_number:,}"
    return f"row {row}" + (f" (row group {row_group})" if entry.kind.has_row_groups else "")
