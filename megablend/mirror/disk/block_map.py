"""The map of a mirrored file, which says which pages of each block are held. The owner and all
readers map it into memory.

    0      8   "MBMAP\\0\\0\\1"
    8      8   size of the source file
    16     4   log2 of the block's size        20  4  length of the JSON
    24     8   punches: incremented before holes are made; RETIRED if the file was given up
    32     16  boot id of the machine          48  4  crc32 of the above but punches, and the JSON
    64         JSON by FileKey.pack
    4096   16  for each block: u64 pages | u64 seal << 40 | flags << 32 | checksum

All numbers are little-endian. Both words of a record are aligned, and each is stored and loaded by
one instruction, since NumPy's assignment and a memoryview of 64-bit items copy a constant size, 8
bytes.

The checksum is a sum over pages (`sum_of_pages`), so that pages can be added and removed. The seal
is chosen so that the exclusive or of both words is a multiple of a prime. A single flipped bit
changes the exclusive or by a power of two, so that it is no longer a multiple. A block whose seal
is wrong counts as not held. The seal is also wrong for a reader that loads one word before the
owner stores a record, and the other word after that.
"""

from __future__ import annotations

import mmap
import os
import platform
import struct
import threading
import zlib
from typing import NamedTuple

import numpy as np

from megablend.arrays import Bools, Uint64s
from megablend.errors import DataError
from megablend.mirror.disk.folder import FileKey
from megablend.mirror.disk.pages import BLOCK_BYTES, PAGE_BYTES, PAGES_PER_BLOCK, Pages, drop_empty

DURABLE = 1
"""A flag of a record, which says that the held pages of the block have been synced to the disk, and
survive a power failure."""
RETIRED = (1 << 64) - 1
"""The value of the counter of punches after the owner has given up the file."""
HEADER_BYTES = 4096
FIRST_WORD = HEADER_BYTES // 8
"""The index of the first word of the first record, in 64-bit words."""
SEAL_BITS = 40
"""The number of bits below the seal in the second word of a record."""
PRIME = (1 << 24) - 3
"""The greatest prime below 2**24, so that a seal fits into the 24 bits above SEAL_BITS."""
_BELOW_SEAL = (1 << SEAL_BITS) - 1
_INVERSE = pow(1 << SEAL_BITS, -1, PRIME)
_HEAD = struct.Struct("<8sQII")
_BOOT_AND_CHECKSUM = struct.Struct("<16sI")
_BOOT_OFFSET = 32
_MAGIC = b"MBMAP\0\0\1"
_PUNCHES_WORD = 3
_JSON_OFFSET = 64
WORD_FACTORS: Uint64s = np.arange(1, PAGE_BYTES // 4, 2, dtype=np.uint64) * np.uint64(
    0x9E3779B97F4A7C15
)
"""An odd factor for each word of a page (uint64 [512])."""
_IS_ORDERED = platform.machine() == "x86_64"
"""Whether the processor keeps loads and stores in order by itself, without `fence`."""


class Record(NamedTuple):
    """The record of a block."""

    pages: int
    """The mask of the held pages: bit i stands for page i of the block."""
    flags: int
    checksum: int


def fence() -> None:
    """Issue a memory fence: this thread's loads and stores before the call, including those of
    system calls, happen before all loads and stores after the call.

    Nothing before the release of a lock is moved to after the release, and nothing after an acquire
    is moved to before the acquire. A release and the acquire after it are not reordered with each
    other either (on ARMv8 they are the instructions LDAR and STLR, or their atomic forms, which
    keep their order). So the release of one lock and the acquire of another one together are a
    fence. A new lock is taken each time, since other threads, a signal handler in this one, or a
    forked child could block on a shared one. x86-64 does not reorder loads with loads or stores
    with stores, and nothing here needs a load to be ordered after a store.
    """
    if _IS_ORDERED:
        return
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()
    lock.release()


def seal(pages: int, flags: int, checksum: int) -> int:
    """Return the second word of a record whose first word is `pages`, including the seal."""
    rest = flags << 32 | checksum
    high = -((pages & _BELOW_SEAL) ^ rest) * _INVERSE % PRIME
    return ((pages >> SEAL_BITS) ^ high) << SEAL_BITS | rest


def sum_of_pages(mask: int, data: memoryview) -> int:
    """Return the sum of some or all pages of a block. The sum of all held pages is the block's
    checksum.

    A page's own sum is the upper half of the sum of its 64-bit words, each multiplied by an odd
    factor, so that every flipped bit changes it. These sums are again multiplied by odd factors,
    and added up modulo 2**32.

    Args:
        mask: the mask of the pages.
        data: the bytes of the pages, one page after another.
    """
    padding = bytes(-len(data) % PAGE_BYTES)  # for the page at the end of the file
    words = np.frombuffer(bytes(data) + padding if padding else data, "<u8")
    sums: list[int] = np.einsum(
        "ij,j->i", words.reshape(-1, len(WORD_FACTORS)), WORD_FACTORS
    ).tolist()
    pages = [page for page in range(PAGES_PER_BLOCK) if mask >> page & 1]
    return (
        sum((total >> 32) * (2 * page + 1) for total, page in zip(sums, pages, strict=False))
        & 0xFFFFFFFF
    )


class BlockMap:
    """The map of a mirrored file, mapped into memory. The module's docstring has the layout."""

    def __init__(self, mapping: mmap.mmap, key: FileKey, boot: bytes) -> None:
        self.mapping = mapping
        self.key = key
        self.boot = boot
        self.words = memoryview(mapping).cast("Q")
        """The whole map as 64-bit words. The records begin at index FIRST_WORD."""
        self._records: Uint64s = np.frombuffer(mapping, np.uint64)[FIRST_WORD:].reshape(-1, 2)

    @classmethod
    def read(cls, fd: int, access: int) -> BlockMap | None:
        """Map the file of a map into memory. Returns: None if the header is damaged, or the owner
        has given up the mirrored file.

        Args:
            fd: a descriptor of the file.
            access: mmap.ACCESS_READ, or mmap.ACCESS_WRITE for the owner.

        Raises: OSError if the file cannot be mapped.
        """
        length = os.fstat(fd).st_size
        if length < HEADER_BYTES:
            return None
        mapping = mmap.mmap(fd, length, access=access)
        magic, size, _, json_size = _HEAD.unpack_from(mapping)
        boot, checksum = _BOOT_AND_CHECKSUM.unpack_from(mapping, _BOOT_OFFSET)
        text = mapping[_JSON_OFFSET : min(_JSON_OFFSET + json_size, HEADER_BYTES)]
        expected = _checksum_header(mapping[: _HEAD.size], boot, text)
        if magic != _MAGIC or length != map_bytes(size) or checksum != expected:
            return None
        block_map = cls(mapping, FileKey.unpack(text, size), boot)
        return None if block_map.punches == RETIRED else block_map

    def store_header(self, boot: bytes) -> None:
        """Write the header, except the counter of punches. Raises: DataError if the file's location
        and etag are too long."""
        text = self.key.pack()
        if len(text) > HEADER_BYTES - _JSON_OFFSET:
            raise DataError(
                self.key.location,
                f"has a location and etag of {len(text)} bytes, but a mirror supports at most "
                f"{HEADER_BYTES - _JSON_OFFSET}; leave the file's folder out of `mirror.prefixes`",
            )
        self.boot = boot
        head = _HEAD.pack(_MAGIC, self.key.size, BLOCK_BYTES.bit_length() - 1, len(text))
        start = _BOOT_AND_CHECKSUM.pack(boot, _checksum_header(head, boot, text))
        for offset, part in ((0, head), (_BOOT_OFFSET, start), (_JSON_OFFSET, text)):
            self.mapping[offset : offset + len(part)] = part

    @property
    def punches(self) -> int:
        """The counter that the owner increments before it makes holes, or RETIRED."""
        return self.words[_PUNCHES_WORD]

    def add_punch(self) -> None:
        """Increment the counter, to notify readers that pages which they are reading may become
        holes. The owner calls this after it removes the pages from the map, and before it makes the
        holes."""
        fence()
        self.words[_PUNCHES_WORD] = self.punches + 1
        fence()

    def load(self, block: int) -> Record:
        """Return the record of a block. If the seal is wrong, all fields are 0."""
        pages = self.words[FIRST_WORD + 2 * block]
        word = self.words[FIRST_WORD + 2 * block + 1]
        if (pages ^ word) % PRIME:
            return Record(0, 0, 0)
        return Record(pages, word >> 32 & 0xFF, word & 0xFFFFFFFF)

    def store(self, block: int, pages: int, flags: int, checksum: int) -> None:
        """Write the record of a block. If `pages` is 0, both words are 0."""
        record = self._records[block]
        record[1] = np.uint64(seal(pages, flags, checksum) if pages else 0)
        record[0] = np.uint64(pages)

    def held(self, *, without: int = 0) -> Pages:
        """Return the held pages, except those of blocks with any of the flags in `without`."""
        pages = self._records[:, 0].copy()
        words = self._records[:, 1].copy()
        pages[~_are_sealed(pages, words) | (words & np.uint64(without << 32) != 0)] = 0
        return drop_empty(np.arange(len(pages), dtype=np.uint32), pages)

    def missing(self, pages: Pages) -> Pages:
        """Return the given pages that are not held."""
        records = self._records[pages.blocks]
        held = np.where(_are_sealed(records[:, 0], records[:, 1]), records[:, 0], np.uint64(0))
        return drop_empty(pages.blocks, pages.masks & ~held)

    def find_damage(self) -> list[int]:
        """Return the blocks whose records have a wrong seal."""
        records = self._records.copy()
        damaged: list[int] = np.flatnonzero(~_are_sealed(records[:, 0], records[:, 1])).tolist()
        return damaged


def retire(map_fd: int) -> None:
    """Mark a file as given up, to notify readers. Its map may be damaged, but must be writable."""
    if os.fstat(map_fd).st_size >= HEADER_BYTES:
        os.pwrite(map_fd, RETIRED.to_bytes(8, "little"), 8 * _PUNCHES_WORD)


def map_bytes(size: int) -> int:
    """Return the size in bytes of the map of a file of `size` bytes."""
    return HEADER_BYTES + 16 * -(-size // BLOCK_BYTES)


def _checksum_header(head: bytes, boot: bytes, text: bytes) -> int:
    return zlib.crc32(text, zlib.crc32(boot, zlib.crc32(head)))


def _are_sealed(pages: Uint64s, words: Uint64s) -> Bools:
    """Return whether the seal of each record is right, given its two words."""
    sealed: Bools = (pages ^ words) % np.uint64(PRIME) == 0
    return sealed
