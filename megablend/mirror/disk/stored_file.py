"""Writes the copy and the map of a mirrored file, for the owner of the mirror. The order of writes
allows the process, the machine or the disk to fail at any time.

A source file under 64 KiB is mirrored as one file without a map. It is written and removed as a
whole, so that bytes that were read from it remain valid.

    size bytes   the bytes of the source file
    n bytes      JSON by FileKey.pack
    16 bytes     "MBSF\\0\\0\\0\\1" | u32 n | u32 crc32 of all before it
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from megablend.errors import DataError, MissingFileError
from megablend.mirror.disk.block_map import (
    DURABLE,
    BlockMap,
    fence,
    map_bytes,
    retire,
    sum_of_pages,
)
from megablend.mirror.disk.disk_calls import DiskCalls, disk_error
from megablend.mirror.disk.folder import FileKey, MirrorFolder
from megablend.mirror.disk.pages import (
    BLOCK_BYTES,
    PAGE_BYTES,
    Pages,
    by_block,
    count_pages,
    drop_empty,
    list_rows,
    pages_of_file,
    ranges_of_pages,
    select_bytes,
    subtract,
)

SMALL_BYTES = 64 << 10
_FOOTER = struct.Struct("<8sII")
_MAGIC = b"MBSF\0\0\0\1"
_MAX_CONTENT_BYTES = SMALL_BYTES + (64 << 10)
_CHECKSUM_MASK = 0xFFFFFFFF
_SLACK_BYTES = 1 << 20
"""The number of bytes that a copy may occupy in addition to its held pages before `repair` makes
holes again."""


class StoredFile:
    """A mirrored file of at least 64 KiB. Only one thread may write and remove its pages."""

    def __init__(
        self, folder: MirrorFolder, block_map: BlockMap, fd: int, calls: DiskCalls
    ) -> None:
        self.key = block_map.key
        self.map = block_map
        self.path = folder.data_path(self.key.digest)
        self._fd = fd
        self._calls = calls
        self._may_be_durable = True
        """Whether records on the disk may have the flag DURABLE, even if none in memory has it."""

    @classmethod
    def create(
        cls, folder: MirrorFolder, key: FileKey, boot: bytes, calls: DiskCalls
    ) -> StoredFile:
        """Create a file without pages. An existing file is replaced. Raises: DataError; OSError if
        there is no room for the map."""
        digest = key.digest
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        discard(folder, digest)
        map_fd = folder.open_file(folder.map_path(digest), flags)
        try:
            # Without holes, since a write to a mapped hole on a full disk would kill the process
            calls.allocate(map_fd, 0, map_bytes(key.size))
            block_map = BlockMap(mmap.mmap(map_fd, map_bytes(key.size)), key, boot)
            block_map.store_header(boot)
            fd = folder.open_file(folder.data_path(digest), flags)
        except (OSError, DataError):
            folder.map_path(digest).unlink(missing_ok=True)
            raise
        finally:
            os.close(map_fd)
        os.truncate(fd, key.size)
        created = cls(folder, block_map, fd, calls)
        created._may_be_durable = False
        return created

    @classmethod
    def open(cls, folder: MirrorFolder, digest: str, calls: DiskCalls) -> StoredFile | None:
        """Open an existing file. Returns: None if the map or the copy is damaged. Raises:
        DataError."""
        map_fd = folder.open_file(folder.map_path(digest), os.O_RDWR)
        try:
            block_map = BlockMap.read(map_fd, mmap.ACCESS_WRITE)
        finally:
            os.close(map_fd)
        if block_map is None or block_map.key.digest != digest:
            return None
        fd = folder.open_file(folder.data_path(digest), os.O_RDWR)
        stored = cls(folder, block_map, fd, calls)
        return stored if os.fstat(fd).st_size == block_map.key.size else None

    def __del__(self) -> None:
        with suppress(OSError):
            os.close(self._fd)

    def write(self, pages: Pages, data: memoryview) -> None:
        """Write pages that are not held, and add them to the map. If writing fails, no page is
        added.

        Args:
            data: the bytes of the pages, one page after another.

        Raises: OSError if the disk is full or fails.
        """
        begin = 0
        try:
            # An extent for each block: btrfs frees an extent only when all of it has become a hole,
            # and pages that are written together would share one
            for part in by_block(pages):
                for offset, size in self._list_ranges(part):
                    self._calls.allocate(self._fd, offset, size)
            for offset, size in self._list_ranges(pages):
                self._calls.write(self._fd, data[begin : begin + size], offset)
                begin += size
        except OSError:
            with suppress(OSError):
                self._punch(pages)
            raise
        fence()
        begin = 0
        for block, mask in list_rows(pages):
            record = self.map.load(block)
            stop = begin + mask.bit_count() * PAGE_BYTES  # the last page may be short
            checksum = record.checksum + sum_of_pages(mask, data[begin:stop])
            # Without DURABLE: the new pages are not synced yet
            self.map.store(block, record.pages | mask, 0, checksum & _CHECKSUM_MASK)
            begin = stop

    def read(self, pages: Pages) -> tuple[bytes, Pages]:
        """Read held pages, and compare the blocks that contain them with their checksums.

        Returns: the bytes of the pages, one page after another; and the wrong pages, which are all
            held pages of blocks that cannot be read or have a wrong checksum. If there are wrong
            pages, the bytes are not valid.
        """
        parts = []
        wrong = []
        for block, mask in list_rows(pages):
            held, _, checksum = self.map.load(block)
            held_pages = pages_of_rows([(block, held)])
            part = pages_of_rows([(block, mask)])
            data = self._read(held_pages)
            if data is None or sum_of_pages(held, data) != checksum:
                wrong.append((block, held))
            else:
                parts.append(select_bytes(held_pages, data, part, self.key.size))
        return b"".join(parts), pages_of_rows(wrong)

    def remove(self, pages: Pages) -> int:
        """Remove pages from the map, and make holes in the copy. Returns: the number of these pages
        that were held.

        Raises: DataError if the disk fails. Even then the pages are not held.
        """
        removed_rows = []
        for block, mask in list_rows(pages):
            held, flags, checksum = self.map.load(block)
            kept = held & ~mask
            if kept:
                removed = held & mask
                data = self._read(pages_of_rows([(block, removed)]))
                if data is None:
                    kept = 0  # the checksum of the other pages cannot be computed
                else:
                    checksum -= sum_of_pages(removed, data)
            self.map.store(block, kept, flags, checksum & _CHECKSUM_MASK)
            removed_rows.append((block, held & ~kept))
        removed_pages = pages_of_rows(removed_rows)
        self.map.add_punch()
        try:
            if self._may_be_durable:
                # Otherwise, after a power loss, the map could record the hole as durable pages
                self._calls.flush(self.map.mapping)
            self._punch(removed_pages)
        except OSError as error:
            raise disk_error(self.path, error) from error
        return count_pages(removed_pages)

    def sync(self) -> None:
        """Make the held pages durable. Raises: DataError if the disk fails. Then pages that were
        not durable are removed, since the system may have lost them."""
        new = self.map.held(without=DURABLE)
        try:
            self._calls.sync(self._fd)
        except OSError as error:
            self.remove(new)
            raise disk_error(self.path, error) from error
        self._may_be_durable = True
        for block in new.blocks.tolist():
            held, _, checksum = self.map.load(block)
            self.map.store(block, held, DURABLE, checksum)

    def recover(self, boot: bytes) -> int:
        """Remove pages that a previous owner wrote and that cannot be trusted. Blocks are kept if
        they are durable, if their checksum is right, or if the machine has not been restarted since
        they were written. Returns: the number of removed pages. Raises: DataError if the disk
        fails."""
        self.repair()
        num_lost = 0
        if self.map.boot != boot:
            for block_pages in by_block(self.map.held(without=DURABLE)):
                _, wrong = self.read(block_pages)
                num_lost += self.remove(wrong)
            self.map.store_header(boot)
        return num_lost

    def repair(self) -> None:
        """Write the header again, remove blocks with damaged records, and make holes for pages that
        are not held, in case an owner exited before doing so. Raises: DataError if the disk
        fails."""
        self.map.store_header(self.map.boot)
        damaged = self.map.find_damage()
        for block in damaged:
            self.map.store(block, 0, 0, 0)
        held = self.map.held()
        try:
            allocated = os.fstat(self._fd).st_blocks * 512
            if damaged or allocated > count_pages(held) * PAGE_BYTES + _SLACK_BYTES:
                self.map.add_punch()
                self._punch(subtract(pages_of_file(self.key.size), held))
        except OSError as error:
            raise disk_error(self.path, error) from error

    def forget_cached(self, block: int) -> None:
        """Drop a block from the system's page cache, so that the next read accesses the disk."""
        os.posix_fadvise(self._fd, block * BLOCK_BYTES, BLOCK_BYTES, os.POSIX_FADV_DONTNEED)

    def _read(self, pages: Pages) -> memoryview | None:
        """Return the bytes of pages, one page after another; None if the disk fails."""
        parts = []
        try:
            for offset, size in self._list_ranges(pages):
                parts.append(os.pread(self._fd, size, offset))
                if len(parts[-1]) < size:
                    return None
        except OSError:
            return None
        return memoryview(b"".join(parts))

    def _punch(self, pages: Pages) -> None:
        for offset, size in self._list_ranges(pages):
            self._calls.punch(self._fd, offset, size + -size % PAGE_BYTES)

    def _list_ranges(self, pages: Pages) -> Iterator[tuple[int, int]]:
        offsets, sizes = ranges_of_pages(pages, self.key.size)
        return zip(offsets.tolist(), sizes.tolist(), strict=True)


def read_small(folder: MirrorFolder, digest: str) -> tuple[FileKey, bytes] | None:
    """Read a mirrored file under 64 KiB. Returns: the key and the bytes of the file; None if it is
    not held or is damaged. Raises: DataError if it cannot be read."""
    path = folder.data_path(digest)
    try:
        with os.fdopen(folder.open_file(path, os.O_RDONLY), "rb") as file:
            content = file.read(_MAX_CONTENT_BYTES)
    except MissingFileError:
        return None
    except OSError as error:
        raise disk_error(path, error) from error
    if len(content) < _FOOTER.size:
        return None
    magic, length, checksum = _FOOTER.unpack_from(content, len(content) - _FOOTER.size)
    size = len(content) - _FOOTER.size - length
    if magic != _MAGIC or size < 0 or checksum != zlib.crc32(content[:-4]):
        return None
    key = FileKey.unpack(content[size : size + length], size)
    return (key, content[:size]) if key.digest == digest else None


def write_small(folder: MirrorFolder, key: FileKey, data: memoryview, calls: DiskCalls) -> None:
    """Atomically write a mirrored file that is smaller than 64 KiB. Raises: OSError; DataError if
    the temporary file cannot be created."""
    metadata = key.pack()
    content = b"".join((data, metadata, _MAGIC, struct.pack("<I", len(metadata))))
    content += struct.pack("<I", zlib.crc32(content))
    path = folder.data_path(key.digest)
    new_path = Path(f"{path}.new")
    new_path.unlink(missing_ok=True)
    fd = folder.open_file(new_path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        calls.write(fd, memoryview(content), 0)
        new_path.rename(path)
    except OSError:
        new_path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def pages_of_rows(rows: list[tuple[int, int]]) -> Pages:
    """Make a set of pages from (block, mask) pairs that are sorted by block."""
    blocks, masks = zip(*rows, strict=True) if rows else ((), ())
    return drop_empty(np.array(blocks, np.uint32), np.array(masks, np.uint64))


def discard(folder: MirrorFolder, digest: str) -> None:
    """Remove a mirrored file if it exists, and notify its readers. Raises: DataError if the disk
    fails."""
    path = folder.map_path(digest)
    try:
        with suppress(MissingFileError):
            fd = folder.open_file(path, os.O_RDWR)
            retire(fd)
            os.close(fd)
        folder.data_path(digest).unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    except OSError as error:
        raise disk_error(path, error) from error


def is_whole(copy: Path) -> bool:
    """Return whether a copy may be removed only as a whole, without making holes, since programs
    may have mapped it: another folder has, or had, a hard link to the copy."""
    try:
        state = copy.stat()
    except OSError:
        return False
    return state.st_nlink > 1 or bool(state.st_mode & stat.S_ISVTX)


def keep_whole(link: Path) -> None:
    """Mark the copy to which `link` is a hard link, so that `is_whole` returns True even after the
    link is removed."""
    state = link.lstat()
    if stat.S_ISREG(state.st_mode) and state.st_nlink > 1:
        link.chmod(stat.S_IMODE(state.st_mode) | stat.S_ISVTX)
