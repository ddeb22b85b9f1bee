"""The store of a mirror's pages, as used by the process that owns the mirror's folder."""

from __future__ import annotations

import math
import re
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megablend.arrays import Int64s
from megablend.errors import DataError
from megablend.mirror.disk.block_map import DURABLE
from megablend.mirror.disk.database import Database, SourceStates
from megablend.mirror.disk.disk_calls import NO_ROOM, DiskCalls, disk_error
from megablend.mirror.disk.folder import FileKey, MirrorFolder, boot_id
from megablend.mirror.disk.pages import (
    BLOCK_BYTES,
    NO_PAGES,
    PAGE_BYTES,
    Pages,
    by_block,
    count_pages,
    pages_of_file,
    select_bytes,
    subtract,
    unite,
)
from megablend.mirror.disk.room import PAST_SECONDS, Kept, Need, Room
from megablend.mirror.disk.stored_file import (
    SMALL_BYTES,
    StoredFile,
    discard,
    is_whole,
    pages_of_rows,
    read_small,
    write_small,
)
from megablend.system.log import LOG

_NAME = re.compile(r"([0-9a-f]{32})\.(data|map|data\.new)")
_MAX_OPEN_FILES = 256
_UNSYNCED_BYTES = 64 << 20
"""The number of new bytes after which pages are synced: a power failure destroys unsynced pages."""
_UNSYNCED_SECONDS = 30.0


class ScrubReport(NamedTuple):
    """The result of one part of a scrub, which compares held pages with their checksums."""

    num_bytes: int
    wrong: list[tuple[FileKey, Pages]]
    """The pages that did not match their checksums, and were therefore removed."""
    is_round_done: bool
    """Whether this was the last part of a round through all files."""


class Usage(NamedTuple):
    """The total size of all held pages, 4 KiB each, and the number of files with held pages."""

    num_bytes: int
    num_files: int


@dataclass(slots=True)
class _KnownFile:
    key: FileKey
    num_held: int = 0
    """The number of held pages."""
    use: int = 0
    """The value of the store's counter of uses when the file was last used."""


class PageStore:
    """The pages of all files in a mirror's folder. It must be used by only one thread at a time.

    Methods that write or read pages raise DataError if the disk fails; the pages are then not held.

    Args:
        folder: the mirror's folder, whose lock the caller holds.
        size: the maximum number of bytes of pages that are held; None for no limit.
        reserve: the number of bytes of the file system that are left free for others.
        evicts: whether pages are evicted at once if there are too many, and not only by later
            calls.
    """

    def __init__(
        self,
        folder: MirrorFolder,
        *,
        size: int | None,
        reserve: int,
        calls: DiskCalls = DiskCalls(),  # noqa: B008  (a tuple)
        boot: bytes | None = None,
        evicts: bool = True,
    ) -> None:
        self.folder = folder
        self._size = size
        self._reserve = reserve
        self._calls = calls
        self._boot = boot or boot_id()
        self._database = Database(folder.database_path)
        self.states = SourceStates(self._database)
        self._entries: dict[str, _KnownFile] = {}
        self._open_files: OrderedDict[str, StoredFile] = OrderedDict()
        self._room = Room(self._list_held, self._find_held)
        self._num_held = 0
        self.num_evicted = 0
        """The number of pages that were evicted since the start."""
        self._num_uses = 0
        self._unsaved_uses = set[str]()
        """The digests of the files whose last use is not in the database yet."""
        self._unsynced_files = set[str]()
        """The digests of the files with pages that are not durable yet."""
        self._unsynced_bytes = 0
        self._synced_at = time.monotonic()
        self._to_scrub = self._list_for_scrub()
        self._recover()
        if evicts:
            self.evict_to_reserve()

    def _recover(self) -> None:
        """Register the pages of existing files that can be trusted. Other pages may be damaged: the
        previous owner may have been killed, or the machine may have lost power."""
        endings: dict[str, set[str]] = {}
        for path in (self.folder.path / "files").glob("??/*"):
            name = _NAME.fullmatch(path.name)
            if name is not None:
                endings.setdefault(name[1], set()).add(name[2])
        uses = self._database.get_all("use")
        num_lost = 0
        for digest, file_endings in endings.items():
            num_lost += self._recover_file(digest, file_endings, int(uses.get(digest, 0)))
        if num_lost:
            LOG.warning(
                "mirror: %s: recovered %d pages; %d were lost when the machine stopped",
                self.folder.path,
                self._num_held,
                num_lost,
            )

    def _recover_file(self, digest: str, endings: set[str], use: int) -> int:
        """Register a file that can be trusted. Returns: the number of pages that are lost."""
        stored = None
        num_lost = 0
        if "data.new" in endings:
            Path(f"{self.folder.data_path(digest)}.new").unlink()
        if endings >= {"map", "data"}:
            stored = StoredFile.open(self.folder, digest, self._calls)
        if stored is not None:
            num_lost = stored.recover(self._boot)
            key = stored.key
            num_pages = count_pages(stored.map.held())
            if stored.map.held(without=DURABLE):
                self._unsynced_files.add(digest)
        elif "map" in endings:
            discard(self.folder, digest)
            return 0
        elif small := read_small(self.folder, digest):
            key, _ = small
            num_pages = count_pages(pages_of_file(key.size))
        else:
            return 0
        self._add_to_count(self._add(key, use), num_pages)
        self._num_uses = max(self._num_uses, use)
        return num_lost

    def keys(self) -> list[FileKey]:
        """Return the keys of all known files."""
        return [entry.key for entry in self._entries.values()]

    def usage(self) -> Usage:
        """Return the total size of the held pages, and the number of files that have any."""
        num_files = sum(entry.num_held > 0 for entry in self._entries.values())
        return Usage(self._num_held * PAGE_BYTES, num_files)

    def held(self, key: FileKey) -> Pages:
        """Return the held pages of a file."""
        entry = self._entries.get(key.digest)
        if entry is None or not entry.num_held:
            return NO_PAGES
        if key.size < SMALL_BYTES:
            return pages_of_file(key.size)
        return self._open(key.digest).map.held()

    def missing(self, key: FileKey, pages: Pages) -> Pages:
        """Return the given pages that are not held. A file under 64 KiB is written as a whole, so
        either all of its pages are missing or none."""
        return self.missing_of(key.digest, key.size, pages)

    def missing_of(self, digest: str, size: int, pages: Pages) -> Pages:
        """Return the same pages as `missing`, given the digest and the size of the file."""
        entry = self._entries.get(digest)
        is_small = size < SMALL_BYTES
        if entry is None or not entry.num_held:
            return pages_of_file(size) if is_small and pages else pages
        return NO_PAGES if is_small else self._open(digest).map.missing(pages)

    def count_held(self, digests: Sequence[str]) -> Int64s:
        """Return the number of held pages of each file, from counters in memory (int64 [files])."""
        entries = map(self._entries.get, digests)
        return np.array([entry.num_held if entry else 0 for entry in entries], np.int64)

    def write(self, key: FileKey, pages: Pages, data: memoryview, due: float) -> bool:
        """Store pages of a file, except those that are held already.

        Args:
            pages: the pages; all pages of the file if it is under 64 KiB.
            data: the bytes of all these pages, one page after another.
            due: the monotonic time at which the pages will be read; infinite if never.

        Returns: False if nothing was written, since eviction cannot make enough room.
        """
        digest = key.digest
        entry = self._entries.get(digest) or self._add(key, self._num_uses)
        new = self.missing(key, pages)
        num_new = count_pages(new)
        if not num_new:
            return True
        if key.size < SMALL_BYTES and subtract(new, pages):
            raise ValueError(f"{key.location}: a file of {key.size} bytes must be written whole")
        if not self.make_room(num_new * PAGE_BYTES, due):
            return False
        try:
            if key.size < SMALL_BYTES:
                write_small(self.folder, key, data, self._calls)
            else:
                self._open(digest).write(new, select_bytes(pages, data, new, key.size))
                self._unsynced_files.add(digest)
        except (OSError, DataError) as error:
            if not entry.num_held:
                self._discard(digest)
            cause = error.__cause__ if isinstance(error, DataError) else error
            if isinstance(cause, OSError) and cause.errno in NO_ROOM:
                return False
            if isinstance(error, DataError):
                raise
            raise disk_error(self.folder.data_path(digest), error) from error
        self._add_to_count(entry, num_new)
        self._count_use(entry)
        self._room.record_write(digest, new, due, self._num_uses)
        self._unsynced_bytes += num_new * PAGE_BYTES
        self._sync_in_time()
        return True

    def make_room(self, needed: int, due: float) -> bool:
        """Evict enough pages to make room for `needed` bytes of pages, which are due at `due`.
        Returns: False if that is impossible. If so, nothing is evicted."""
        short = self._find_shortage(needed)
        chosen = self._room.choose(short, due) if short > 0 else {}
        if chosen is None:
            return False
        self._evict(chosen)
        return True

    def read(self, key: FileKey, pages: Pages) -> bytes | None:
        """Return the bytes of pages, one page after another; None if not all of them are held.

        If the checksum of a block is wrong, the block's pages are removed.
        """
        if self.missing(key, pages):
            return None
        digest = key.digest
        if not pages:
            return b""
        if key.size < SMALL_BYTES:
            small = read_small(self.folder, digest)
            if small is not None:
                every = pages_of_file(key.size)
                return bytes(select_bytes(every, memoryview(small[1]), pages, key.size))
            wrong = pages
        else:
            data, wrong = self._open(digest).read(pages)
            if not wrong:
                return data
        LOG.warning("mirror: %s: dropped damaged bytes of %s", self.folder.path, key.location)
        self._remove(digest, wrong)
        return None

    def drop(self, key: FileKey, pages: Pages) -> None:
        """Remove pages whose bytes were found to be wrong, and all pages of damaged blocks."""
        digest = key.digest
        held = subtract(pages, self.missing(key, pages))
        if not held:
            return
        if key.size >= SMALL_BYTES:
            held = unite(held, self._open(digest).read(held)[1])
        self._remove(digest, held)

    def touch(self, key: FileKey, pages: Pages) -> None:
        """Record that pages are used now."""
        entry = self._entries.get(key.digest)
        if entry is not None:
            self._count_use(entry)
            self._room.touch(key.digest, pages, self._num_uses)

    def set_due(self, needs: Iterable[Need], grace: float = PAST_SECONDS) -> None:
        """Replace the due times of all pages, held or not: see `Room.set_due`."""
        self._room.set_due(needs, grace)

    def is_complete(self, key: FileKey) -> bool:
        """Return whether all pages of a file are held, according to a counter in memory."""
        return int(self.count_held([key.digest])[0]) == -(-key.size // PAGE_BYTES)

    def set_kept(self, kept: Kept) -> None:
        """Set the blocks that are kept because they belong to wanted datasets."""
        self._room.set_kept(kept)

    def find_capacity(self) -> int:
        """Return how many bytes of pages can be held, given the present free space."""
        return self._num_held * PAGE_BYTES - self._find_shortage(0)

    def remove_file(self, key: FileKey) -> int:
        """Remove a whole file. Programs that have mapped its copy keep its bytes. Returns: the
        number of bytes that were held."""
        entry = self._entries.get(key.digest)
        num_held = 0 if entry is None else entry.num_held
        if entry is not None and num_held:
            self._add_to_count(entry, -num_held)
            self._discard(key.digest)
        return num_held * PAGE_BYTES

    def evict_to_reserve(self) -> None:
        """Evict pages, whatever their due times, to meet the limits `size` and `reserve`. Sync if
        necessary. Called every second. Raises: MissingFileError if the folder no longer exists."""
        self.folder.check()
        short = self._find_shortage(0)
        if short > 0:
            self._evict(self._room.choose(short, math.inf, any_due=True) or {})
        self._sync_in_time()

    def sync(self) -> None:
        """Make all held pages durable. Pages that cannot be synced are removed."""
        self._unsynced_bytes = 0
        self._synced_at = time.monotonic()
        failure = None
        for digest in list(self._unsynced_files):
            entry = self._entries[digest]
            if entry.num_held:
                stored = self._open(digest)
                try:
                    stored.sync()
                except DataError as error:
                    failure = error
                self._count_again(entry, stored)
            self._unsynced_files.discard(digest)
        uses = {digest: b"%d" % self._entries[digest].use for digest in self._unsaved_uses}
        self._database.put("use", uses)
        self._unsaved_uses.clear()
        if failure is not None:
            raise failure

    def scrub(self, max_bytes: int, is_first: bool = False) -> ScrubReport:
        """Read the next `max_bytes` of pages (the first ones if `is_first`) from the disk, and
        compare them with their checksums. Blocks that do not match are removed."""
        if is_first:
            self._to_scrub = self._list_for_scrub()
        num_bytes = 0
        wrong: list[tuple[FileKey, Pages]] = []
        for key, pages in self._to_scrub:
            num_bytes += count_pages(pages) * PAGE_BYTES
            if self.read(key, pages) is None:
                wrong.append((key, pages))
            if num_bytes >= max_bytes:
                return ScrubReport(num_bytes, wrong, False)
        self._to_scrub = self._list_for_scrub()
        return ScrubReport(num_bytes, wrong, True)

    def _list_for_scrub(self) -> Iterator[tuple[FileKey, Pages]]:
        """Repair maps, and yield each held block after dropping it from the page cache."""
        for digest, entry in list(self._entries.items()):
            is_small = entry.key.size < SMALL_BYTES
            if entry.num_held and not is_small:
                stored = self._open(digest)
                stored.repair()
                self._count_again(entry, stored)
            for pages in by_block(self.held(entry.key)):
                # Some pages may have been evicted before it was this block's turn
                left = subtract(pages, self.missing(entry.key, pages))
                if not left:
                    continue
                if not is_small:
                    self._open(digest).forget_cached(int(left.blocks[0]))
                yield entry.key, left

    def remove_all(self) -> None:
        """Delete the store's files, and the mirror's folder if nothing else is in it."""
        for digest in self._entries:
            self._discard(digest)
        self._database.remove()
        self.folder.remove()

    def close(self) -> None:
        """Sync all pages, and close all files."""
        self.sync()
        self._database.close()
        self._open_files.clear()

    def _add(self, key: FileKey, use: int) -> _KnownFile:
        """Register a file that was last used when the counter of uses was `use`."""
        entry = _KnownFile(key, use=use)
        self._entries[key.digest] = entry
        num_blocks = -(-key.size // BLOCK_BYTES)
        self._room.add_file(key.digest, num_blocks, use, is_whole=key.size < SMALL_BYTES)
        return entry

    def _open(self, digest: str) -> StoredFile:
        """Open a file of at least 64 KiB. Create it if no page is held or its map is damaged."""
        stored = self._open_files.pop(digest, None)
        if stored is None:
            entry = self._entries[digest]
            if entry.num_held:
                stored = StoredFile.open(self.folder, digest, self._calls)
            if stored is None:
                self._add_to_count(entry, -entry.num_held)
                stored = StoredFile.create(self.folder, entry.key, self._boot, self._calls)
        self._open_files[digest] = stored
        if len(self._open_files) > _MAX_OPEN_FILES:
            self._open_files.popitem(last=False)
        return stored

    def _discard(self, digest: str) -> None:
        self._open_files.pop(digest, None)
        discard(self.folder, digest)

    def _count_use(self, entry: _KnownFile) -> None:
        self._num_uses += 1
        entry.use = self._num_uses
        self._unsaved_uses.add(entry.key.digest)

    def _add_to_count(self, entry: _KnownFile, num_more: int) -> None:
        entry.num_held += num_more
        self._num_held += num_more

    def _count_again(self, entry: _KnownFile, stored: StoredFile) -> None:
        """Count the held pages in a file's map again, since some of them may have been removed."""
        self._add_to_count(entry, count_pages(stored.map.held()) - entry.num_held)

    def _remove(self, digest: str, pages: Pages) -> None:
        """Remove pages. Raises: DataError if the disk fails. Even then the pages are not held."""
        entry = self._entries[digest]
        if entry.key.size < SMALL_BYTES or is_whole(self.folder.data_path(digest)):
            self._add_to_count(entry, -entry.num_held)
        else:
            stored = self._open(digest)
            missing = count_pages(stored.map.missing(pages))
            try:
                stored.remove(pages)
            finally:
                self._add_to_count(entry, missing - count_pages(stored.map.missing(pages)))
        if not entry.num_held:
            self._discard(digest)

    def _evict(self, chosen: dict[tuple[str, int], int]) -> None:
        """Evict pages, given as masks by digest and block."""
        num_before = self._num_held
        rows = sorted((digest, block, mask) for (digest, block), mask in chosen.items())
        for digest, file_rows in groupby(rows, itemgetter(0)):
            self._remove(digest, pages_of_rows([(block, mask) for _, block, mask in file_rows]))
        self.num_evicted += num_before - self._num_held

    def _find_shortage(self, needed: int) -> int:
        """Return how many bytes must be evicted to write `needed` more bytes. Raises: DataError."""
        try:
            if needed:
                self._calls.check(self.folder.path)
            short = needed + self._reserve - self._calls.free(self.folder.path)
        except OSError as error:
            raise disk_error(self.folder.path, error) from error
        if self._size is not None:
            short = max(short, needed + self._num_held * PAGE_BYTES - self._size)
        return short

    def _sync_in_time(self) -> None:
        is_late = time.monotonic() > self._synced_at + _UNSYNCED_SECONDS
        if self._unsynced_bytes >= _UNSYNCED_BYTES or (is_late and self._unsynced_files):
            self.sync()

    def _list_held(self) -> Iterator[tuple[str, Pages]]:
        return ((digest, self.held(entry.key)) for digest, entry in self._entries.items())

    def _find_held(self, digest: str, block: int) -> int:
        entry = self._entries[digest]
        if not entry.num_held:
            return 0
        if entry.key.size < SMALL_BYTES:
            return int(pages_of_file(entry.key.size).masks[0])
        return self._open(digest).map.load(block).pages
