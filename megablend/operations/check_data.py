"""check --data: find the smallest and the largest token id of every source, and rows with ids
outside the vocabulary.

Every block of the run's index is read once, files in parallel. Only the first wrong row of each
file is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from megablend.index.blocks.block_store import BlockStore
from megablend.index.build.build import Progress
from megablend.index.read.snapshot import open_snapshot
from megablend.index.tables.source_entry import SourceEntry
from megablend.operations.check_tokens import FileTokens, check_file
from megablend.operations.results import Record
from megablend.operations.session import ConfigLike, Session
from megablend.operations.unindexed import open_newest
from megablend.operations.vocabulary import vocab_sizes
from megablend.run.open_store import open_block_store
from megablend.storage.base import Storage
from megablend.system import count_cpus

MAX_THREADS = 8
"""Maximum number of threads that read files."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SourceTokens(Record):
    """The token ids of a source."""

    name: str
    files: int
    tokens: int
    smallest: int | None
    """Smallest id; None if no token was read."""
    largest: int | None
    """Largest id; None if no token was read."""
    vocab_size: int | None
    """Size of the vocabulary: all ids must be less than this. None if the config does not give
    it."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CheckDataResult(Record):
    """The result of `check_data`."""

    index: str
    """Digest of the index that was read."""
    sources: tuple[SourceTokens, ...]
    problems: tuple[str, ...]
    """A line for each file that has a token out of range (path, row, what was found and expected),
    or cannot be read."""
    unread: int
    """Number of `problems` about files that cannot be read."""


def check_data(
    what: ConfigLike,
    *,
    cache: str | None = None,
    progress: Callable[[Progress], None] | None = None,
    storage: Storage | None = None,
) -> CheckDataResult:
    """Read all tokens of a config's run, or of the newest index if the run was not built yet, and
    check their ids.

    Args:
        cache: cache folder, instead of the config's `cache`.
        progress: called after each file, from one thread at a time.
        storage: the storage that reads files, instead of the config's storage.

    Raises: ConfigError if the config is not valid, or a tokenizer cannot be read; CacheError if
        there is no index of the config's files.
    """
    session = Session(what, cache=cache, storage=storage)
    sizes = vocab_sizes(session.config)
    ledger = session.ledger
    snapshot = open_snapshot(session.cache, ledger.index) if ledger else open_newest(session)
    number = len(ledger.indices) - 1 if ledger else 0
    roots = open_block_store(session.config, snapshot, session.storage, number=number).roots
    store = BlockStore(snapshot, roots=roots, storage=session.storage)
    # Extra columns may have any numbers
    entries = [entry for entry in snapshot.sources if entry.name in sizes]
    by_file = _check_files(store, entries, sizes, progress)
    return CheckDataResult(
        index=snapshot.digest,
        sources=tuple(
            _source_tokens(entry, [by_file[i] for i in entry.files], sizes[entry.name])
            for entry in entries
        ),
        problems=tuple(str(file.problem) for file in by_file.values() if file.problem is not None),
        unread=sum(not file.is_read for file in by_file.values()),
    )


def _check_files(
    store: BlockStore,
    entries: Sequence[SourceEntry],
    sizes: Mapping[str, int | None],
    progress: Callable[[Progress], None] | None,
) -> dict[int, FileTokens]:
    """Read the tokens of all files of some sources in threads.

    Args:
        sizes: the vocabulary size of each source, by name.

    Returns: the token ids of each file, by its number in the index.
    """
    snapshot = store.snapshot

    def check(number: int) -> FileTokens:
        entry = snapshot.sources[snapshot.files.entry(number).column]
        return check_file(store, entry, number, sizes[entry.name])

    numbers = [number for entry in entries for number in entry.files]
    file_bytes = {number: snapshot.files.entry(number).opened.size for number in numbers}
    num_bytes = sum(file_bytes.values())
    by_file = dict[int, FileTokens]()
    done = 0
    with ThreadPoolExecutor(min(MAX_THREADS, count_cpus())) as pool:
        for number, tokens in zip(numbers, pool.map(check, numbers), strict=True):
            by_file[number] = tokens
            done += file_bytes[number]
            if progress is not None:
                progress(
                    Progress(
                        files=len(by_file), num_files=len(numbers), bytes=done, num_bytes=num_bytes
                    )
                )
    return by_file


def _source_tokens(
    entry: SourceEntry, files: Sequence[FileTokens], vocab_size: int | None
) -> SourceTokens:
    """Return the smallest and largest token id of a source, from those of its files."""
    return SourceTokens(
        name=entry.name,
        files=len(files),
        tokens=entry.tokens,
        smallest=min((file.smallest for file in files if file.smallest is not None), default=None),
        largest=max((file.largest for file in files if file.largest is not None), default=None),
        vocab_size=vocab_size,
    )
