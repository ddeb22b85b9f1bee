"""Decides the order in which pages are evicted, without access to the disk.

Each page has a key, an integer; the page with the smallest key is evicted first. From small to
large:

    -NEVER + n                  pages without a due time, least recently used first: the mirror counts
                                uses, and the last use of this page was the n-th
    WANTED + n                  pages without a due time, of wanted datasets, in the same order
    -(due time in microseconds) pages that will be read; those that are due last come first
    PINNED + n                  pages of pinned datasets, which are never evicted

The queue has an entry for each block, with a lower bound of the keys of the block's pages. The true
keys are computed only when the entry is taken out of the queue, since the pages may have been used
again, become due or been removed by then. So the queue is not sorted again whenever pages are used,
written or evicted.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from megablend.arrays import Float64s, Int64s
from megablend.mirror.disk.folder import FileKey
from megablend.mirror.disk.pages import PAGE_BYTES, Pages, merge_rows, subtract

NEVER = 1 << 62
"""A number that is greater than all due times in microseconds, and all counts of uses."""
PAST_SECONDS = 2.0
"""The default number of seconds for which a page is still treated as due after its due time."""
WANTED = -(NEVER >> 1)
"""A number between the keys of pages with a due time and the keys of pages that nobody needs."""
_MAX_DUE = 1e12
"""The maximum due time in seconds. Later ones are reduced to it, so that keys stay above WANTED."""
PINNED = NEVER
"""The least key of pages that are never evicted."""
_SORT_SECONDS = 2.0
"""Seconds (or `grace`, if less) after which the queue is sorted again, since due times have
passed."""
_SORT_SHARE = 20
"""The minimum pause between two sorts, as a multiple of the duration of the last sort: sorting
takes at most 5 % of the time."""
_MIN_SORTED = 4096
_SORTED_FRACTION = 16
"""After a sort, the queue contains the first 1/16 of all blocks, but at least _MIN_SORTED."""

_Entry: TypeAlias = tuple[int, str, int]
"""An entry of the queue: a key, the digest of a file, and the number of a block."""


class Need(NamedTuple):
    """Pages of a file that will be read, and the times at which they are due."""

    key: FileKey
    pages: Pages
    """The pages. Blocks may repeat, in any order. A page is due at its earliest due time."""
    due: Float64s
    """The monotonic time at which each row will be read; infinite if never (float64 [rows])."""

    @classmethod
    def of(cls, key: FileKey, pages: Pages, due: float = math.inf) -> Need:
        """Make a need of pages that are all due at the same time."""
        return cls(key, pages, np.full(len(pages.blocks), due))

    def at(self, rows: Any) -> Need:
        """Return a need with a selection of the rows: see `Pages.at`."""
        return Need(self.key, self.pages.at(rows), self.due[rows])


class Kept(Protocol):
    """A lookup of the blocks that are kept even if no job needs them."""

    def get(self, digest: str, /) -> Int64s | None:
        """Return the level of each block of a file (int64 [blocks]): WANTED, PINNED, or -NEVER if
        the block need not be kept. Return None if no block of the file is kept."""
        ...


class Room:
    """The due times and last uses of all pages, and a queue of the blocks to evict next.

    Args:
        list_held: returns pairs of the digest and the held pages of each file.
        find_held: returns the mask of the held pages of a block, given the file's digest and the
            block's number.
        now: returns the present time in seconds, by the same clock as due times.
    """

    def __init__(
        self,
        list_held: Callable[[], Iterable[tuple[str, Pages]]],
        find_held: Callable[[str, int], int],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now = now
        self._grace = PAST_SECONDS
        self._sorted_at = -math.inf
        self._sort_seconds = 0.0
        self._list_held = list_held
        self._find_held = find_held
        self._uses: dict[str, Int64s] = {}
        self._kept: Kept = dict[str, Int64s]()
        self._whole_files = set[str]()
        self._due: dict[str, Need] = {}  # sorted by block
        # Keys and masks of pages that were written since `set_due`, by digest and block
        self._due_of_written: dict[tuple[str, int], list[tuple[int, int]]] = {}
        self._queue: list[_Entry] = []  # a heap
        # No page that is held and not in the queue has a smaller key; NEVER if there is none
        self._least_unqueued = 0
        self._max_entries = 0  # with more entries the queue is sorted again
        self._is_stale = True

    def add_file(self, digest: str, num_blocks: int, use: int, *, is_whole: bool = False) -> None:
        """Add a file whose pages were last used when the counter of uses was `use`.

        Args:
            is_whole: whether all pages of the file are held and evicted together. If so, all of
                them are due at the earliest of their due times.
        """
        if is_whole:
            self._whole_files.add(digest)
        self._uses[digest] = np.full(num_blocks, use)

    def set_due(self, needs: Iterable[Need], grace: float = PAST_SECONDS) -> None:
        """Replace all due times. A page is treated as read `grace` seconds after its due time."""
        self._grace = grace
        by_file: dict[str, list[Need]] = {}
        for need in needs:
            by_file.setdefault(need.key.digest, []).append(need)
        self._due = {digest: _sort(file_needs) for digest, file_needs in by_file.items()}
        self._due_of_written = {}
        self._is_stale = True

    def set_kept(self, kept: Kept) -> None:
        """Set the blocks that are kept even if no job needs them."""
        self._kept = kept
        self._is_stale = True

    def touch(self, digest: str, pages: Pages, use: int) -> None:
        """Record that pages were used when the counter of uses was `use`."""
        self._uses[digest][pages.blocks] = use

    def record_write(self, digest: str, pages: Pages, due: float, use: int) -> None:
        """Record that pages were written when the counter of uses was `use`. They will be read at
        the time `due`, or never if `due` is infinite."""
        self.touch(digest, pages, use)
        for block, mask in zip(pages.blocks.tolist(), pages.masks.tolist(), strict=True):
            if due < math.inf:
                self._due_of_written.setdefault((digest, block), []).append((_key_of(due), mask))
            heapq.heappush(self._queue, (-NEVER, digest, block))

    def choose(
        self, short: int, due: float, *, any_due: bool = False
    ) -> dict[tuple[str, int], int] | None:
        """Choose at least `short` bytes of pages to evict, so that new pages can be written.

        Args:
            due: the time at which the new pages will be read. Only pages that are due later, or
                never, may be evicted. If it is infinite, only unwanted pages without a due time may
                be evicted.
            any_due: whether pages with any due time may be evicted. Then pages are chosen even if
                they are not enough.

        Returns: the masks of the pages, by digest and block; None if too few pages may be evicted.
        """
        pause = max(min(_SORT_SECONDS, self._grace), _SORT_SHARE * self._sort_seconds)
        if self._now() - self._sorted_at > pause:
            self._is_stale = True
        if any_due:
            limit = PINNED
        elif due == math.inf:
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
            bound, digest, block = heapq.heappop(self._queue)
            chosen_before = chosen.get((digest, block), 0)
            left = self._find_held(digest, block) & ~chosen_before
            keyed = self._list_by_key(digest, block, left)
            # Pages with a greater key than the entry's bound go back into the queue
            if keyed and keyed[0][0] <= bound:
                _, mask = keyed.pop(0)
                chosen[digest, block] = chosen_before | mask
                short -= mask.bit_count() * PAGE_BYTES
            if keyed:
                least_key, _ = keyed[0]
                heapq.heappush(self._queue, (least_key, digest, block))
        return chosen

    def _list_by_key(self, digest: str, block: int, held: int) -> list[tuple[int, int]]:
        """Return pairs (key, mask) of the held pages of a block, in the order of eviction."""
        key_without_due = int(self._keys_without_due(digest, block))
        if key_without_due >= PINNED:
            return [(key_without_due, held)] if held else []
        keyed = []
        left = held
        # From the earliest due time on, which is the one that counts for a page with several
        for key, mask in sorted(self._list_due(digest, block), reverse=True):
            if mask & left:
                keyed.append((key, mask & left))
                left &= ~mask
        if keyed and digest in self._whole_files:
            return [(keyed[0][0], self._find_held(digest, block))]
        if left:
            keyed.append((key_without_due, left))
        elif not keyed:
            self._due_of_written.pop((digest, block), None)
        return keyed[::-1]

    def _list_due(self, digest: str, block: int) -> list[tuple[int, int]]:
        """Return pairs (key, mask) of the pages of a block whose due time has not passed yet."""
        due_pages = [*self._due_of_written.get((digest, block), [])]
        if digest in self._due:
            _, (blocks, masks), times = self._due[digest]
            begin, stop = np.searchsorted(blocks, np.array([block, block + 1], np.uint32))
            keys = map(_key_of, times[begin:stop].tolist())
            due_pages += zip(keys, masks[begin:stop].tolist(), strict=True)
        greatest = _key_of(self._now() - self._grace)
        return [(key, mask) for key, mask in due_pages if key <= greatest]

    def _keys_without_due(self, digest: str, blocks: Any) -> Any:
        """Return the key of a block's pages without a due time. Given an array of blocks (uint32
        [n]), return the key for each (int64 [n])."""
        kept = self._kept.get(digest)
        return self._uses[digest][blocks] + (-NEVER if kept is None else kept[blocks])

    def _refill(self, with_all: bool) -> None:
        """Sort the queue again if the pages to evict next may not be at its front. After that, it
        contains all blocks if `with_all` is set, and otherwise only the blocks to evict first."""
        has_next = self._least_unqueued == NEVER or (
            self._queue and self._queue[0][0] <= self._least_unqueued
        )
        if has_next and not self._is_stale and len(self._queue) <= self._max_entries:
            return
        self._sorted_at = self._now()
        files = [(digest, pages) for digest, pages in self._list_held() if pages]
        keys = [self._find_least_keys(digest, pages) for digest, pages in files]
        all_keys = np.concatenate([np.empty(0, np.int64), *keys])
        count = len(all_keys) if with_all else max(_MIN_SORTED, len(all_keys) // _SORTED_FRACTION)
        self._least_unqueued = NEVER
        if count < len(all_keys):
            self._least_unqueued = min(NEVER, int(np.partition(all_keys, count)[count]))
        queue: list[_Entry] = []
        for (digest, pages), file_keys in zip(files, keys, strict=True):
            is_queued = file_keys <= self._least_unqueued
            blocks = pages.blocks[is_queued].tolist()
            pairs = zip(file_keys[is_queued].tolist(), blocks, strict=True)
            queue.extend((key, digest, block) for key, block in pairs)
        queue.sort()
        self._queue = queue
        self._max_entries = 2 * len(self._queue) + _MIN_SORTED
        self._is_stale = False
        self._sort_seconds = self._now() - self._sorted_at

    def _find_least_keys(self, digest: str, pages: Pages) -> Int64s:
        """Return a lower bound of the keys of each block's held pages (int64 [blocks])."""
        keys: Int64s = self._keys_without_due(digest, pages.blocks)
        if digest not in self._due:
            return keys
        is_pinned = keys >= PINNED
        need = self._due[digest]
        coming = need.at(need.due >= self._now() - self._grace)
        if not coming.pages:
            return keys
        due = merge_rows(coming.pages)
        starts = np.searchsorted(coming.pages.blocks, due.blocks)
        latest = np.maximum.reduceat(coming.due, starts)
        # In other blocks a page without a due time has the least key, which is in `keys`
        is_all_due = np.isin(pages.blocks, subtract(pages, due).blocks, invert=True)
        rows = np.searchsorted(due.blocks, pages.blocks[is_all_due])
        keys[is_all_due] = [_key_of(time) for time in latest[rows].tolist()]
        keys[is_pinned] = PINNED
        return keys


def _key_of(due: float) -> int:
    """Return the key of pages that are due at the time `due` in seconds. Later pages have smaller
    keys, but even pages with an infinite due time have greater keys than wanted pages without
    one."""
    return -round(min(due, _MAX_DUE) * 1_000_000)


def concatenate(needs: Sequence[Need]) -> tuple[Pages, Float64s]:
    """Concatenate the rows and the due times of one or more needs."""
    blocks = np.concatenate([need.pages.blocks for need in needs])
    masks = np.concatenate([need.pages.masks for need in needs])
    return Pages(blocks, masks), np.concatenate([need.due for need in needs])


def _sort(needs: Sequence[Need]) -> Need:
    """Combine all needs of a file into one need, sorted by block."""
    need = Need(needs[0].key, *concatenate(needs))
    return need.at(np.argsort(need.pages.blocks, kind="stable"))
