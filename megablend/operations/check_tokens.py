"""Token ids: how many there are, as far as the config says,
and which ids of a file are out of range.

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
"""Token ids there can be at all, where no `vocab_size` is given."""
BATCH_BYTES = 16 << 20
"""Size of the tokens that are decoded together; each thread has one batch in memory."""


class FileTokens(NamedTuple):
    """What was found in a file."""

    smallest: int | None
    """None where no token was read."""
    largest: int | None
    problem: DataError | None
    """The first token out of range, or why the file cannot be read."""
    is_read: bool
    """Whether all of the file could be read."""


def check_file(
    store: BlockStore, entry: SourceEntry, number: int, vocab_size: int | None
) -> FileTokens:
    """Read all tokens of file `number` of the index, and compare them with the number of token ids
    (MAX_IDS if None)."""
    snapshot = store.snapshot
    file = snapshot.file(number)
    path = snapshot.path(number, store.roots)
    first_token = int(snapshot.tokens_before[file.first_block])
    limit = vocab_size or MAX_IDS
    bad = None
    wrong = 0
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
                places = np.flatnonzero((tokens < 0) | (tokens >= limit))
                wrong += len(places)
                if bad is None:
                    before = int(snapshot.tokens_before[ids[0]]) - first_token
                    bad = before + int(places[0]), int(tokens[places[0]])
        problem = None
        if bad is not None:
            where = _place(path, entry, bad[0], file.tokens, store.storage)
            expected = f"0 to {limit - 1}" + (f" (vocab_size {vocab_size})" if vocab_size else "")
            problem = DataError(
                path,
                f"{where}: token {bad[1]}, expected {expected}; {wrong:,} tokens of the file are out of range: if this is the "
                "column of tokens, rewrite the file; if not, set `column:` to the one that is",
            )
        return FileTokens(lowest, highest, problem, is_read=True)
    except DataError as error:
        return FileTokens(lowest, highest, error, is_read=False)


def _batches(snapshot: Snapshot, file: FileEntry) -> list[npt.NDArray[np.int64]]:
    """The blocks of a file in order, some BATCH_BYTES of tokens at a time: int64 [n] each."""
    ids = np.arange(file.first_block, file.first_block + file.num_blocks)
    width = np.dtype(file.opened.token_dtype).itemsize
    before = snapshot.tokens_before[file.first_block : file.first_block + file.num_blocks]
    batch = (before - (before[0] if len(before) else 0)) * width // BATCH_BYTES
    return [part for part in np.split(ids, np.flatnonzero(np.diff(batch)) + 1) if len(part)]


def _place(path: str, entry: SourceEntry, place: int, num_tokens: int, storage: Storage) -> str:
    try:
        row, row_group = find_row(path, entry, place, num_tokens, storage)
        return f"row {row}" + (f" (row group {row_group})" if entry.kind.has_row_groups else "")
    except ConfigError:  # an index of a version that took a column which now has to be named, and did not keep its name
        return f"the file's token number {place:,}"


def find_row(
    path: str, entry: SourceEntry, place: int, num_tokens: int, storage: Storage
) -> tuple[int, int]:
    """The row of a file, from 0, that contains its token number `place`, and its row group;
    found by indexing the file once more.

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
    """The first row of a file that has tokens in its block number `block`, and where each row that
    has some begins in the block, and the end: int64 [n + 1].

    Raises: as `find_row`.
    """
    index = _index_again(path, entry, num_tokens, storage)
    return _read_rows(path, entry, index, block, storage)


def _index_again(path: str, entry: SourceEntry, num_tokens: int, storage: Storage) -> FileIndex:
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
    """The number of token ids of each source, by its name in the index;
    None if the config does not say.

    Raises: ConfigError if a tokenizer cannot be read, or an end-of-document token is not in its
        vocabulary.
    """
    read: dict[str, int] = {}
    sizes: dict[str, int | None] = {}
    for name, source in config.all_sources.items():
        given = source.vocab_size if source.vocab_size is not None else config.vocab_size
        if given is None and source.text is not None and config.tokenizer is not None:
            given = str(find_tokenizer(config.tokenizer))
        if isinstance(given, str):
            given = read[given] if given in read else read.setdefault(given, read_vocab_size(given))
        if given is not None and source.append_eod is not None and source.append_eod >= given:
            raise ConfigError(
                f"{source.place}: append_eod {source.append_eod} is not in a vocabulary of {given:,}; expected 0 to {given - 1}"
            )
        sizes[name] = given
    return sizes


def refuse_known_outliers(config: Config, snapshot: Snapshot, storage: Storage) -> None:
    """Refuse an index of the config's sources whose files are known
    to have tokens outside the vocabulary.

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
        if entry.name not in sizes:  # an extra column, of any numbers
            continue
        limit = sizes[entry.name] or MAX_IDS
        files = np.arange(entry.files.start, entry.files.stop)
        for number in files[
            is_known[files] & ((lows[files] < 0) | (highs[files] >= limit))
        ].tolist():
            store = store or open_block_store(config, snapshot, storage, number=0)
            if (problem := check_file(store, entry, number, sizes[entry.name]).problem) is not None:
                raise problem


def read_vocab_size(path: str) -> int:
    """The number of ids of a tokenizer: one more than the largest, added tokens included.

    Args:
        path: a tokenizer.json as Hugging Face's tokenizers write it.

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
    """Ids of a model's own tokens: a dict has them as values,
    the list of a unigram model as places."""
    return list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
