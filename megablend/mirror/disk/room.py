"""The order in which pages are evicted, decided without touching the disk.

Each page has a key, an integer; the page with the smallest key is evicted first. From small to
large:

    -NEVER + n                  pages without a due time, least recently used first: the mirror counts
                                uses, and the last use of this page was the n-th
    WANTED + n                  pages without a due time, of wanted datasets, in the same order
    -(due time in microseconds) pages that will be read; those that are due last come first
    PINNED + n                  pages of pinned datasets, which are never evicted

A block's entry in the queue has a lower bound of the keys of its pages. Only when the entry is
taken out of the queue, the true keys are computed: the pages may have been used again, become due
or been removed. So nothing is sorted again when pages are used, written or evicted.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np

from megablend.arrays import Float64s, Int64s, Uint32s, Uint64s
from megablend.mirror.disk.folder import FileKey
from megablend.mirror.disk.pages import PAGE_BYTES, Pages, subtract

NEVER = 1 << 62
"""Greater than all due times in microseconds, and than all counts of uses."""
PAST_SECONDS = 2.0
"""Seconds after which a page that was due counts as read, and as one without a due time: the
default of `grace`."""
WANTED = -(NEVER >> 1)
"""Less than the keys of pages with a due time, greater than those of pages that nobody wants."""
PINNED = NEVER
"""Greater than the keys of all pages that may be evicted."""
_SORT_SECONDS = 2.0
"""Seconds after which the queue is sorted again, since due times pass; `grace` if it is less."""
_SORT_SHARE = 20
"""The queue is not sorted again before so many times the duration of the last sort have passed."""
_MIN_SORTED = 4096
_SORTED_FRACTION = 16
"""The queue is filled with the first one in so many blocks, but at least with _MIN_SORTED."""


class Need(NamedTuple):
    """Pages of a file that will be read, and when."""

    key: FileKey
    pages: Pages
    """Here blocks may be in any order and repeat; of a page's due times the earliest counts."""
    due: Float64s
    """float64 [blocks], seconds of this process's monotonic clock; infinite if never."""

    @classmethod
    def of(cls, key: FileKey, pages: Pages, due: float) -> Need:
        """A need of pages that are due at the same time."""
        return cls(key, pages, np.full(len(pages.blocks), due))

    def sort(self) -> tuple[Uint32s, Uint64s, Float64s]:
        """Blocks, masks and due times, sorted by block."""
        order = np.argsort(self.pages.blocks, kind="stable")
        return self.pages.blocks[order], self.pages.masks[order], self.due[order]


class Kept(Protocol):
    """What is kept even if it is not due."""

    def get(self, digest: str, /) -> Int64s | None:
        """How each block of a file is kept: int64 [blocks], WANTED, PINNED or -NEVER; None if no
        block is."""
        ...


class Room:
    """Due times and uses of all pages, and a queue of what to evict.

    Args:
        held: lists the digest and the held pages of each file.
        held_block: returns the mask of the held pages of a block, given the file's digest.
        now: returns the seconds of the clock that due times are of.
    """

    def __init__(
        self,
        held: Callable[[], Iterable[tuple[str, Pages]]],
        held_block: Callable[[str, int], int],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now = now
        self._grace = PAST_SECONDS
        self._sorted_at = -math.inf
        self._sort_seconds = 0.0
        self._held = held
        self._held_block = held_block
        self._uses: dict[str, Int64s] = {}
        self._kept: Kept = dict[str, Int64s]()
        self._whole_files = set[str]()
        self._due: dict[str, tuple[Uint32s, Uint64s, Float64s]] = {}  # see Need.sort
        # Keys and masks of pages that were written since `set_due`, by digest and block
        self._due_of_written: dict[tuple[str, int], list[tuple[int, int]]] = {}
        self._queue: list[tuple[int, str, int]] = []  # a heap: key, digest, block
        self._least_unqueued = 0  # no page that is held and not in the queue has a smaller key
        self._max_entries = 0  # with more entries the queue is sorted again
        self._is_stale = True

    def add_file(self, digest: str, num_blocks: int, use: int, *, is_whole: bool = False) -> None:
        """Add a file whose pages were last used at count `use`.

        Args:
            is_whole: its pages are held and evicted together, by the earliest of their due times.
        """
        if is_whole:
            self._whole_files.add(digest)
        self._uses[digest] = np.full(num_blocks, use)

    def set_due(self, needs: Iterable[Need], grace: float = PAST_SECONDS) -> None:
        """Replace all due times. A page counts as read `grace` seconds after its due time."""
        self._grace = grace
        by_file: dict[str, list[Need]] = {}
        for each in needs:
            by_file.setdefault(each.key.digest, []).append(each)
        self._due = {
            digest: _concatenate(file_needs).sort() for digest, file_needs in by_file.items()
        }
        self._due_of_written = {}
        self._is_stale = True

    def set_kept(self, kept: Kept) -> None:
        """Replace what is kept even if it is not due."""
        self._kept = kept
        self._is_stale = True

    def _keys_without_due(self, digest: str, blocks: Any) -> Any:
        """The key that pages without a due time have, in a block or blocks of a file: an int for an
        int, int64 [n] for uint32 [n]."""
        begins = self._kept.get(digest)
        return self._uses[digest][blocks] + (-NEVER if begins is None else begins[blocks])

    def touch(self, digest: str, pages: Pages, use: int) -> None:
        """Record that pages are used, at count `use`."""
        self._uses[digest][pages.blocks] = use

    def note(self, digest: str, pages: Pages, due: float | None, use: int) -> None:
        """Record that pages were written, at count `use`, for a read at `due`, if one is known."""
        self.touch(digest, pages, use)
        for block, mask in zip(pages.blocks.tolist(), pages.masks.tolist(), strict=True):
            if due is not None:
                self._due_of_written.setdefault((digest, block), []).append((_key_of(due), mask))
            heapq.heappush(self._queue, (-NEVER, digest, block))

    def choose(
        self, short: int, due: float | None, *, any_due: bool = False
    ) -> dict[tuple[str, int], int] | None:
        """Choose pages to evict so that `short` more bytes can be written.

        Args:
            due: when the new bytes will be read. Only pages that are due later, or never, may be
                evicted. None: only pages without a due time that no dataset wants.
            any_due: evict pages whatever their due time, and as many as there are if that is too
                little.

        Returns: masks by digest and block; None if too few pages may be evicted.
        """
        pause = max(min(_SORT_SECONDS, self._grace), _SORT_SHARE * self._sort_seconds)
        if self._now() - self._sorted_at > pause:
            self._is_stale = True
        if any_due:
            limit = PINNED
        elif due is None:
            limit = WANTED
        else:
            limit = _key_of(due)
        chosen: dict[tuple[str, int], int] = {}
        while short > 0:
            self._refill(bool(chosen))
            if not self._queue or self._queue[0][0] >= limit:
                if any_due:
                    return chosen
                for digest, block in chosen:
                    heapq.heappush(self._queue, (-NEVER, digest, block))
                return None
            key, digest, block = heapq.heappop(self._queue)
            chosen_before = chosen.get((digest, block), 0)
            left = self._held_block(digest, block) & ~chosen_before
            keyed = self._list_keyed_pages(digest, block, left)
            # Pages with a greater key than the entry's bound go back into the queue
            if keyed and keyed[0][0] <= key:
                _, mask = keyed.pop(0)
                chosen[digest, block] = chosen_before | mask
                short -= mask.bit_count() * PAGE_BYTES
            if keyed:
                least_key, _ = keyed[0]
                heapq.heappush(self._queue, (least_key, digest, block))
        return chosen

    def _list_keyed_pages(self, digest: str, block: int, held: int) -> list[tuple[int, int]]:
        """The held pages of a block as (key, mask), in the order in which they are evicted."""
        due_pages = self._due_of_written.get((digest, block), [])
        use = int(self._keys_without_due(digest, block))
        if use >= PINNED:
            return [(use, held)] if held else []
        if digest in self._due:
            blocks, masks, times = self._due[digest]
            begin, stop = np.searchsorted(blocks, np.array([block, block + 1], np.uint32))
            keys = map(_key_of, times[begin:stop].tolist())
            due_pages = [*due_pages, *zip(keys, masks[begin:stop].tolist(), strict=True)]
        keyed = []
        # Greater keys are those of pages that were due so long ago that they count as read
        newest_past = _key_of(self._now() - self._grace)
        for key, mask in sorted(due_pages, reverse=True):  # the earliest first
            if mask & held and key <= newest_past:
                keyed.append((key, mask & held))
                held &= ~mask
        if keyed and digest in self._whole_files:
            return [(keyed[0][0], self._held_block(digest, block))]
        if held:
            keyed.append((use, held))
        elif not keyed:
            self._due_of_written.pop((digest, block), None)
        return keyed[::-1]

    def _refill(self, with_all: bool) -> None:
        """Make the queue begin with what is evicted next. If that takes sorting, the queue gets all
        blocks if `with_all`, and the first part of them otherwise."""
        if not self._is_stale and len(self._queue) <= self._max_entries:
            if self._queue and self._queue[0][0] <= self._least_unqueued:
                return
            if self._least_unqueued == NEVER:  # all blocks are in the queue
                return
        self._sorted_at = self._now()
        files = [(digest, pages) for digest, pages in self._held() if len(pages.blocks)]
        keys = [self._find_least_keys(digest, pages) for digest, pages in files]
        all_keys = np.concatenate([np.empty(0, np.int64), *keys])
        count = len(all_keys) if with_all else max(_MIN_SORTED, len(all_keys) // _SORTED_FRACTION)
        self._least_unqueued = NEVER
        if count < len(all_keys):
            self._least_unqueued = min(NEVER, int(np.partition(all_keys, count)[count]))
        queue = list[tuple[int, str, int]]()
        for (digest, pages), file_keys in zip(files, keys, strict=True):
            is_next = file_keys <= self._least_unqueued
            blocks = pages.blocks[is_next].tolist()
            pairs = zip(file_keys[is_next].tolist(), blocks, strict=True)
            queue.extend((key, digest, block) for key, block in pairs)
        queue.sort()
        self._queue = queue
        self._max_entries = 2 * len(self._queue) + _MIN_SORTED
        self._is_stale = False
        self._sort_seconds = self._now() - self._sorted_at

    def _find_least_keys(self, digest: str, pages: Pages) -> Int64s:
        """A lower bound of the keys of each block's held pages: int64 [blocks]."""
        keys: Int64s = self._keys_without_due(digest, pages.blocks)
        if digest not in self._due:
            return keys
        is_pinned = keys >= PINNED
        blocks, masks, times = self._due[digest]
        is_coming = times >= self._now() - self._grace
        if not is_coming.any():
            return keys
        starts = np.flatnonzero(np.diff(blocks[is_coming], prepend=-1))
        due_masks = np.bitwise_or.reduceat(masks[is_coming], starts)
        due = Pages(blocks[is_coming][starts], due_masks)
        latest = np.maximum.reduceat(times[is_coming], starts)
        # In other blocks a page without a due time has the least key, which is in `keys`
        is_all_due = np.isin(pages.blocks, subtract(pages, due).blocks, invert=True)
        row = np.searchsorted(due.blocks, pages.blocks[is_all_due])
        keys[is_all_due] = np.fromiter(map(_key_of, latest[row].tolist()), np.int64, len(row))
        keys[is_pinned] = PINNED
        return keys


def _key_of(due: float) -> int:
    """The key of pages that are due at `due`, in seconds: the later, the smaller."""
    return -round(due * 1_000_000)


def _concatenate(needs: list[Need]) -> Need:
    """One need for all needs of a file."""
    blocks = np.concatenate([each.pages.blocks for each in needs])
    masks = np.concatenate([each.pages.masks for each in needs])
    return Need(needs[0].key, Pages(blocks, masks), np.concatenate([each.due for each in needs]))
