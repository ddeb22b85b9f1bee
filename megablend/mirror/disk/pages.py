"""Sets of pages of a file. A page is 4 KiB, and a set has a 64-bit mask for each block of 64
pages."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np

from megablend.arrays import Int64s, Uint32s, Uint64s

K = TypeVar("K")
PAGE_BYTES = 4 << 10
BLOCK_BYTES = 256 << 10
PAGES_PER_BLOCK = BLOCK_BYTES // PAGE_BYTES
PORTION_BLOCKS = 4
"""The number of blocks in a portion, which is the part of a file that is requested at a time. A
portion is only 1 MiB, since portions in flight are lost if a process is killed."""
PIECE_BLOCKS = 32
"""The number of blocks in a piece, which is an 8 MiB part of a file. All pages of a piece are kept
by the same nodes."""
ALL_PAGES = (1 << PAGES_PER_BLOCK) - 1
"""The mask of a block that is held completely."""
_LAST_BIT = np.uint64(PAGES_PER_BLOCK - 1)
_BITS_OF_BYTE = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(1, np.uint8)
"""The number of set bits of each byte value (uint8 [256]). `np.bitwise_count` requires NumPy 2."""


class Pages(NamedTuple):
    """A set of pages of a file, as block numbers and masks."""

    blocks: Uint32s
    """The numbers of the blocks with pages in the set, ascending and unique (uint32 [n])."""
    masks: Uint64s
    """The mask of each block, which is not 0 (uint64 [n]). Bit i stands for page i of the block."""

    def __bool__(self) -> bool:
        """Return whether the set contains any pages."""
        return len(self.blocks) > 0

    def at(self, rows: Any) -> Pages:
        """Return the set of pages in selected blocks. `rows` may be anything that indexes a NumPy
        array."""
        return Pages(self.blocks[rows], self.masks[rows])


NO_PAGES = Pages(np.empty(0, np.uint32), np.empty(0, np.uint64))


def pages_of_ranges(offsets: Int64s, sizes: Int64s) -> Pages:
    """Return the pages that contain ranges of bytes.

    Args:
        offsets, sizes: the ranges in bytes (int64 [n]). They may be in any order and overlap.
    """
    _, rows = rows_of_ranges(offsets, sizes)
    return merge_rows(rows)


def rows_of_ranges(offsets: Int64s, sizes: Int64s) -> tuple[Int64s, Pages]:
    """Return the pages of each range separately. There is a row for each block that a range
    overlaps, so a block may have several rows. Empty ranges have no rows.

    Args:
        offsets, sizes: the ranges in bytes (int64 [n]).

    Returns: the index of each row's range (int64 [rows]); the rows.
    """
    nonempty = np.flatnonzero(sizes > 0)
    first = offsets[nonempty] // PAGE_BYTES
    last = (offsets[nonempty] + sizes[nonempty] - 1) // PAGE_BYTES
    counts = last // PAGES_PER_BLOCK - first // PAGES_PER_BLOCK + 1
    range_of_row = np.repeat(np.arange(len(nonempty)), counts)
    row_in_range = np.arange(len(range_of_row)) - np.repeat(np.cumsum(counts) - counts, counts)
    blocks = first[range_of_row] // PAGES_PER_BLOCK + row_in_range
    low = np.maximum(first[range_of_row] - blocks * PAGES_PER_BLOCK, 0)
    high = np.minimum(last[range_of_row] - blocks * PAGES_PER_BLOCK, PAGES_PER_BLOCK - 1)
    from_low = np.uint64(ALL_PAGES) << low.astype(np.uint64)
    up_to_high = np.uint64(ALL_PAGES) >> (_LAST_BIT - high.astype(np.uint64))
    return nonempty[range_of_row], Pages(blocks.astype(np.uint32), from_low & up_to_high)


def pages_of_file(size: int) -> Pages:
    """Return all pages of a file of `size` bytes, in read-only arrays."""
    num_pages = -(-size // PAGE_BYTES)
    return _share_first(num_pages) if num_pages <= PAGES_PER_BLOCK else _make_first(num_pages)


def _make_first(num_pages: int) -> Pages:
    masks = np.full(-(-num_pages // PAGES_PER_BLOCK), ALL_PAGES, np.uint64)
    num_left = num_pages % PAGES_PER_BLOCK
    if num_left:
        masks[-1] = (1 << num_left) - 1
    pages = Pages(np.arange(len(masks), dtype=np.uint32), masks)
    pages.blocks.flags.writeable = False
    pages.masks.flags.writeable = False
    return pages


_share_first = lru_cache(PAGES_PER_BLOCK + 1)(_make_first)
"""`_make_first` with a cache, so that the files of one block, perhaps millions, share arrays."""


def unite(a: Pages, b: Pages) -> Pages:
    """Return the union of two sets of pages of a file."""
    rows = Pages(np.concatenate([a.blocks, b.blocks]), np.concatenate([a.masks, b.masks]))
    return merge_rows(rows)


def add_pages(sets: dict[K, Pages], key: K, pages: Pages) -> None:
    """Add pages to the set `sets[key]`, which is created if it does not exist."""
    sets[key] = unite(sets.get(key, NO_PAGES), pages)


def intersect(a: Pages, b: Pages) -> Pages:
    """Return the intersection of two sets of pages of a file."""
    return drop_empty(a.blocks, a.masks & _masks_at(b, a.blocks))


def subtract(a: Pages, b: Pages) -> Pages:
    """Return the pages of `a` that are not in `b`."""
    return drop_empty(a.blocks, a.masks & ~_masks_at(b, a.blocks))


def drop_empty(blocks: Uint32s, masks: Uint64s) -> Pages:
    """Make a set of pages from ascending blocks, without the blocks whose mask is 0."""
    return Pages(blocks, masks).at(masks != 0)


def count_pages(pages: Pages) -> int:
    """Return the number of pages of a set."""
    return int(count_each(pages.masks).sum())


def count_each(masks: Uint64s) -> Int64s:
    """Return the number of pages in each mask (int64 [n])."""
    octets = np.ascontiguousarray(masks).view(np.uint8).reshape(-1, 8)
    counts: Int64s = _BITS_OF_BYTE[octets].sum(axis=1, dtype=np.int64)
    return counts


def count_bytes(pages: Pages, file_size: int) -> int:
    """Return the total size of pages in bytes. The last page of the file may be incomplete."""
    num_bytes = count_pages(pages) * PAGE_BYTES
    if pages and find_last(pages) == (file_size - 1) // PAGE_BYTES:
        num_bytes -= -file_size % PAGE_BYTES  # the last page may be short
    return num_bytes


def find_last(pages: Pages) -> int:
    """Return the number of the last page of a set, counted from the start of the file."""
    return int(pages.blocks[-1]) * PAGES_PER_BLOCK + int(pages.masks[-1]).bit_length() - 1


def ranges_of_pages(pages: Pages, file_size: int) -> tuple[Int64s, Int64s]:
    """Return the ranges of bytes that pages cover, by ascending offset. Adjacent pages are one
    range. No range exceeds the file.

    Returns: the offsets and the sizes of the ranges in bytes (both int64 [n]).
    """
    begins: list[int] = []
    stops: list[int] = []
    # Bits of Python's integers, since there are usually only a few ranges
    for block, mask in list_rows(pages):
        page = block * PAGES_PER_BLOCK
        while mask:
            num_before = (mask & -mask).bit_length() - 1
            mask >>= num_before
            page += num_before
            count = (mask + 1 & ~mask).bit_length() - 1
            if stops and stops[-1] == page:
                stops[-1] += count
            else:
                begins.append(page)
                stops.append(page + count)
            mask >>= count
            page += count
    offsets = np.array(begins, np.int64) * PAGE_BYTES
    return offsets, np.minimum(np.array(stops, np.int64) * PAGE_BYTES, file_size) - offsets


def select_bytes(pages: Pages, data: memoryview, subset: Pages, file_size: int) -> memoryview:
    """Return the bytes of a subset of pages, one page after another.

    Args:
        data: the bytes of `pages`, one page after another.
    """
    if list_rows(pages) == list_rows(subset):
        return data
    offsets, sizes = ranges_of_pages(pages, file_size)
    data_begins = sizes.cumsum() - sizes
    subset_offsets, subset_sizes = ranges_of_pages(subset, file_size)
    containing = np.searchsorted(offsets, subset_offsets, "right") - 1
    begins = data_begins[containing] + subset_offsets - offsets[containing]
    ranges = zip(begins.tolist(), subset_sizes.tolist(), strict=True)
    return memoryview(b"".join([data[begin : begin + size] for begin, size in ranges]))


def split_portions(pages: Pages) -> list[Pages]:
    """Split a set of pages into one set for each portion. Portions begin at multiples of
    PORTION_BLOCKS."""
    portions = pages.blocks // PORTION_BLOCKS
    if pages and portions[0] == portions[-1]:
        return [pages]
    edges = np.flatnonzero(np.diff(portions)) + 1
    parts = zip(np.split(pages.blocks, edges), np.split(pages.masks, edges), strict=True)
    return [Pages(blocks, masks) for blocks, masks in parts if len(blocks)]


def piece_of(pages: Pages) -> int:
    """Return the number of the piece that contains the pages, which must be in one piece."""
    return int(pages.blocks[0]) // PIECE_BLOCKS


def list_rows(pages: Pages) -> list[tuple[int, int]]:
    """Return the number and the mask of each block of a set of pages."""
    return list(zip(pages.blocks.tolist(), pages.masks.tolist(), strict=True))


def by_block(pages: Pages) -> Iterator[Pages]:
    """Split a set of pages into one set for each block."""
    for i in range(len(pages.blocks)):
        yield pages.at(slice(i, i + 1))


def _masks_at(pages: Pages, blocks: Uint32s) -> Uint64s:
    """Return the mask of each given block. It is 0 if the set has no pages in the block."""
    if not pages:
        return np.zeros(len(blocks), np.uint64)
    row = np.minimum(pages.blocks.searchsorted(blocks), len(pages.blocks) - 1)
    return np.where(pages.blocks[row] == blocks, pages.masks[row], np.uint64(0))


def merge_rows(rows: Pages) -> Pages:
    """Make a set of pages from rows: blocks that may repeat, in any order, and their masks."""
    blocks, masks = rows.at(rows.blocks.argsort(kind="stable"))
    is_first = np.ones(len(blocks), np.bool_)
    is_first[1:] = blocks[1:] != blocks[:-1]
    if is_first.all():
        return Pages(blocks, masks)
    return Pages(blocks[is_first], np.bitwise_or.reduceat(masks, is_first.nonzero()[0]))
