"""The map of a mirrored file: which pages of each block are held, mapped into memory by its owner
and by all readers.

    0      8   "MBMAP\\0\\0\\1"
    8      8   size of the source file
    16     4   log2 of the block's size        20  4  length of the JSON
    24     8   punches: one more before holes are made; RETIRED: the file was given up
    32     16  id of the machine's start       48  4  crc32 of all of this but punches, and the JSON
    64         JSON by FileKey.pack
    4096   16  for each block: u64 pages | u64 seal << 40 | flags << 32 | checksum

All little-endian. Both words of a record are aligned, and each is stored and loaded by one
instruction: NumPy assigns, and a memoryview of 64-bit items copies, 8 bytes of a constant size.

The checksum is a sum over pages (`sum_of_pages`), to which pages can be added, and from which they
can be removed. The seal makes the exclusive or of both words a multiple of a prime: a single flipped
bit changes that by a power of two, which is none. Where the seal is wrong, also between the stores of
the two words, the block is taken for one that is not held.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib

import numpy as np

from megablend.arrays import Bools, Uint64s
from megablend.errors import DataError
from megablend.mirror.disk.disk_calls import fence
from megablend.mirror.disk.folder import FileKey
from megablend.mirror.disk.pages import BLOCK_BYTES, PAGE_BYTES, Pages, drop_empty

DURABLE = 1
"""The pages of the block are on the disk, whatever becomes of the machine."""
RETIRED = (1 << 64) - 1
HEADER_BYTES = 4096
FIRST_WORD = HEADER_BYTES // 8
SEAL_BITS = 40
PRIME = (1 << 24) - 3
_REST = (1 << SEAL_BITS) - 1
_INVERSE = pow(1 << SEAL_BITS, -1, PRIME)
_HEAD = struct.Struct("<8sQII")
_START = struct.Struct("<16sI")
_START_OFFSET = 32
_MAGIC = b"MBMAP\0\0\1"
_PUNCHES_WORD = 3
_JSON_OFFSET = 64
WORD_FACTORS: Uint64s = np.arange(1, PAGE_BYTES // 4, 2, dtype=np.uint64) * np.uint64(
    0x9E3779B97F4A7C15
)
"""uint64 [512], odd."""


def seal(pages: int, flags: int, checksum: int) -> int:
    """The second word of a record."""
    rest = flags << 32 | checksum
    high = -((pages & _REST) ^ rest) * _INVERSE % PRIME
    return ((pages >> SEAL_BITS) ^ high) << SEAL_BITS | rest


def sum_of_pages(mask: int, data: memoryview) -> int:
    """The share of some pages, whose bytes are in `data` one after another, in their block's
    checksum.

    Of each page the upper half of the sum of its 64-bit words, each times an odd factor, so that every
    flipped bit changes it; then the sum of these, again times odd factors.
    """
    missing = -len(data) % PAGE_BYTES  # at the end of the file
    words = np.frombuffer(bytes(data) + bytes(missing) if missing else data, "<u8")
    sums = np.einsum("ij,j->i", words.reshape(-1, len(WORD_FACTORS)), WORD_FACTORS)
    bits = np.unpackbits(np.array([mask], "<u8").view(np.uint8), bitorder="little")
    pages = np.flatnonzero(bits)[: len(sums)]
    shares = (sums >> np.uint64(32))[: len(pages)] * (2 * pages + 1).astype(np.uint64)
    return int(shares.sum()) & 0xFFFFFFFF


class BlockMap:
    """The mapped records; see the module."""

    def __init__(self, mapping: mmap.mmap, key: FileKey, boot: bytes) -> None:
        self.mapping = mapping
        self.key = key
        self.boot = boot
        self.words = memoryview(mapping).cast("Q")
        """All of the file; records begin at FIRST_WORD."""
        self._records: Uint64s = np.frombuffer(mapping, np.uint64)[FIRST_WORD:].reshape(-1, 2)

    @classmethod
    def read(cls, fd: int, access: int) -> BlockMap | None:
        """Map a file, with mmap.ACCESS_READ, or ACCESS_WRITE for the owner: None if its header is
        damaged, or it was given up. Raises: OSError."""
        length = os.fstat(fd).st_size
        if length < HEADER_BYTES:
            return None
        mapping = mmap.mmap(fd, length, access=access)
        magic, size, _, json_size = _HEAD.unpack_from(mapping)
        boot, checksum = _START.unpack_from(mapping, _START_OFFSET)
        text = mapping[_JSON_OFFSET : min(_JSON_OFFSET + json_size, HEADER_BYTES)]
        right = _sum_header(mapping[: _HEAD.size], boot, text)
        if magic != _MAGIC or length != map_bytes(size) or checksum != right:
            return None
        found = cls(mapping, FileKey.unpack(text, size), boot)
        return None if found.punches == RETIRED else found

    def store_header(self, boot: bytes) -> None:
        """Write all but punches. Raises: DataError if the names of the file are too long."""
        text = self.key.pack()
        if len(text) > HEADER_BYTES - _JSON_OFFSET:
            raise DataError(
                self.key.location,
                f"its location and etag need {len(text)} bytes, but a mirror has room for "
                f"{HEADER_BYTES - _JSON_OFFSET}; leave the file's folder out of `prefixes`",
            )
        self.boot = boot
        head = _HEAD.pack(_MAGIC, self.key.size, BLOCK_BYTES.bit_length() - 1, len(text))
        start = _START.pack(boot, _sum_header(head, boot, text))
        for offset, part in ((0, head), (_START_OFFSET, start), (_JSON_OFFSET, text)):
            self.mapping[offset : offset + len(part)] = part

    @property
    def punches(self) -> int:
        """Changes before holes are made."""
        return self.words[_PUNCHES_WORD]

    def add_punch(self) -> None:
        """Tell readers that what they are reading may become a hole: after pages were removed,
        before the hole is made."""
        fence()
        self.words[_PUNCHES_WORD] = self.punches + 1
        fence()

    def load(self, block: int) -> tuple[int, int, int]:
        """Pages, flags and checksum of a block; zeros if its seal is wrong."""
        pages = self.words[FIRST_WORD + 2 * block]
        word = self.words[FIRST_WORD + 2 * block + 1]
        if (pages ^ word) % PRIME:
            return 0, 0, 0
        return pages, word >> 32 & 0xFF, word & 0xFFFFFFFF

    def store(self, block: int, pages: int, flags: int, checksum: int) -> None:
        """Change a record: of a block without pages, to zeros."""
        record = self._records[block]
        record[1] = np.uint64(seal(pages, flags, checksum) if pages else 0)
        record[0] = np.uint64(pages)

    def held(self, *, without: int = 0) -> Pages:
        """All pages that are held, by blocks that have none of some flags."""
        pages = self._records[:, 0].copy()
        words = self._records[:, 1].copy()
        pages[~_are_sealed(pages, words) | (words & np.uint64(without << 32) != 0)] = 0
        return drop_empty(np.arange(len(pages), dtype=np.uint32), pages)

    def missing(self, pages: Pages) -> Pages:
        """Those of the pages that are not held."""
        at = self._records[pages.blocks]
        held = np.where(_are_sealed(at[:, 0], at[:, 1]), at[:, 0], np.uint64(0))
        return drop_empty(pages.blocks, pages.masks & ~held)

    def find_damage(self) -> list[int]:
        """Blocks whose seal is wrong."""
        records = self._records.copy()
        damaged: list[int] = np.flatnonzero(~_are_sealed(records[:, 0], records[:, 1])).tolist()
        return damaged


def retire(map_fd: int) -> None:
    """Tell readers that a file is given up, also one with a damaged map, which is open for writing.
    Raises: OSError."""
    if os.fstat(map_fd).st_size >= HEADER_BYTES:
        os.pwrite(map_fd, RETIRED.to_bytes(8, "little"), 8 * _PUNCHES_WORD)


def map_bytes(size: int) -> int:
    """Bytes of the map of a file of `size` bytes."""
    return HEADER_BYTES + 16 * -(-size // BLOCK_BYTES)


def _sum_header(head: bytes, boot: bytes, text: bytes) -> int:
    return zlib.crc32(text, zlib.crc32(boot, zlib.crc32(head)))


def _are_sealed(pages: Uint64s, words: Uint64s) -> Bools:
    """Of which records the words belong together."""
    sealed: Bools = (pages ^ words) % np.uint64(PRIME) == 0
    return sealed
