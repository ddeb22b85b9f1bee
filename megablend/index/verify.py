"""Verification: is a cache what was committed, and is the data what was indexed?"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from megablend.caches.base import CHECKSUMS, DOCUMENTS, GENERATIONS, CacheStore
from megablend.caches.find import CacheLike, find_existing
from megablend.errors import CacheError, DataError, ResourceError
from megablend.formats.base import (
    ENDS_AT_DOCUMENT_END,
    HAS_EARLIER_TOKENS,
    STARTS_MID_DOCUMENT,
    Array,
    BlockReader,
    DecodedBlock,
)
from megablend.formats.fetch import read_blocks
from megablend.index.block_checksums import BlockChecksums, find_differences, open_checksums
from megablend.index.build_report import Progress
from megablend.index.file_versions import read_seen
from megablend.index.fragments import read_fragment
from megablend.index.idx_digests import damaged_digests
from megablend.index.joined_snapshot import JoinedSnapshot
from megablend.index.list_snapshots import list_snapshots
from megablend.index.manifest import damaged_tables, read_generation_manifest, read_manifest, read_roots
from megablend.index.packs import Pack
from megablend.index.sampled_digest import sampled_content_digest
from megablend.index.snapshot import Snapshot, open_snapshot
from megablend.index.token_ranges import read_ranges
from megablend.lazy import cached_property
from megablend.storage.base import Storage
from megablend.system.failures import translating

_BATCH_BLOCKS = 64


def verify(
    cache: CacheLike, *, data: bool, storage: Storage, progress: Callable[[Progress], None] | None = None
) -> list[str]:
    """Check a whole cache: fragments, packs, document tables, digests of `.idx` files, and checksums and totals of all snapshots.

    Args:
        data: also read every block of every file, and compare counts, sampled ranges, and checksums, where the files or the index
            have some.
        storage: reads the files.
        progress: called as files are read.

    Returns: one line per problem, with file and place; empty if there are none.
    Raises: CacheError if there is no cache.
    """
    store = find_existing(cache)
    problems = [
        *_catch_errors(_file_kind_problems(store, "fragments", read_fragment)),
        *_catch_errors(_file_kind_problems(store, "packs", Pack)),
        *_catch_errors(_folder_problems(store, DOCUMENTS)),
        *_catch_errors(_folder_problems(store, CHECKSUMS)),
        *_catch_errors(damaged_digests(store)),
    ]
    sound: list[Snapshot] = []
    for entry in store.list_entries(GENERATIONS):
        problems += _catch_errors(_generation_problems(store, entry.name, sound))
    if data:
        problems += _catch_errors(_all_data_problems(sound, storage, progress))
    return problems


def _catch_errors(problems: Iterator[str]) -> Iterator[str]:
    """The problems; an error that ends the search for more is added as one more."""
    try:
        with translating("verify"):
            yield from problems
    except (CacheError, DataError, ResourceError) as error:
        yield str(error)


def _generation_problems(store: CacheStore, digest: str, sound: list[Snapshot]) -> Iterator[str]:
    """Problems of a snapshot, which is added to `sound` if its tables are undamaged."""
    folder = store.fetch_folder(GENERATIONS, digest, is_fresh=True)
    manifest = read_generation_manifest(folder)
    damaged = damaged_tables(folder, manifest)
    read_roots(folder)
    read_seen(folder, manifest["num_files"])
    read_ranges(folder, manifest["num_files"])
    yield from damaged
    if damaged:  # further checks of damaged tables are meaningless
        return
    generation = open_snapshot(store, digest)
    for problem in _table_problems(generation):
        yield f"{folder}: {problem}"
    sound.append(generation)


def _all_data_problems(
    sound: Sequence[Snapshot], storage: Storage, progress: Callable[[Progress], None] | None
) -> Iterator[str]:
    """Problems of the data of all snapshots, file by file."""
    num_files = sum(generation.num_files for generation in sound)
    num_bytes = sum(generation.file(i).opened.size for generation in sound for i in range(generation.num_files))
    files = size = 0
    seen: set[tuple[object, ...]] = set()
    renamed = _Renamed(sound)
    for generation in sound:
        checksums = None
        with contextlib.suppress(CacheError):  # which was reported with the other tables
            checksums = open_checksums(generation)
        for i in range(generation.num_files):
            yield from _catch_errors(_problems_of_file(generation, i, renamed, seen, checksums, storage))
            files, size = files + 1, size + generation.file(i).opened.size
            if progress is not None:
                progress(Progress(files=files, num_files=num_files, bytes=size, num_bytes=num_bytes))


def _file_kind_problems(store: CacheStore, kind: str, read: Callable[[Path], object]) -> Iterator[str]:
    for name in store.list_files(kind):
        problem = _find_problem(store.fetch_file(kind, name), read)
        if problem is not None:
            yield problem


def _folder_problems(store: CacheStore, kind: str) -> Iterator[str]:
    for entry in store.list_entries(kind):
        yield from _catch_errors(_table_problems_of(store, kind, entry.name))


def _table_problems_of(store: CacheStore, kind: str, name: str) -> Iterator[str]:
    folder = store.fetch_folder(kind, name, is_fresh=True)
    yield from damaged_tables(folder, read_manifest(folder))


def _find_problem(path: Path, read: Callable[[Path], object]) -> str | None:
    try:
        read(path)
    except FileNotFoundError:  # just removed by another process
        return None
    except CacheError as error:
        return str(error)
    return None


def _table_problems(generation: Snapshot) -> Iterator[str]:
    """Descending running counts, blocks outside their file, inconsistent totals."""
    for name in ("tokens_before", "rows_before", "ends_before"):
        running = getattr(generation, name)
        falls = np.flatnonzero(np.diff(running) < 0)
        if running[0] != 0 or len(falls):
            yield f"{name} does not ascend from 0 (at block {falls[0] if len(falls) else 0})"
    for i in range(generation.num_files):
        file = generation.file(i)
        blocks = generation.blocks(np.arange(file.first_block, file.first_block + file.num_blocks))
        stop = blocks["offset"] + blocks["stored_bytes"]
        if len(blocks) and (blocks["offset"].min() < 0 or stop.max() > file.opened.size):
            yield f"{file.name}: a block is outside the file's {file.opened.size} bytes"
        if len(blocks) and (blocks["chunk"].min() < 0 or blocks["chunk"].max() >= file.num_chunks):
            yield f"{file.name}: a block refers to a chunk outside the file's {file.num_chunks} chunks"
        if blocks["tokens"].sum() != file.tokens:
            yield f"{file.name}: its blocks contain {blocks['tokens'].sum()} tokens, the file {file.tokens}"
        if generation.columns[file.column].documents and blocks["rows"].sum() != file.rows:
            yield f"{file.name}: its blocks begin {blocks['rows'].sum()} documents, the file has {file.rows}"


class _Renamed:
    """Where a later snapshot found the content of a file."""

    def __init__(self, snapshots: Sequence[Snapshot]) -> None:
        by_age = list_snapshots(snapshots[0].store) if snapshots else []
        self._snapshots = sorted(snapshots, key=lambda each: by_age.index(each.digest))

    def find_path(self, generation: Snapshot, number: int) -> str:
        """The path that a file of a snapshot has now, as far as the cache knows."""
        before = itertools.takewhile(lambda each: each is not generation, self._snapshots)
        return self._joined.path(sum(each.num_files for each in before) + number)

    @cached_property
    def _joined(self) -> Snapshot:
        return JoinedSnapshot(self._snapshots)


def _problems_of_file(
    generation: Snapshot,
    number: int,
    renamed: _Renamed,
    seen: set[tuple[object, ...]],
    checksums: BlockChecksums | None,
    storage: Storage,
) -> Iterator[str]:
    """Differences of a file, wherever it is now, from what was indexed."""
    path = generation.path(number)
    problems = list(_catch_errors(_file_problems(generation, number, path, seen, checksums, storage)))
    if problems and (now := renamed.find_path(generation, number)) != path:
        problems = list(_catch_errors(_file_problems(generation, number, now, seen, checksums, storage)))
    yield from problems


def _file_problems(
    generation: Snapshot,
    number: int,
    path: str,
    seen: set[tuple[object, ...]],
    checksums: BlockChecksums | None,
    storage: Storage,
) -> Iterator[str]:
    """Differences of a file at a path from what was indexed. Snapshots share most files; those in `seen` are not read again."""
    file = generation.file(number)
    column = generation.columns[file.column]
    blocks = generation.blocks(np.arange(file.first_block, file.first_block + file.num_blocks))
    key = (path, column.column, file.opened.structure, file.body, blocks.tobytes())
    if key in seen:
        return
    seen.add(key)
    chunks = generation.chunks(file)
    try:
        reader = column.kind.open(path, column.column, file.opened, storage=storage)
        found = sampled_content_digest(path, file.opened.size, storage)
        if found != file.body:
            yield f"{path}: its sampled ranges have digest {found}, expected {file.body}: not the file that was indexed"
        for start in range(0, len(blocks), _BATCH_BLOCKS):
            yield from _block_problems(reader, path, blocks[start : start + _BATCH_BLOCKS], chunks, storage)
        if checksums is not None:
            yield from find_differences(generation, number, path, checksums.of_file(number), storage)
    except DataError as error:
        yield str(error)


def _block_problems(reader: BlockReader, path: str, blocks: Array, chunks: Array, storage: Storage) -> Iterator[str]:
    """Problems of some blocks; if they cannot be read together, each is read separately, so that each bad one is reported."""
    try:
        decoded = read_blocks(reader, blocks, chunks, storage)
    except DataError as error:
        if len(blocks) == 1:
            yield str(error)
        else:
            for i in range(len(blocks)):
                yield from _block_problems(reader, path, blocks[i : i + 1], chunks, storage)
        return
    for block, found in zip(blocks, decoded, strict=True):
        counts = _counts(found, int(block["flags"]))
        for name, count in counts.items():
            if block[name] not in (-1, count):
                yield f"{path} at byte {block['offset']}: the block has {count} {name}, expected {block[name]} as indexed"


def _counts(block: DecodedBlock, flags: int) -> dict[str, int]:
    """Counts of a block, computed from its decoded documents."""
    ends = np.diff(block.offsets) > 0
    if len(ends) and flags & HAS_EARLIER_TOKENS:
        ends[0] = True
    if len(ends) and not flags & ENDS_AT_DOCUMENT_END:
        ends[-1] = False
    rows = len(ends) - bool(flags & STARTS_MID_DOCUMENT)
    return {"tokens": len(block.tokens), "rows": rows, "ends": int(ends.sum())}
