"""Shares: the pages of a revision's files that a node must hold.

A dataset may have a million files, or many terabytes. So a share is stored in columns, with about
50 bytes per file and 12 per piece, and only pages that are fetched become objects.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from megablend.arrays import Bools, Int64s, Uint8s, Uint32s, Uint64s
from megablend.mirror.catalog.manifest import NO_FILES, Manifest
from megablend.mirror.catalog.reconcile import FileSizes
from megablend.mirror.disk.pages import (
    BLOCK_BYTES,
    PAGE_BYTES,
    PIECE_BLOCKS,
    Pages,
    pages_of_file,
)
from megablend.mirror.disk.room import NEVER

_PIECE_PAGES = PIECE_BLOCKS * BLOCK_BYTES // PAGE_BYTES
_NUM_RECENT = 16


@dataclass(frozen=True, eq=False)
class Share:
    """The pages of a revision that a node must hold, as a table with a row for each piece."""

    digests: Uint8s
    """The digest of each file's key (uint8 [files, 16]). All files of the revision are included."""
    sizes: Int64s
    """The size of each file in bytes (int64 [files])."""
    file_index: Int64s
    """The index of each row's file, ascending (int64 [rows])."""
    pieces: Uint32s
    """The number of each row's piece, ascending within a file (uint32 [rows])."""

    def __len__(self) -> int:
        """Return the number of files of the revision, with or without pages in the share."""
        return len(self.sizes)

    @cached_property
    def ids(self) -> Uint64s:
        """The first eight bytes of each file's digest, as a number (uint64 [files])."""
        return self.digests.view(">u8")[:, 0].astype(np.uint64)

    @property
    def row_ids(self) -> Uint64s:
        """The element of `ids` for each row's file (uint64 [rows])."""
        return self.ids[self.file_index]

    @cached_property
    def num_pages(self) -> Int64s:
        """The number of pages of each file that are in the share (int64 [files])."""
        all_pages = -(-self.sizes // PAGE_BYTES)
        left = all_pages[self.file_index] - self.pieces.astype(np.int64) * _PIECE_PAGES
        counts = np.bincount(self.file_index, np.minimum(left, _PIECE_PAGES), len(self))
        return counts.astype(np.int64)

    @cached_property
    def num_bytes(self) -> int:
        """The total size of the pages in bytes."""
        return PAGE_BYTES * int(self.num_pages.sum())

    def list_digests(self, begin: int, stop: int) -> list[str]:
        """Return the digests of the files `begin` to `stop` - 1, as hex strings."""
        digits = self.digests[begin:stop].tobytes().hex()
        return [digits[i : i + 32] for i in range(0, len(digits), 32)]

    def pages_of(self, index: int) -> Pages:
        """Return the pages of a file that are in the share, given the file's index."""
        begin, stop = np.searchsorted(self.file_index, [index, index + 1])
        pieces = self.pieces[begin:stop].astype(np.int64)
        every = pages_of_file(int(self.sizes[index]))
        if len(pieces) * PIECE_BLOCKS >= len(every.blocks):
            return every
        blocks = (pieces[:, None] * PIECE_BLOCKS + np.arange(PIECE_BLOCKS)).ravel()
        return every.at(blocks[blocks < len(every.blocks)])

    def select(self, is_own: Bools) -> Share:
        """Return a share with the rows for which `is_own` is true.

        Args:
            is_own: bool [rows].
        """
        return replace(self, file_index=self.file_index[is_own], pieces=self.pieces[is_own])

    def find_sizes(self) -> FileSizes:
        """Return a table of the files in the share, with the number of bytes of each."""
        return FileSizes.of(self.ids, PAGE_BYTES * self.num_pages)


def make_share(manifest: Manifest) -> Share:
    """Return a share that contains all pages of all files of a manifest."""
    sizes = manifest.sizes
    counts = -(-sizes // (_PIECE_PAGES * PAGE_BYTES))
    file_index = np.repeat(np.arange(len(sizes)), counts)
    pieces = np.arange(len(file_index)) - np.repeat(np.cumsum(counts) - counts, counts)
    return Share(manifest.digests, sizes, file_index, pieces.astype(np.uint32))


NO_SHARE = make_share(NO_FILES)


class Kept:
    """The pages that the store must keep even if no job needs them. They are found by the digest of
    the file.

    Args:
        shares: pairs of a share and its level, which is room.WANTED or room.PINNED.
    """

    def __init__(self, shares: Iterable[tuple[Share, int]]) -> None:
        self._shares = [(share, level, np.argsort(share.ids)) for share, level in shares]
        self.get = lru_cache(_NUM_RECENT)(self._find)
        """`_find` with a cache, since the blocks of a file are looked up one after another."""

    def __contains__(self, digest: object) -> bool:
        return isinstance(digest, str) and self._find_levels(digest) != []

    def _find(self, digest: str) -> Int64s | None:
        """Return the level of each block of a file; None if no share contains the file.

        Returns: int64 [blocks]; WANTED, PINNED or, for blocks that need not be kept, -NEVER.
        """
        found = self._find_levels(digest)
        if not found:
            return None
        _, size, _ = found[0]
        levels = np.full(-(-size // BLOCK_BYTES), -NEVER)
        for blocks, _, level in found:
            levels[blocks] = np.maximum(levels[blocks], level)
        return levels

    def _find_levels(self, digest: str) -> list[tuple[Uint32s, int, int]]:
        """Return, for each share that contains a file, the file's pieces in the share, the file's
        size, and the level of the share."""
        found = []
        number = np.uint64(int(digest[:16], 16))
        for share, level, order in self._shares:
            place = int(np.searchsorted(share.ids, number, sorter=order))
            index = int(order[place]) if place < len(order) else 0
            if share.list_digests(index, index + 1) == [digest]:
                found.append((share.pages_of(index).blocks, int(share.sizes[index]), level))
        return found
