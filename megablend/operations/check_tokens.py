"""Token ids: how many there are, as far as the config says, and which ids of a file are out of
range.

`build` refuses files whose stored statistics are out of range: such a file is read, so that the
error names the row; statistics that turn out to be wrong are ignored. Files without statistics are
not checked; `megablend check --data` reads everything.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megablend.config import Config
from megablend.config.tokenizer_file import find_tokenizer
from megablend.errors import CHANGED_REMEDY, ChangedFileError, ConfigError, DataError
from megablend.formats.base import STARTS_MID_DOCUMENT, FileIndex, OpenedFile
from megablend.formats.blocks import place_blocks
from megablend.formats.fetch import read_pieces
from megablend.index.blocks.block_store import BlockStore
from megablend.index.read.snapshot import Snapshot
from megablend.index.tables.file_table import FileEntry
from megablend.index.tables.source_entry import SourceEntry
from megablend.run.open_store import open_block_store
from megablend.storage.base import Storage

MAX_IDS = 1 << 32
"""Number of token ids if no `vocab_size` is given."""
BATCH_BYTES = 16 << 20
"""Bytes of tokens that are decoded together; each thread has one batch in memory."""


class FileTokens(NamedTuple):
    """The token ids of a file."""

    smallest: int | None
    """Smallest id; None if no token was read."""
    largest: int | None
    """Largest id; None if no token was read."""
    problem: DataError | None
    """The first token out of range, or why the file cannot be read."""
    is_read: bool
    """Whether the whole file could be read."""


def check_file(
    store: BlockStore, entry: SourceEntry, number: int, vocab_size: int | None
) -> FileTokens:
    """Read all tokens of file `number` of the index, and check that they are less than
    `vocab_size` (MAX_IDS if None)."""
    snapshot = store.snapshot
    file = snapshot.file(number)
    path = snapshot.path(number, store.roots)
    first_token = int(snapshot.tokens_before[file.first_block])
    limit = vocab_size or MAX_IDS
    first_wrong: tuple[int, int] | None = None  # its number in the file, and the token
    num_wrong = 0
    lowest = None
    highest = None
    try:
        for ids in _batches(snapshot, file):
            tokens = store.read_blocks(ids).tokens
            if not len(tokens):
                continue
            low = int(tokens.min())
            high = int(tokens.max())
            lowest = low if lowest is None else min(lowest, low)
            highest = high if highest is None else max(highest, high)
            if low < 0 or high >= limit:
                wrong = np.flatnonzero((tokens < 0) | (tokens >= limit))
                num_wrong += len(wrong)
                if first_wrong is None:
                    before = int(snapshot.tokens_before[ids[0]]) - first_token
                    first_wrong = before + int(wrong[0]), int(tokens[wrong[0]])
        problem = None
        if first_wrong is not None:
            token_number, token = first_wrong
            where = _describe_place(path, entry, token_number, file.tokens, store.storage)
            expected = f"0 to {limit - 1}" + (f" (vocab_size {vocab_size})" if vocab_size else "")
            problem = DataError(
                path,
                f"{where}: token {token}, expected {expected}; {num_wrong:,} tokens of the file are out of range: if this is the "
                "column of tokens, rewrite the file; if not, set `column:` to the one that is",
            )
        return FileTokens(lowest, highest, problem, is_read=True)
    except DataError as error:
        return FileTokens(lowest, highest, error, is_read=False)


def _batches(snapshot: Snapshot, file: FileEntry) -> list[npt.NDArray[np.int64]]:
    """The blocks of a file in order, in batches of about BATCH_BYTES of tokens: int64 [n] each."""
    ids = np.arange(file.first_block, file.first_block + file.num_blocks)
    width = np.dtype(file.opened.token_dtype).itemsize
    before = snapshot.tokens_before[file.first_block : file.first_block + file.num_blocks]
    batch = (before - (before[0] if len(before) else 0)) * width // BATCH_BYTES
    return [part for part in np.split(ids, np.flatnonzero(np.diff(batch)) + 1) if len(part)]


def _describe_place(
    path: str, entry: SourceEntry, token_number: int, num_tokens: int, storage: Storage
) -> str:
    """Where a token of a file is, in words: its row, or its number if the row cannot be found."""
    try:
        row, row_group = find_row(path, entry, token_number, num_tokens, storage)
        return f"row {row}" + (f" (row group {row_group})" if entry.kind.has_row_groups else "")
    # The index is of an earlier version, which chose a column that has to be named now, and did not
    # store its name
    except ConfigError:
        return f"the file's token number {token_number:,}"


def find_row(
    path: str, entry: SourceEntry, place: int, num_tokens: int, storage: Storage
) -> tuple[int, int]:
    """The row of a file, counted from 0, that contains its token number `place`, and the row's row
    group. The file is indexed once more.

    Raises: as `Format.index` does; ChangedFileError if the file is not the one that was indexed.
    """
    index = _index_again(path, entry, num_tokens, storage)
    block = int(np.searchsorted(index.blocks["first_token"], place, side="right")) - 1
    first_row, offsets = _read_rows(path, entry, index, block, storage)
    inside = place - int(index.blocks["first_token"][block])
    within = int(np.searchsorted(offsets, inside, side="right")) - 1
    row_group = int(index.chunks["row_group"][index.blocks["chunk"][block]])
    return first_row + within, row_group


def read_rows(
    path: str, entry: SourceEntry, block: int, num_tokens: int, storage: Storage
) -> tuple[int, npt.NDArray[np.int64]]:
    """The first row of a file that has tokens in block number `block`; and the token of the block
    at which each row that has some begins, followed by the number of tokens: int64 [n + 1].

    Raises: as `find_row`.
    """
    index = _index_again(path, entry, num_tokens, storage)
    return _read_rows(path, entry, index, block, storage)


def _index_again(path: str, entry: SourceEntry, num_tokens: int, storage: Storage) -> FileIndex:
    """Index a file with its documents. Raises: as `find_row`."""
    read = dataclasses.replace(entry.read, column=entry.column_taken, count_documents=True)
    index = entry.kind.index(path, read, storage=storage)
    if index.tokens != num_tokens:
        raise ChangedFileError(
            path, f"has {index.tokens:,} tokens, but {num_tokens:,} were indexed; {CHANGED_REMEDY}"
        )
    return index


def _read_rows(
    path: str, entry: SourceEntry, index: FileIndex, block: int, storage: Storage
) -> tuple[int, npt.NDArray[np.int64]]:
    """See `read_rows`."""
    rows_before = int(index.blocks["rows"][:block].sum()) - bool(
        index.blocks["flags"][block] & STARTS_MID_DOCUMENT
    )
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
    return rows_before, offsets


def vocab_sizes(config: Config) -> dict[str, int | None]:
    """The number of token ids of each source, by its name in the index; None if the config does not
    say.

    Raises: ConfigError if a tokenizer cannot be read, or an end-of-document token is not in its
        vocabulary.
    """
    size_of_tokenizer: dict[str, int] = {}
    sizes: dict[str, int | None] = {}
    for name, source in config.all_sources.items():
        size = source.vocab_size if source.vocab_size is not None else config.vocab_size
        if size is None and source.text is not None and config.tokenizer is not None:
            size = str(find_tokenizer(config.tokenizer))
        if isinstance(size, str):  # the path of a tokenizer
            if size not in size_of_tokenizer:
                size_of_tokenizer[size] = read_vocab_size(size)
            size = size_of_tokenizer[size]
        if size is not None and source.append_eod is not None and source.append_eod >= size:
            raise ConfigError(
                f"{source.place}: append_eod {source.append_eod} is not in a vocabulary of {size:,}; expected 0 to {size - 1}"
            )
        sizes[name] = size
    return sizes


def refuse_known_outliers(config: Config, snapshot: Snapshot, storage: Storage) -> None:
    """Refuse an index whose files have tokens outside the vocabulary, according to their
    statistics.

    Raises: DataError, which names file, row and token of the first; ConfigError if a tokenizer
        cannot be read.
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


def read_vocab_size(path: str) -> int:
    """The number of ids of a tokenizer: one more than its largest id, added tokens included.

    Args:
        path: a tokenizer.json as Hugging Face's tokenizers library writes it.

    Raises: ConfigError if it cannot be read, or is something else.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        ids = [
            *_model_ids(data["model"]["vocab"]),
            *(token["id"] for token in data.get("added_tokens") or ()),
        ]
        largest = max(ids)
        if not isinstance(largest, int) or largest < 0:
            raise TypeError(f"its largest id is {largest!r}")
        return largest + 1
    except OSError as error:
        raise ConfigError(
            f"vocab_size: {path}: cannot read the tokenizer: {error.strerror}"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"vocab_size: {path}: not a tokenizer.json ({type(error).__name__}: {error}); give the number of token ids instead"
        ) from error


def _model_ids(vocab: Any) -> list[int]:
    """The ids of a model's own tokens: the values of a dict, or, of the list of a unigram model,
    the indices."""
    return list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
