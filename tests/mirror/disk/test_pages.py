"""Sets of pages against Python's sets of page numbers."""

import random
from collections.abc import Iterable

import numpy as np
import pytest

from megablend.mirror.disk.pages import (
    NO_PAGES,
    PAGE_BYTES,
    Pages,
    by_block,
    count_bytes,
    intersect,
    pages_of_file,
    pages_of_ranges,
    ranges_of_pages,
    subtract,
    unite,
)
from megablend.storage.mirror_values import LEAST_SIZE


def numbers(pages: Pages) -> set[int]:
    """The numbers of the pages in the file; the form of the set is checked."""
    assert pages.blocks.dtype == np.uint32
    assert pages.masks.dtype == np.uint64
    blocks = pages.blocks.tolist()
    assert blocks == sorted(set(blocks))
    masks = pages.masks.tolist()
    assert all(masks)
    return {
        64 * block + i
        for block, mask in zip(blocks, masks, strict=True)
        for i in range(64)
        if mask >> i & 1
    }


def make(some: Iterable[int]) -> Pages:
    """The set of these pages, out of ranges of single bytes in any order."""
    offsets = np.array([page * PAGE_BYTES + page % PAGE_BYTES for page in some], np.int64)
    return pages_of_ranges(offsets, np.ones(len(offsets), np.int64))


def draw(rng: random.Random) -> set[int]:
    """Pages in runs and alone, at ends of blocks and pieces more often than elsewhere."""
    some: set[int] = set()
    for _ in range(rng.randrange(8)):
        begin = rng.choice((rng.randrange(9000), 64 * rng.randrange(140), 2048 * rng.randrange(4)))
        begin = max(0, begin - rng.randrange(3))
        some |= set(range(begin, begin + rng.choice((1, 2, 63, 64, 65, 128, rng.randrange(3000)))))
    return some


@pytest.mark.parametrize("seed", range(12))
def test_arithmetic_is_that_of_sets(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(10):
        a = draw(rng)
        b = draw(rng) | {page for page in a if rng.random() < 0.3}
        first = make(rng.sample(sorted(a), len(a)))
        second = make(b)
        assert numbers(first) == a
        assert numbers(unite(first, second)) == a | b
        assert numbers(intersect(first, second)) == a & b
        assert numbers(subtract(first, second)) == a - b
        assert [numbers(each) for each in by_block(first)] == [
            {page for page in a if page // 64 == block} for block in first.blocks.tolist()
        ]


@pytest.mark.parametrize("seed", range(12))
def test_ranges_are_their_pages_and_back(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(10):
        size = rng.choice((rng.randrange(1, 1 << 25), 4096 * rng.randrange(1, 5000)))
        ranges = []
        for _ in range(rng.randrange(12)):
            offset = rng.randrange(size)
            ranges.append((offset, rng.randrange(min(size - offset, 1 << rng.randrange(24)) + 1)))
        offsets, sizes = np.array(ranges, np.int64).reshape(-1, 2).T
        wanted = {
            page
            for offset, length in ranges
            if length
            for page in range(offset // 4096, (offset + length - 1) // 4096 + 1)
        }
        pages = pages_of_ranges(offsets, sizes)
        assert numbers(pages) == wanted
        back = [r.tolist() for r in ranges_of_pages(pages, size)]
        assert all(a + n < b for a, n, b in zip(back[0], back[1], back[0][1:], strict=False))
        bytes_in = sum(min(4096, size - page * 4096) for page in wanted)
        assert count_bytes(pages, size) == sum(back[1]) == bytes_in
        covered = {
            page
            for offset, length in zip(*back, strict=True)
            for page in range(offset // 4096, -(-(offset + length) // 4096))
        }
        assert covered == wanted
        assert all(
            offset % 4096 == 0 and offset + n <= size for offset, n in zip(*back, strict=True)
        )


def test_a_whole_file_is_all_its_pages() -> None:
    for size in (0, 1, 4095, 4096, 4097, 262144, 262145, (1 << 30) + 5):
        pages = pages_of_file(size)
        assert numbers(pages) == set(range(-(-size // 4096)))
        assert count_bytes(pages, size) == size
        assert [r.tolist() for r in ranges_of_pages(pages, size)] == (
            [[0], [size]] if size else [[], []]
        )


def test_nothing_is_a_set_too() -> None:
    some = pages_of_file(10)
    for a, b in ((NO_PAGES, some), (NO_PAGES, NO_PAGES), (some, NO_PAGES)):
        assert numbers(unite(a, b)) == numbers(a) | numbers(b)
        assert numbers(intersect(a, b)) == set()
        assert numbers(subtract(a, b)) == numbers(a) - numbers(b)
    assert count_bytes(NO_PAGES, 10) == 0


def test_the_last_offsets_of_the_largest_files() -> None:
    offset = (1 << 32) * 262144 - 4097
    pages = pages_of_ranges(np.array([offset]), np.array([2]))
    assert numbers(pages) == {offset // 4096, offset // 4096 + 1}


def test_the_least_size_of_a_mirror_is_a_page() -> None:
    assert LEAST_SIZE == PAGE_BYTES
