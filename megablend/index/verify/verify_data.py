"""Check that the data files of a cache's indexes are still the files that were indexed."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megablend.caches.base import SNAPSHOTS, CacheStore
from megablend.errors import (
    CHANGED_REMEDY,
    MISSING_REMEDY,
    REPAIR_REMEDY,
    CacheError,
    DamagedCacheError,
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
from megablend.index.build.build_report import Progress
from megablend.index.read.block_checksums import BlockChecksums, find_differences, open_checksums
from megablend.index.read.joined_snapshot import JoinedSnapshot
from megablend.index.read.snapshot import Snapshot, choose_root
from megablend.index.tables.file_versions import sampled_content_digest
from megablend.index.tables.list_snapshots import list_snapshots
from megablend.lazy import cached_property
from megablend.storage.base import Storage
from megablend.system.failures import translating

_BATCH_BLOCKS = 64
"""Number of blocks that are read and decoded together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotUse:
    """How a snapshot is used, which determines the paths of its files and the remedies for its
    problems."""

    repair: str = REPAIR_REMEDY
    """The remedy for damaged tables or, if the snapshot is not needed, for all of its problems."""
    missing: str = MISSING_REMEDY
    """Remedy for files that do not exist."""
    is_needed: bool = True
    """Whether a run or a config uses the snapshot."""
    roots: Mapping[str, str] = field(default_factory=dict)
    """The folder of each source's files according to a config, by source name; empty without a
    config."""


def catch_errors(problems: Iterator[str], repair: str = REPAIR_REMEDY) -> Iterator[str]:
    """Yield problems. If an error ends the search, yield the error's text as the last problem.
    `repair` is the remedy for damaged tables."""
    try:
        with translating("verify"):
            yield from problems
    except DamagedCacheError as error:
        yield f"{error.problem}; {repair}"
    except (CacheError, DataError, ResourceError) as error:
        yield str(error)


def if_present(store: CacheStore, kind: str, name: str, problems: Iterator[str]) -> Iterator[str]:
    """Yield the problems of a folder, or nothing if another process has just removed the folder."""
    listed = list(problems)
    if listed and name in (entry.name for entry in store.list_entries(kind)):
        yield from listed


def list_data_problems(
    sound: Sequence[Snapshot],
    uses: Mapping[str, SnapshotUse],
    storage: Storage,
    progress: Callable[[Progress], None] | None,
) -> Iterator[str]:
    """Yield the problems of the data files of undamaged snapshots, file by file."""
    num_files = sum(snapshot.num_files for snapshot in sound)
    num_bytes = sum(
        snapshot.files.entry(i).opened.size for snapshot in sound for i in range(snapshot.num_files)
    )
    files = size = 0
    checked: set[tuple[object, ...]] = set()
    paths = _FilePaths(sound, uses, storage)
    # Snapshots that are needed come first: if several snapshots share a file, it is checked once,
    # for the first of them
    for snapshot in sorted(sound, key=lambda candidate: not paths.uses[candidate.digest].is_needed):
        checksums = None
        use = paths.uses[snapshot.digest]
        # Damaged checksums have been reported with the other tables
        with contextlib.suppress(CacheError):
            checksums = open_checksums(snapshot)
        problems = list[str]()
        for i in range(snapshot.num_files):
            file_problems = _problems_of_file(snapshot, i, paths, checked, checksums, storage)
            for problem in catch_errors(file_problems):
                if use.is_needed:
                    problems.append(problem)
                else:
                    fault = problem.removesuffix(f"; {CHANGED_REMEDY}")
                    problems.append(f"{fault}; it is in index {snapshot.digest}, and {use.repair}")
            files = files + 1
            size = size + snapshot.files.entry(i).opened.size
            if progress is not None:
                progress(
                    Progress(files=files, num_files=num_files, bytes=size, num_bytes=num_bytes)
                )
        # Once per snapshot: asking a remote store again for each of many missing files would take
        # hours
        yield from if_present(snapshot.store, SNAPSHOTS, snapshot.digest, iter(problems))


class _FilePaths:
    """Finds the paths of the files of snapshots, according to the config and to later snapshots."""

    def __init__(
        self, snapshots: Sequence[Snapshot], uses: Mapping[str, SnapshotUse], storage: Storage
    ) -> None:
        listed = list_snapshots(snapshots[0].store) if snapshots else []
        by_age = {digest: age for age, digest in enumerate(listed)}
        # A snapshot that another process has just removed counts as the oldest
        self._snapshots = sorted(snapshots, key=lambda snapshot: by_age.get(snapshot.digest, -1))
        self.uses = {
            snapshot.digest: uses.get(snapshot.digest, SnapshotUse()) for snapshot in snapshots
        }
        self._roots = {
            snapshot.digest: {
                name: choose_root(snapshot, name, root, storage)
                for name, root in self.uses[snapshot.digest].roots.items()
                if name in snapshot.roots
            }
            for snapshot in snapshots
        }

    def find_path(self, snapshot: Snapshot, number: int) -> str:
        """Return the path of a file of a snapshot."""
        return snapshot.path(number, self._roots[snapshot.digest])

    def find_renamed(self, snapshot: Snapshot, number: int) -> str:
        """Return the path that a file has in the last snapshot with the same content."""
        before = itertools.takewhile(lambda earlier: earlier is not snapshot, self._snapshots)
        joined_number = sum(earlier.num_files for earlier in before) + number
        last, number_there = self._joined.find_last(joined_number)
        return self.find_path(self._snapshots[last], number_there)

    @cached_property
    def _joined(self) -> JoinedSnapshot:
        return JoinedSnapshot(self._snapshots)


def _problems_of_file(
    snapshot: Snapshot,
    number: int,
    paths: _FilePaths,
    checked: set[tuple[object, ...]],
    checksums: BlockChecksums | None,
    storage: Storage,
) -> Iterator[str]:
    """Yield the differences between a file and the index. If the file is not at its path, check the
    file to which it was renamed."""

    def find_problems(at_path: str) -> list[str]:
        use = paths.uses[snapshot.digest]
        return list(
            catch_errors(
                _file_problems(snapshot, number, at_path, checked, checksums, storage, use)
            )
        )

    path = paths.find_path(snapshot, number)
    problems = find_problems(path)
    if problems:
        renamed = paths.find_renamed(snapshot, number)
        if renamed != path:
            problems = find_problems(renamed)
    yield from problems


def _file_problems(
    snapshot: Snapshot,
    number: int,
    path: str,
    checked: set[tuple[object, ...]],
    checksums: BlockChecksums | None,
    storage: Storage,
    use: SnapshotUse,
) -> Iterator[str]:
    """Yield the differences between the file at a path and the index. Snapshots share most files;
    files in `checked` are not read again."""
    file = snapshot.files.entry(number)
    column = snapshot.columns[file.column]
    blocks = snapshot.blocks(file.blocks)
    key = (path, column.column, file.opened.structure, file.body, blocks.tobytes())
    if key in checked:
        return
    checked.add(key)
    chunks = snapshot.chunks(file)
    try:
        reader = column.kind.open(path, column.column, file.opened, storage=storage)
        digest = sampled_content_digest(path, file.opened.size, storage)
        if digest != file.body:
            yield f"{path}: is not the file that was indexed (its sampled ranges have digest {digest}, expected {file.body})"
        for start in range(0, len(blocks), _BATCH_BLOCKS):
            yield from _block_problems(
                reader, path, blocks[start : start + _BATCH_BLOCKS], chunks, storage
            )
        if checksums is not None:
            yield from find_differences(snapshot, number, path, checksums.of_file(number), storage)
    except MissingFileError as error:
        yield f"{error}; {use.missing}" if use.is_needed else str(error)
    except DataError as error:
        yield str(error)


def _block_problems(
    reader: BlockReader, path: str, blocks: Array, chunks: Array, storage: Storage
) -> Iterator[str]:
    """Yield the problems of blocks of a file. If the blocks cannot be read together, read each one
    separately, so that each damaged block is reported."""
    try:
        decoded = read_blocks(reader, blocks, chunks, storage)
    except DataError as error:
        if len(blocks) == 1:
            yield str(error)
        else:
            for i in range(len(blocks)):
                yield from _block_problems(reader, path, blocks[i : i + 1], chunks, storage)
        return
    for block, decoded_block in zip(blocks, decoded, strict=True):
        counts = _counts(decoded_block, int(block["flags"]))
        for name, count in counts.items():
            # A count of -1 is unknown
            if block[name] not in (-1, count):
                yield f"{path} at byte {block['offset']}: the block has {count} {name}, expected {block[name]} as indexed"


def _counts(block: DecodedBlock, flags: int) -> dict[str, int]:
    """Return the counts of a decoded block: tokens, documents that begin in the block, and
    documents with tokens that end in it."""
    ends = np.diff(block.offsets) > 0
    if len(ends) and flags & HAS_EARLIER_TOKENS:
        ends[0] = True
    if len(ends) and not flags & ENDS_AT_DOCUMENT_END:
        ends[-1] = False
    rows = len(ends) - bool(flags & STARTS_MID_DOCUMENT)
    return {"tokens": len(block.tokens), "rows": rows, "ends": int(ends.sum())}
