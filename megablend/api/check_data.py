"""check --data: the smallest and the largest token of every source, and the rows whose token ids no vocabulary has.

Every block of the run's index is read once, files in parallel. What is found of a file is its first wrong row.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megablend.api.runs import ConfigLike, newest_snapshot
from megablend.blocks.block_store import BlockStore
from megablend.config import Config, load_config
from megablend.config.vocab import read_vocab_size
from megablend.errors import CHANGED_REMEDY, ChangedFileError, ConfigError, DataError
from megablend.formats import FORMATS
from megablend.formats.base import STARTS_MID_DOCUMENT, FileToIndex, OpenedFile
from megablend.formats.blocks import place_blocks
from megablend.index.build import Progress
from megablend.index.snapshot import FileEntry, Snapshot, SourceEntry
from megablend.plan.ledger import load_ledger
from megablend.plan.run import open_block_store
from megablend.storage.base import Storage
from megablend.storage.by_scheme import make_storage

MAX_IDS = 1 << 32
"""Token ids there can be at all, where no `vocab_size` is given."""
BATCH_BYTES = 16 << 20
"""Of tokens that are decoded together; each thread holds one batch."""
MAX_THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTokens:
    """The tokens of a source."""

    name: str
    files: int
    tokens: int
    smallest: int | None
    """None where no token was read."""
    largest: int | None
    vocab_size: int | None
    """Token ids must be less than this, as far as the config says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedData:
    """What `check_data` found."""

    index: str
    """Digest of the index that was read."""
    sources: tuple[SourceTokens, ...]
    problems: tuple[str, ...]
    """A line a file: path, row, what was found and what was expected."""


class _FileTokens(NamedTuple):
    smallest: int | None
    largest: int | None
    problem: str | None


def check_data(
    what: ConfigLike, *, cache: str | None = None, progress: Callable[[Progress], None] | None = None
) -> CheckedData:
    """Read all tokens of a config's run, or of the newest index where it was not built yet, and check their ids.

    Args:
        cache: in place of the config's `cache`.
        progress: called after each file, from one thread at a time.

    Raises: ConfigError (the config, or a tokenizer that cannot be read); CacheError where there is no index.
    """
    config = load_config(what, cache=cache)
    sizes = vocab_sizes(config)
    ledger = load_ledger(config.cache, config.run)
    generation = newest_snapshot(config.cache, ledger.index if ledger else None)
    storage = make_storage(objects=config.storage)
    store = BlockStore(generation, roots=open_block_store(config, generation, storage).roots, storage=storage)
    entries = [entry for entry in generation.sources if entry.name in sizes]
    found: dict[int, _FileTokens] = {}

    def check(number: int) -> _FileTokens:
        entry = generation.sources[generation.file(number).source]
        return _check_file(store, entry, number, sizes[entry.name])

    numbers = [i for entry in entries for i in entry.files]
    file_bytes = {i: generation.file(i).opened.size for i in numbers}
    num_bytes, done = sum(file_bytes.values()), 0
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        for number, tokens in zip(numbers, pool.map(check, numbers), strict=True):
            found[number] = tokens
            done += file_bytes[number]
            if progress is not None:
                progress(Progress(files=len(found), num_files=len(numbers), bytes=done, num_bytes=num_bytes))
    return CheckedData(
        index=generation.digest,
        sources=tuple(_source_tokens(entry, [found[i] for i in entry.files], sizes[entry.name]) for entry in entries),
        problems=tuple(problem for each in found.values() if (problem := each.problem)),
    )


def vocab_sizes(config: Config) -> dict[str, int | None]:
    """Of each source, by its name in the index, how many token ids there are; None where the config does not say.

    Raises: ConfigError where a tokenizer cannot be read, or an end-of-document token is not in its vocabulary.
    """
    read: dict[str, int] = {}
    sizes: dict[str, int | None] = {}
    for name, source in config.all_sources.items():
        given = source.vocab_size if source.vocab_size is not None else config.vocab_size
        if isinstance(given, str):
            given = read[given] if given in read else read.setdefault(given, read_vocab_size(given))
        if given is not None and source.append_eod is not None and source.append_eod >= given:
            raise ConfigError(
                f"{source.place}: append_eod {source.append_eod} is not in a vocabulary of {given:,}; expected 0 to {given - 1}"
            )
        sizes[name] = given
    return sizes


def _source_tokens(entry: SourceEntry, files: Sequence[_FileTokens], vocab_size: int | None) -> SourceTokens:
    return SourceTokens(
        name=entry.name,
        files=len(files),
        tokens=entry.tokens,
        smallest=min((each.smallest for each in files if each.smallest is not None), default=None),
        largest=max((each.largest for each in files if each.largest is not None), default=None),
        vocab_size=vocab_size,
    )


def _check_file(store: BlockStore, entry: SourceEntry, number: int, vocab_size: int | None) -> _FileTokens:
    generation = store.generation
    file, path = generation.file(number), generation.path(number, store.roots)
    first_token = int(generation.tokens_before[file.first_block])
    limit, bad, wrong, lowest, highest = vocab_size or MAX_IDS, None, 0, None, None
    try:
        for ids in _batches(generation, file):
            tokens = store.read_blocks(ids).tokens
            if not len(tokens):
                continue
            low, high = int(tokens.min()), int(tokens.max())
            lowest = low if lowest is None else min(lowest, low)
            highest = high if highest is None else max(highest, high)
            if low < 0 or high >= limit:
                places = np.flatnonzero((tokens < 0) | (tokens >= limit))
                wrong += len(places)
                if bad is None:
                    before = int(generation.tokens_before[ids[0]]) - first_token
                    bad = before + int(places[0]), int(tokens[places[0]])
        problem = None
        if bad is not None:
            where = _place(path, entry, bad[0], file.tokens, store.storage)
            expected = f"0 to {limit - 1}" + (f" (vocab_size {vocab_size})" if vocab_size else "")
            problem = (
                f"{path}: {where}: token {bad[1]}, expected {expected}; {wrong:,} tokens of the file are out of range: "
                "if this is the column of tokens, write them again; if not, name that by `column:`"
            )
        return _FileTokens(lowest, highest, problem)
    except DataError as error:
        return _FileTokens(lowest, highest, str(error))


def _batches(generation: Snapshot, file: FileEntry) -> list[npt.NDArray[np.int64]]:
    """The blocks of a file in order, some BATCH_BYTES of tokens at a time: int64 [n] each."""
    ids = np.arange(file.first_block, file.first_block + file.num_blocks)
    width = np.dtype(file.opened.token_dtype).itemsize
    before = generation.tokens_before[file.first_block : file.first_block + file.num_blocks]
    batch = (before - (before[0] if len(before) else 0)) * width // BATCH_BYTES
    return [part for part in np.split(ids, np.flatnonzero(np.diff(batch)) + 1) if len(part)]


def _place(path: str, entry: SourceEntry, place: int, num_tokens: int, storage: Storage) -> str:
    try:
        return f"row {find_row(path, entry, place, num_tokens, storage)}"
    except ConfigError:  # an index of a version that took a column which now has to be named, and did not keep its name
        return f"the file's token number {place:,}"


def find_row(path: str, entry: SourceEntry, place: int, num_tokens: int, storage: Storage) -> int:
    """The row of a file that its token number `place` is in, from 0, counted by indexing the file once more.

    Raises: as `Format.index` does; ChangedFileError where the file is not the one that was indexed.
    """
    column, kind = entry.column_taken, FORMATS[entry.format]
    index = kind.index(FileToIndex(path=path, column=column, documents=True, block_bytes=1 << 20), storage=storage)
    if index.tokens != num_tokens:
        raise ChangedFileError(path, f"has {index.tokens:,} tokens, {num_tokens:,} were indexed; {CHANGED_REMEDY}")
    block = int(np.searchsorted(index.blocks["first_token"], place, side="right")) - 1
    rows_before = int(index.blocks["rows"][:block].sum()) - bool(index.blocks["flags"][block] & STARTS_MID_DOCUMENT)
    opened = OpenedFile(
        size=storage.stat(path).size, token_dtype=index.token_dtype, structure=index.structure, meta=index.meta
    )
    reader = kind.open(path, column, opened, storage=storage)
    (offsets,), _ = reader.pieces(place_blocks(index.blocks)[block : block + 1], index.chunks)
    return (
        rows_before + int(np.searchsorted(offsets, place - int(index.blocks["first_token"][block]), side="right")) - 1
    )
