"""Verification of data: are the files of a cache's indexes those that were indexed?"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotUse:
    """What a snapshot is used for: that decides where its files are,
    and what to do about its problems."""

    repair: str = REPAIR_REMEDY
    """What to do about damage, or where it is not needed, about anything."""
    missing: str = MISSING_REMEDY
    """What to do about files that do not exist."""
    is_needed: bool = True
    roots: Mapping[str, str] = field(default_factory=dict)
    """Folders of its sources where a config tells them, by name."""


def catch_errors(problems: Iterator[str], repair: str = REPAIR_REMEDY) -> Iterator[str]:
    """Yield problems; an error that ends the search becomes the last one. `repair`:
    what to do about damaged tables."""
    try:
        with translating("verify"):
            yield from problems
    except DamagedCacheError as error:
        yield f"{error.problem}; {repair}"
    except (CacheError, DataError, ResourceError) as error:
        yield str(error)


def list_data_problems(
    sound: Sequence[Snapshot],
    uses: Mapping[str, SnapshotUse],
    storage: Storage,
    progress: Callable[[Progress], None] | None,
) -> Iterator[str]:
    """Problems of the data of all snapshots, file by file."""
    num_files = sum(snapshot.num_files for snapshot in sound)
    num_bytes = sum(
        snapshot.file(i).opened.size for snapshot in sound for i in range(snapshot.num_files)
    )
    files = size = 0
    seen: set[tuple[object, ...]] = set()
    located = _Located(sound, uses, storage)
    # Those share most files
    for snapshot in sorted(sound, key=lambda each: not located.uses[each.digest].is_needed):
        checksums = None
        use = located.uses[snapshot.digest]
        with contextlib.suppress(CacheError):  # which was reported with the other tables
            checksums = open_checksums(snapshot)
        for i in range(snapshot.num_files):
            for problem in catch_errors(
                _problems_of_file(snapshot, i, located, seen, checksums, storage)
            ):
                unneeded = f"; it is in index {snapshot.digest}, and {use.repair}"
                yield (
                    problem
                    if use.is_needed
                    else problem.removesuffix(f"; {CHANGED_REMEDY}") + unneeded
                )
            files = files + 1
            size = size + snapshot.file(i).opened.size
            if progress is not None:
                progress(
                    Progress(files=files, num_files=num_files, bytes=size, num_bytes=num_bytes)
                )


class _Located:
    """Where the files of snapshots are, by the config and by what later snapshots found."""

    def __init__(
        self, snapshots: Sequence[Snapshot], uses: Mapping[str, SnapshotUse], storage: Storage
    ) -> None:
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

    def find_path(self, snapshot: Snapshot, number: int) -> str:
        """The path of a file of a snapshot."""
        return snapshot.path(number, self._roots[snapshot.digest])

    def find_renamed(self, snapshot: Snapshot, number: int) -> str:
        """The path at which the last snapshot that has the content of the file found it."""
        before = itertools.takewhile(lambda each: each is not snapshot, self._snapshots)
        which, now = self._joined.find_last(sum(each.num_files for each in before) + number)
        return self.find_path(self._snapshots[which], now)

    @cached_property
    def _joined(self) -> JoinedSnapshot:
        return JoinedSnapshot(self._snapshots)


def _problems_of_file(
    snapshot: Snapshot,
    number: int,
    located: _Located,
    seen: set[tuple[object, ...]],
    checksums: BlockChecksums | None,
    storage: Storage,
) -> Iterator[str]:
    """Differences of a file, wherever it is now, from what was indexed."""
    path = located.find_path(snapshot, number)
    use = located.uses[snapshot.digest]
    problems = list(
        catch_errors(_file_problems(snapshot, number, path, seen, checksums, storage, use))
    )
    if problems and (now := located.find_renamed(snapshot, number)) != path:
        problems = list(
            catch_errors(_file_problems(snapshot, number, now, seen, checksums, storage, use))
        )
    yield from problems


def _file_problems(
    snapshot: Snapshot,
    number: int,
    path: str,
    seen: set[tuple[object, ...]],
    checksums: BlockChecksums | None,
    storage: Storage,
    use: SnapshotUse,
) -> Iterator[str]:
    """Differences of a file at a path from what was indexed. Snapshots share most files; those in
    `seen` are not read again."""
    file = snapshot.file(number)
    column = snapshot.columns[file.column]
    blocks = snapshot.blocks(np.arange(file.first_block, file.first_block + file.num_blocks))
    key = (path, column.column, file.opened.structure, file.body, blocks.tobytes())
    if key in seen:
        return
    seen.add(key)
    chunks = snapshot.chunks(file)
    try:
        reader = column.kind.open(path, column.column, file.opened, storage=storage)
        found = sampled_content_digest(path, file.opened.size, storage)
        if found != file.body:
            yield f"{path}: its sampled ranges have digest {found}, expected {file.body}: not the file that was indexed"
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
    """Problems of some blocks; if they cannot be read together, each is read separately, so that
    each bad one is reported."""
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
