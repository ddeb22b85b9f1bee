"""Verification: is a cache what was committed, and is the data what was indexed?"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np

from megablend.caches.base import CHECKSUMS, DOCUMENTS, GENERATIONS, CacheStore
from megablend.caches.find import CacheLike, find_existing
from megablend.errors import (
    CHANGED_REMEDY,
    MISSING_REMEDY,
    REPAIR_REMEDY,
    CacheError,
    DataError,
    MissingFileError,
    ResourceError,
)
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
from megablend.index.moved_root import choose_root
from megablend.index.packs import Pack
from megablend.index.sampled_digest import sampled_content_digest
from megablend.index.snapshot import Snapshot, open_snapshot
from megablend.index.token_ranges import read_ranges
from megablend.lazy import cached_property
from megablend.storage.base import Storage
from megablend.system.failures import translating

_BATCH_BLOCKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotUse:
    """What a snapshot is used for: that decides where its files are, and what to do about its problems."""

    repair: str = REPAIR_REMEDY
    """What to do about damage, or where it is not needed, about anything."""
    missing: str = MISSING_REMEDY
    """What to do about files that do not exist."""
    is_needed: bool = True
    roots: Mapping[str, str] = field(default_factory=dict)
    """Folders of its sources where a config tells them, by name."""


def verify(
    cache: CacheLike,
    *,
    data: bool,
    storage: Storage,
    progress: Callable[[Progress], None] | None = None,
    uses: Mapping[str, SnapshotUse] = MappingProxyType({}),
) -> list[str]:
    """Check a whole cache: fragments, packs, document tables, digests of `.idx` files, and checksums and totals of all snapshots.

    Args:
        data: also read every block of every file, and compare counts, sampled ranges, and checksums, where the files or the index
            have some.
        storage: reads the files.
        progress: called as files are read.
        uses: of the snapshots, by digest.

    Returns: one line per problem, with file and place; empty if there are none.
    Raises: CacheError if there is no cache.
    """
    store = find_existing(cache)
    problems = [
        *_catch_errors(_file_kind_problems(store, "fragments", read_fragment)),
        *_catch_errors(_file_kind_problems(store, "packs", Pack)),
        *_catch_errors(_folder_problems(store, DOCUMENTS, "build again (`megablend build CONFIG`)")),
        *_catch_errors(
            _folder_problems(
                store, CHECKSUMS, "make checksums again if you want them (`megablend build CONFIG --checksums`)"
            )
        ),
        *_catch_errors(damaged_digests(store)),
    ]
    sound: list[Snapshot] = []
    for entry in store.list_entries(GENERATIONS):
        remedy = uses.get(entry.name, SnapshotUse()).repair
        found = _catch_errors(_generation_problems(store, entry.name, sound))
        problems += [_replace_remedy(problem, remedy) for problem in found]
    if data:
        problems += _catch_errors(_all_data_problems(sound, uses, storage, progress))
    return problems


def _catch_errors(problems: Iterator[str]) -> Iterator[str]:
    """The problems; an error that ends the search for more is added as one more."""
    try:
        with translating("verify"):
            yield from problems
    except (CacheError, DataError, ResourceError) as error:
        yield str(error)


def _replace_remedy(problem: str, remedy: str) -> str:
    return f"{problem.removesuffix(REPAIR_REMEDY)}{remedy}" if problem.endswith(REPAIR_REMEDY) else problem


def _generation_problems(store: CacheStore, digest: str, sound: list[Snapshot]) -> Iterator[str]:
    """Problems of a snapshot, which is added to `sound` if its tables are undamaged."""
    folder = store.fetch_folder(GENERATIONS, digest, is_fresh=True)
    manifest = read_generation_manifest(folder)
    damaged = damaged_tables(folder, manifest)
    read_roots(folder)
    read_seen(folder, manifest["num_files"])
    read_ranges(folder, manifest["num_files"])
    yield from (f"{problem}; {REPAIR_REMEDY}" for problem in damaged)
    if damaged:  # further checks of damaged tables are meaningless
        return
    generation = open_snapshot(store, digest)
    for problem in _table_problems(generation):
        yield f"{folder}: {problem}; {REPAIR_REMEDY}"
    sound.append(generation)


def _all_data_problems(
    sound: Sequence[Snapshot],
    uses: Mapping[str, SnapshotUse],
    storage: Storage,
    progress: Callable[[Progress], None] | None,
) -> Iterator[str]:
    """Problems of the data of all snapshots, file by file."""
    num_files = sum(generation.num_files for generation in sound)
    num_bytes = sum(generation.file(i).opened.size for generation in sound for i in range(generation.num_files))
    files = size = 0
    seen: set[tuple[object, ...]] = set()
    located = _Located(sound, uses, storage)
    for generation in sorted(sound, key=lambda each: not located.uses[each.digest].is_needed):  # those share most files
        checksums, use = None, located.uses[generation.digest]
        with contextlib.suppress(CacheError):  # which was reported with the other tables
            checksums = open_checksums(generation)
        for i in range(generation.num_files):
            for problem in _catch_errors(_problems_of_file(generation, i, located, seen, checksums, storage)):
                unneeded = f"; it is in index {generation.digest}, and {use.repair}"
                yield problem if use.is_needed else problem.removesuffix(f"; {CHANGED_REMEDY}") + unneeded
            files, size = files + 1, size + generation.file(i).opened.size
            if progress is not None:
                progress(Progress(files=files, num_files=num_files, bytes=size, num_bytes=num_bytes))


def _file_kind_problems(store: CacheStore, kind: str, read: Callable[[Path], object]) -> Iterator[str]:
    for name in store.list_files(kind):
        problem = _find_problem(store.fetch_file(kind, name), read)
        if problem is not None:
            yield problem


def _folder_problems(store: CacheStore, kind: str, then: str) -> Iterator[str]:
    """Problems of folders that are computed again where they are missing; `then`: by what."""
    for entry in store.list_entries(kind):
        remedy = f"remove {store.location}/{kind}/{entry.name}, and {then}"
        for problem in _catch_errors(_table_problems_of(store, kind, entry.name)):
            yield _replace_remedy(problem, remedy)


def _table_problems_of(store: CacheStore, kind: str, name: str) -> Iterator[str]:
    folder = store.fetch_folder(kind, name, is_fresh=True)
    yield from (f"{problem}; {REPAIR_REMEDY}" for problem in damaged_tables(folder, read_manifest(folder)))


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


class _Located:
    """Where the files of snapshots are, by the config and by what later snapshots found."""

    def __init__(self, snapshots: Sequence[Snapshot], uses: Mapping[str, SnapshotUse], storage: Storage) -> None:
        by_age = list_snapshots(snapshots[0].store) if snapshots else []
        self._snapshots = sorted(snapshots, key=lambda each: by_age.index(each.digest))
        self.uses = {each.digest: uses.get(each.digest, SnapshotUse()) for each in snapshots}
        self._roots = {
            each.digest: {
                name: choose_root(each, name, root, storage)
                for name, root in self.uses[each.digest].roots.items()
                if name in each.roots
            }
            for each in snapshots
        }

    def find_path(self, generation: Snapshot, number: int) -> str:
        """The path of a file of a snapshot."""
        return generation.path(number, self._roots[generation.digest])

    def find_renamed(self, generation: Snapshot, number: int) -> str:
        """The path at which the last snapshot that has the content of the file found it."""
        before = itertools.takewhile(lambda each: each is not generation, self._snapshots)
        which, now = self._joined.find_last(sum(each.num_files for each in before) + number)
        return self.find_path(self._snapshots[which], now)

    @cached_property
    def _joined(self) -> JoinedSnapshot:
        return JoinedSnapshot(self._snapshots)


def _problems_of_file(
    generation: Snapshot,
    number: int,
    located: _Located,
    seen: set[tuple[object, ...]],
    checksums: BlockChecksums | None,
    storage: Storage,
) -> Iterator[str]:
    """Differences of a file, wherever it is now, from what was indexed."""
    path, use = located.find_path(generation, number), located.uses[generation.digest]
    problems = list(_catch_errors(_file_problems(generation, number, path, seen, checksums, storage, use)))
    if problems and (now := located.find_renamed(generation, number)) != path:
        problems = list(_catch_errors(_file_problems(generation, number, now, seen, checksums, storage, use)))
    yield from problems


def _file_problems(
    generation: Snapshot,
    number: int,
    path: str,
    seen: set[tuple[object, ...]],
    checksums: BlockChecksums | None,
    storage: Storage,
    use: SnapshotUse,
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
    except MissingFileError as error:
        yield f"{error}; {use.missing}" if use.is_needed else str(error)
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
