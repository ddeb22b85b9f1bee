"""The owner's side of a mirror: all files of a folder, within its size and its reserve."""

from __future__ import annotations

import json
import re
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megablend.arrays import Int64s
from megablend.errors import DataError
from megablend.mirror.disk.block_map import DURABLE
from megablend.mirror.disk.database import Database
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
    pages_of_rows,
    read_small,
    write_small,
)
from megablend.system.log import LOG

_NAME = re.compile(r"([0-9a-f]{32})\.(data|map|data\.new)")
_MAX_OPEN_FILES = 256
_UNSYNCED_BYTES = 64 << 20
_UNSYNCED_SECONDS = 30.0


class ScrubReport(NamedTuple):
    """The result of a part of a scrub."""

    num_bytes: int
    wrong: list[tuple[FileKey, Pages]]
    """Pages that were not as they had been written; they are not held any more."""
    is_round_done: bool
    """Whether this part was the last one of a round through all files."""


class Usage(NamedTuple):
    """What a mirror holds."""

    num_bytes: int
    """Of held pages, 4 KiB each."""
    num_files: int


@dataclass(slots=True)
class _Entry:
    key: FileKey
    num_pages: int = 0
    """Pages that are held."""
    use: int = 0


class PageStore:
    """Writes, reads and evicts pages, for one thread at a time; recovers those of earlier owners.

    Methods that write or read raise DataError if the disk fails; the pages concerned are not held
    then.

    Args:
        folder: the caller holds its lock.
        size: bytes of pages that are held at most; None for no limit.
        reserve: bytes of the file system that are left free for others.
        evicts: whether size and reserve are enforced at once, not only after `set_kept`.
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
        self._entries: dict[str, _Entry] = {}
        self._open_files: OrderedDict[str, StoredFile] = OrderedDict()
        self._room = Room(self._list_held, self._find_held)
        self._num_pages = 0
        self.num_evicted = 0
        """Pages evicted since the start."""
        self._unsynced = set[str]()
        self._used = set[str]()
        self._num_unsynced = 0
        self._synced_at = time.monotonic()
        self._to_scrub = self._list_for_scrub()
        self._use = 0
        self._recover()
        if evicts:
            self.evict_to_reserve()

    def _recover(self) -> None:
        """Find out which pages of existing files can be trusted: the owner before may have been
        killed, or the machine have lost its power. Raises: DataError if the disk fails."""
        digests: dict[str, set[str]] = {}
        for path in (self.folder.path / "files").glob("??/*"):
            if found := _NAME.fullmatch(path.name):
                digests.setdefault(found[1], set()).add(found[2])
        uses = self._database.get_all("use")
        num_lost = 0
        for digest, kinds in digests.items():
            stored = None
            if "data.new" in kinds:
                Path(f"{self.folder.data_path(digest)}.new").unlink()
            if kinds >= {"map", "data"}:
                stored = StoredFile.open(self.folder, digest, self._calls)
            if stored is not None:
                num_lost += stored.recover(self._boot)
                key = stored.key
                num_pages = count_pages(stored.map.held().masks)
                if len(stored.map.held(without=DURABLE).blocks):
                    self._unsynced.add(digest)
            elif "map" in kinds:
                discard(self.folder, digest)
                continue
            elif small := read_small(self.folder, digest):
                key = small[0]
                num_pages = count_pages(pages_of_file(key.size).masks)
            else:
                continue
            entry = self._add(key, int(uses.get(digest, 0)))
            self._add_to_count(entry, num_pages)
            self._use = max(self._use, entry.use)
        if num_lost:
            LOG.warning(
                "mirror: %s: recovered %d pages; %d were lost when the machine stopped",
                self.folder.path,
                self._num_pages,
                num_lost,
            )

    def keys(self) -> list[FileKey]:
        """All files that are known."""
        return [entry.key for entry in self._entries.values()]

    def usage(self) -> Usage:
        """Bytes and files that are held."""
        num_files = sum(entry.num_pages > 0 for entry in self._entries.values())
        return Usage(self._num_pages * PAGE_BYTES, num_files)

    def held(self, key: FileKey) -> Pages:
        """The held pages of a file."""
        entry = self._entries.get(key.digest)
        if entry is None or not entry.num_pages:
            return NO_PAGES
        if key.size < SMALL_BYTES:
            return pages_of_file(key.size)
        return self._open(key.digest).map.held()

    def missing(self, key: FileKey, pages: Pages) -> Pages:
        """Those of the pages that are not held. If they are of a file under 64 KiB, all pages of
        the file: it is written as a whole."""
        return self.missing_of(key.digest, key.size, pages)

    def missing_of(self, digest: str, size: int, pages: Pages) -> Pages:
        """As `missing`, of a file whose digest and size are known."""
        entry = self._entries.get(digest)
        is_small = size < SMALL_BYTES
        if entry is None or not entry.num_pages:
            return pages_of_file(size) if is_small and len(pages.blocks) else pages
        if is_small:
            return NO_PAGES
        return self._open(digest).map.missing(pages)

    def count_held(self, digests: Sequence[str]) -> Int64s:
        """How many pages of files are held, by their counts in memory: int64 [files]."""
        entries = map(self._entries.get, digests)
        return np.array([entry.num_pages if entry else 0 for entry in entries], np.int64)

    def write(self, key: FileKey, pages: Pages, data: memoryview, due: float | None) -> bool:
        """Store pages of a file, except those that are held already.

        Args:
            pages: all pages of a file under 64 KiB.
            data: the bytes of all of `pages`, one after another.
            due: when they will be read, in monotonic seconds; None if never.

        Returns: False, with nothing written, if too little may be evicted for them.
        """
        digest = key.digest
        entry = self._entries.get(digest) or self._add(key, self._use)
        new = self.missing(key, pages)
        num_new = count_pages(new.masks)
        if not num_new:
            return True
        if len(new.blocks) > len(pages.blocks) or num_new > count_pages(pages.masks):
            raise ValueError(f"{key.location}: a file of {key.size} bytes is written as a whole")
        if not self._make_room(num_new * PAGE_BYTES, due):
            return False
        try:
            if key.size < SMALL_BYTES:
                write_small(self.folder, key, data, self._calls)
            else:
                self._open(digest).write(new, select_bytes(pages, data, new, key.size))
                self._unsynced.add(digest)
        except (OSError, DataError) as error:
            if not entry.num_pages:
                self._discard(digest)
            cause = error.__cause__ if isinstance(error, DataError) else error
            if isinstance(cause, OSError) and cause.errno in NO_ROOM:
                return False
            if isinstance(error, DataError):
                raise
            raise disk_error(self.folder.data_path(digest), error) from error
        self._add_to_count(entry, num_new)
        self._use += 1
        entry.use = self._use
        self._used.add(digest)
        self._room.note(digest, new, due, self._use)
        self._num_unsynced += num_new * PAGE_BYTES
        self._sync_in_time()
        return True

    def make_room(self, key: FileKey, pages: Pages, due: float | None, in_flight: int = 0) -> bool:
        """Evict what must go before pages that are due at `due` are fetched, and beside them
        `in_flight` bytes of others. Returns: False, with nothing evicted, if too little may go."""
        num_new = count_pages(self.missing(key, pages).masks)
        return self._make_room(num_new * PAGE_BYTES + in_flight, due)

    def read(self, key: FileKey, pages: Pages) -> bytes | None:
        """The bytes of pages, one after another; None if not all of them are held.

        If the checksum of a block is wrong, its pages are not held any more.
        """
        if len(self.missing(key, pages).blocks):
            return None
        digest = key.digest
        if not len(pages.blocks):
            return b""
        if key.size < SMALL_BYTES:
            small = read_small(self.folder, digest)
            if small is not None:
                every = pages_of_file(key.size)
                return bytes(select_bytes(every, memoryview(small[1]), pages, key.size))
            wrong = pages
        else:
            data, wrong = self._open(digest).read(pages)
            if not len(wrong.blocks):
                return data
        LOG.warning("mirror: %s: dropped damaged bytes of %s", self.folder.path, key.location)
        self._remove(digest, wrong)
        return None

    def drop(self, key: FileKey, pages: Pages) -> None:
        """Remove pages that were found to be wrong, and with them all of a damaged block."""
        digest = key.digest
        held = subtract(pages, self.missing(key, pages))
        if not len(held.blocks):
            return
        if key.size >= SMALL_BYTES:
            held = unite(held, self._open(digest).read(held)[1])
        self._remove(digest, held)

    def touch(self, key: FileKey, pages: Pages) -> None:
        """Record that pages are used now."""
        if entry := self._entries.get(key.digest):
            self._use += 1
            entry.use = self._use
            self._used.add(key.digest)
            self._room.touch(key.digest, pages, self._use)

    def set_due(self, needs: Iterable[Need], grace: float = PAST_SECONDS) -> None:
        """Replace all due times, also those given to `write`; see Room.set_due. Pages that are not
        held may have one."""
        self._room.set_due(needs, grace)

    def is_complete(self, key: FileKey) -> bool:
        """Whether all pages of a file are held, by their count in memory; its map is not read."""
        return int(self.count_held([key.digest])[0]) == -(-key.size // PAGE_BYTES)

    def set_kept(self, kept: Kept) -> None:
        """Replace what is wanted or pinned."""
        self._room.set_kept(kept)

    def find_capacity(self) -> int:
        """Bytes that may be held in all, given what others leave of the file system now."""
        return self._num_pages * PAGE_BYTES - self._find_shortage(0)

    def remove_file(self, key: FileKey) -> int:
        """Give up a whole file. Programs that have mapped its copy keep its bytes. Returns: bytes
        of the pages that were held."""
        entry = self._entries.get(key.digest)
        num_pages = 0 if entry is None else entry.num_pages
        if entry is not None and num_pages:
            self._add_to_count(entry, -num_pages)
            self._discard(key.digest)
        return num_pages * PAGE_BYTES

    def evict_to_reserve(self) -> None:
        """Evict until size and reserve are respected, whatever is due, and sync if it is time. To
        be called each second. Raises: MissingFileError if the folder was removed."""
        self.folder.check()
        short = self._find_shortage(0)
        if short > 0:
            self._evict(self._room.choose(short, None, any_due=True) or {})
        self._sync_in_time()

    def sync(self) -> None:
        """Make all held pages durable. Those that the disk fails to sync are not held any more."""
        self._num_unsynced = 0
        self._synced_at = time.monotonic()
        failure = None
        for digest in list(self._unsynced):
            entry = self._entries[digest]
            if entry.num_pages:
                stored = self._open(digest)
                try:
                    stored.sync()
                except DataError as error:
                    failure = error
                self._add_to_count(entry, count_pages(stored.map.held().masks) - entry.num_pages)
            self._unsynced.discard(digest)
        used = [self._entries[digest] for digest in self._used]
        values = {each.key.digest: b"%d" % each.use for each in used}
        self._database.put("use", values)
        self._used.clear()
        if failure is not None:
            raise failure

    def scrub(self, max_bytes: int, is_first: bool = False) -> ScrubReport:
        """Read the next blocks, or the first ones, from the disk, and compare them with their
        checksums. Blocks that differ are not held any more."""
        if is_first:
            self._to_scrub = self._list_for_scrub()
        num_bytes = 0
        wrong: list[tuple[FileKey, Pages]] = []
        for key, pages in self._to_scrub:
            num_bytes += count_pages(pages.masks) * PAGE_BYTES
            if self.read(key, pages) is None:
                wrong.append((key, pages))
            if num_bytes >= max_bytes:
                return ScrubReport(num_bytes, wrong, False)
        self._to_scrub = self._list_for_scrub()
        return ScrubReport(num_bytes, wrong, True)

    def _list_for_scrub(self) -> Iterator[tuple[FileKey, Pages]]:
        """Held blocks, whose next read comes from the disk; maps of files are repaired before."""
        for digest, entry in list(self._entries.items()):
            is_small = entry.key.size < SMALL_BYTES
            if entry.num_pages and not is_small:
                stored = self._open(digest)
                stored.repair()
                self._add_to_count(entry, count_pages(stored.map.held().masks) - entry.num_pages)
            for pages in by_block(self.held(entry.key)):
                # Some pages may have been evicted before the turn of this block
                left = subtract(pages, self.missing(entry.key, pages))
                if len(left.blocks) and not is_small:
                    self._open(digest).forget_cached(int(left.blocks[0]))
                if len(left.blocks):
                    yield entry.key, left

    def remove_all(self) -> None:
        """Delete the mirror: what it has made, and its folder if nothing else is in it."""
        for digest in self._entries:
            self._discard(digest)
        self._database.remove()
        self.folder.remove()

    def get_state(self, location: str) -> tuple[int, str, float] | None:
        """The size, etag and time of the last check of a source file; None if it is unknown."""
        value = self._database.get("state", location)
        return None if value is None else tuple(json.loads(value))

    def put_state(self, location: str, size: int, etag: str, checked_at: float) -> None:
        """Remember a source file's state, whether pages of it are held or not."""
        self._database.put("state", {location: json.dumps([size, etag, checked_at]).encode()})

    def close(self) -> None:
        """Sync, and close all files."""
        self.sync()
        self._database.close()
        self._open_files.clear()

    def _add(self, key: FileKey, use: int) -> _Entry:
        """Register a file that was last used at count `use`."""
        entry = _Entry(key, use=use)
        self._entries[key.digest] = entry
        num_blocks = -(-key.size // BLOCK_BYTES)
        self._room.add_file(key.digest, num_blocks, use, is_whole=key.size < SMALL_BYTES)
        return entry

    def _open(self, digest: str) -> StoredFile:
        """Open a file of at least 64 KiB; a new one if no page is held, or its map is damaged."""
        stored = self._open_files.pop(digest, None)
        if stored is None:
            entry = self._entries[digest]
            if entry.num_pages:
                stored = StoredFile.open(self.folder, digest, self._calls)
            if stored is None:
                self._add_to_count(entry, -entry.num_pages)
                stored = StoredFile.create(self.folder, entry.key, self._boot, self._calls)
        self._open_files[digest] = stored
        if len(self._open_files) > _MAX_OPEN_FILES:
            self._open_files.popitem(last=False)
        return stored

    def _discard(self, digest: str) -> None:
        self._open_files.pop(digest, None)
        discard(self.folder, digest)

    def _add_to_count(self, entry: _Entry, num_more: int) -> None:
        entry.num_pages += num_more
        self._num_pages += num_more

    def _remove(self, digest: str, pages: Pages) -> None:
        """Give up pages. Raises: DataError if the disk fails; they are not held then, either."""
        entry = self._entries[digest]
        # Programs may have mapped a copy that a dataset's folder links to: no holes are made in it
        if entry.key.size < SMALL_BYTES or _is_linked(self.folder.data_path(digest)):
            self._add_to_count(entry, -entry.num_pages)
        else:
            stored = self._open(digest)
            missing = count_pages(stored.map.missing(pages).masks)
            try:
                stored.remove(pages)
            finally:
                self._add_to_count(entry, missing - count_pages(stored.map.missing(pages).masks))
        if not entry.num_pages:
            self._discard(digest)

    def _evict(self, chosen: dict[tuple[str, int], int]) -> None:
        before = self._num_pages
        for digest, rows in groupby(sorted(chosen.items()), lambda each: each[0][0]):
            self._remove(digest, pages_of_rows([(block, mask) for (_, block), mask in rows]))
        self.num_evicted += before - self._num_pages

    def _make_room(self, needed: int, due: float | None) -> bool:
        """Evict what must go for `needed` bytes that are due at `due`; False if too little may."""
        short = self._find_shortage(needed)
        if short <= 0:
            return True
        chosen = self._room.choose(short, due)
        if chosen is None:
            return False
        self._evict(chosen)
        return True

    def _find_shortage(self, needed: int) -> int:
        """Bytes that have to be evicted before `needed` more are written; not above 0 if none."""
        try:
            short = needed + self._reserve - self._calls.free(self.folder.path)
        except OSError as error:
            raise disk_error(self.folder.path, error) from error
        if self._size is not None:
            short = max(short, needed + self._num_pages * PAGE_BYTES - self._size)
        return short

    def _sync_in_time(self) -> None:
        is_late = time.monotonic() > self._synced_at + _UNSYNCED_SECONDS
        if self._num_unsynced >= _UNSYNCED_BYTES or (is_late and self._unsynced):
            self.sync()

    def _list_held(self) -> Iterator[tuple[str, Pages]]:
        return ((digest, self.held(entry.key)) for digest, entry in self._entries.items())

    def _find_held(self, digest: str, block: int) -> int:
        entry = self._entries[digest]
        if not entry.num_pages:
            return 0
        if entry.key.size < SMALL_BYTES:
            return int(pages_of_file(entry.key.size).masks[0])
        return self._open(digest).map.load(block)[0]


def _is_linked(copy: Path) -> bool:
    try:
        return copy.stat().st_nlink > 1
    except OSError:
        return False
