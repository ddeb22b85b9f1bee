"""Sets of a file's 4 KiB pages, as one mask of 64 pages for each block of 256 KiB: pure
arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from megablend.arrays import Int64s, Uint32s, Uint64s

PAGE_BYTES = 4 << 10
BLOCK_BYTES = 256 << 10
PAGES_PER_BLOCK = BLOCK_BYTES // PAGE_BYTES
PORTION_BLOCKS = 4
"""Blocks of a portion, which is requested at a time: 1 MiB, since what is in flight when a process
is killed is lost."""
PIECE_BLOCKS = 32
"""Blocks of a piece, 8 MiB of a file that have the same homes."""
ALL_PAGES = (1 << PAGES_PER_BLOCK) - 1
"""The mask of a block that is held whole."""
_LAST_BIT = np.uint64(PAGES_PER_BLOCK - 1)
_ONE = np.uint64(1)
_BITS_OF_BYTE = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(1, np.uint8)
"""uint8 [256], how many bits of each byte are set; `np.bitwise_count` needs NumPy 2."""


class Pages(NamedTuple):
    """A set of pages."""

    blocks: Uint32s
    """uint32 [n], ascending, each once."""
    masks: Uint64s
    """uint64 [n], bit i stands for page i of the block; no mask is 0."""


NO_PAGES = Pages(np.empty(0, np.uint32), np.empty(0, np.uint64))


def pages_of_ranges(offsets: Int64s, sizes: Int64s) -> Pages:
    """The pages that contain ranges of bytes.

    Args:
        offsets, sizes: int64 [n], in bytes; ranges may be in any order and overlap.
    """
    _, rows = rows_of_ranges(offsets, sizes)
    return _merge_blocks(*rows)


def rows_of_ranges(offsets: Int64s, sizes: Int64s) -> tuple[Int64s, Pages]:
    """The pages of each range: one row for each block that the range touches, so that blocks may
    repeat. Empty ranges have no rows.

    Args:
        offsets, sizes: int64 [n], in bytes.

    Returns: the index of the range of each row, int64 [m]; the rows.
    """
    nonempty = np.flatnonzero(sizes > 0)
    first = offsets[nonempty] // PAGE_BYTES
    last = (offsets[nonempty] + sizes[nonempty] - 1) // PAGE_BYTES
    counts = last // PAGES_PER_BLOCK - first // PAGES_PER_BLOCK + 1
    of_row = np.repeat(np.arange(len(nonempty)), counts)
    ordinal = np.arange(len(of_row)) - np.repeat(np.cumsum(counts) - counts, counts)
    blocks = first[of_row] // PAGES_PER_BLOCK + ordinal
    low = np.maximum(first[of_row] - blocks * PAGES_PER_BLOCK, 0).astype(np.uint64)
    high = np.minimum(last[of_row] - blocks * PAGES_PER_BLOCK, PAGES_PER_BLOCK - 1).astype(
        np.uint64
    )
    # Bits `low` to `high`
    every = np.uint64(ALL_PAGES)
    masks = (every << low) & (every >> (_LAST_BIT - high))
    return nonempty[of_row], Pages(blocks.astype(np.uint32), masks)


def pages_of_file(size: int) -> Pages:
    """All pages of a file of `size` bytes; not to be written to."""
    num_pages = -(-size // PAGE_BYTES)
    return _first_pages(num_pages) if num_pages <= PAGES_PER_BLOCK else _make_first(num_pages)


def _make_first(num_pages: int) -> Pages:
    masks = np.full(-(-num_pages // PAGES_PER_BLOCK), ALL_PAGES, np.uint64)
    if num_left := num_pages % PAGES_PER_BLOCK:
        masks[-1] = (1 << num_left) - 1
    pages = Pages(np.arange(len(masks), dtype=np.uint32), masks)
    for each in pages:
        each.flags.writeable = False
    return pages


_first_pages = lru_cache(PAGES_PER_BLOCK + 1)(_make_first)
"""Of files of one block, which may be millions."""


def unite(a: Pages, b: Pages) -> Pages:
    """The union of two sets."""
    return _merge_blocks(np.concatenate([a.blocks, b.blocks]), np.concatenate([a.masks, b.masks]))


def intersect(a: Pages, b: Pages) -> Pages:
    """The intersection of two sets."""
    return drop_empty(a.blocks, a.masks & _masks_at(b, a.blocks))


def subtract(a: Pages, b: Pages) -> Pages:
    """Pages of `a` that are not in `b`."""
    return drop_empty(a.blocks, a.masks & ~_masks_at(b, a.blocks))


def drop_empty(blocks: Uint32s, masks: Uint64s) -> Pages:
    """The set of pages of ascending blocks, without the blocks whose mask is 0."""
    nonempty = masks != 0
    return Pages(blocks[nonempty], masks[nonempty])


def count_pages(masks: Uint64s) -> int:
    """How many pages the masks contain."""
    return int(count_each(masks).sum())


def count_each(masks: Uint64s) -> Int64s:
    """How many pages each mask contains: int64 [n]."""
    octets = np.ascontiguousarray(masks).view(np.uint8).reshape(-1, 8)
    counts: Int64s = _BITS_OF_BYTE[octets].sum(axis=1, dtype=np.int64)
    return counts


def count_bytes(pages: Pages, file_size: int) -> int:
    """Bytes of a file of `file_size` bytes in the pages; its last page may be short."""
    last = (file_size - 1) // PAGE_BYTES
    bit = np.uint64(1 << last % PAGES_PER_BLOCK)
    has_last = bool(((pages.blocks == last // PAGES_PER_BLOCK) & (pages.masks & bit != 0)).any())
    return count_pages(pages.masks) * PAGE_BYTES - has_last * (-file_size % PAGE_BYTES)


def ranges_of_pages(pages: Pages, file_size: int) -> tuple[Int64s, Int64s]:
    """Offsets and sizes of the pages in bytes: int64 [n] each, ascending. Adjacent pages are one
    range; no range goes beyond the end of the file."""
    blocks = pages.blocks.astype(np.int64)
    masks = pages.masks
    is_next = blocks[1:] == blocks[:-1] + 1
    before = np.zeros_like(masks)  # bit 0: the page before the block is in the set
    before[1:] = (masks[:-1] >> _LAST_BIT) * is_next
    after = np.zeros_like(masks)  # bit 63: the page after it is
    after[:-1] = (masks[1:] & _ONE) * is_next << _LAST_BIT
    begins = _list_pages(blocks, masks & ~(masks << _ONE | before)) * PAGE_BYTES
    stops = (_list_pages(blocks, masks & ~(masks >> _ONE | after)) + 1) * PAGE_BYTES
    return begins, np.minimum(stops, file_size) - begins


def select_bytes(pages: Pages, data: memoryview, subset: Pages, file_size: int) -> memoryview:
    """The bytes of a subset of pages.

    Args:
        data: the bytes of `pages`, one after another.
    """
    if np.array_equal(pages.blocks, subset.blocks) and np.array_equal(pages.masks, subset.masks):
        return data
    offsets, sizes = ranges_of_pages(pages, file_size)
    data_begins = sizes.cumsum() - sizes
    wanted_offsets, wanted_sizes = ranges_of_pages(subset, file_size)
    containing = np.searchsorted(offsets, wanted_offsets, "right") - 1
    starts = (data_begins[containing] + wanted_offsets - offsets[containing]).tolist()
    parts = [data[a : a + size] for a, size in zip(starts, wanted_sizes.tolist(), strict=True)]
    return memoryview(b"".join(parts))


def split_portions(pages: Pages) -> list[Pages]:
    """The pages of each portion that has some; portions begin at multiples of PORTION_BLOCKS."""
    edges = np.flatnonzero(np.diff(pages.blocks // PORTION_BLOCKS)) + 1
    parts = zip(np.split(pages.blocks, edges), np.split(pages.masks, edges), strict=True)
    return [Pages(blocks, masks) for blocks, masks in parts if len(blocks)]


def by_block(pages: Pages) -> Iterator[Pages]:
    """The pages of each block."""
    for i in range(len(pages.blocks)):
        yield Pages(pages.blocks[i : i + 1], pages.masks[i : i + 1])


def _list_pages(blocks: Int64s, masks: Uint64s) -> Int64s:
    """The number of each page, counted from the start of the file: int64 [n], ascending."""
    nonempty = np.flatnonzero(masks)
    bits = np.unpackbits(masks[nonempty].astype("<u8").view(np.uint8), bitorder="little")
    row, page = np.nonzero(bits.reshape(-1, PAGES_PER_BLOCK))
    return blocks[nonempty][row] * PAGES_PER_BLOCK + page


def _masks_at(pages: Pages, blocks: Uint32s) -> Uint64s:
    """The masks of some blocks, 0 for those that are not in the set."""
    if not len(pages.blocks):
        return np.zeros(len(blocks), np.uint64)
    at = np.minimum(np.searchsorted(pages.blocks, blocks), len(pages.blocks) - 1)
    return np.where(pages.blocks[at] == blocks, pages.masks[at], np.uint64(0))


def _merge_blocks(blocks: Uint32s, masks: Uint64s) -> Pages:
    """The set of pages of blocks that may be in any order and repeat."""
    order = np.argsort(blocks, kind="stable")
    blocks = blocks[order]
    masks = masks[order]
    first = np.flatnonzero(np.append(True, blocks[1:] != blocks[:-1]))
    if len(first) == len(blocks) or not len(blocks):
        return Pages(blocks, masks)
    return Pages(blocks[first], np.bitwise_or.reduceat(masks, first))
