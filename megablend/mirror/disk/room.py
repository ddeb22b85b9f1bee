"""Which pages to evict: pure.

Each page has a key, an integer; the page with the smallest key is evicted first. From small to large:

    -NEVER + n                  pages that nobody has announced, least recently used first: `n` counts
                                uses, the last use of this page was the n-th
    WANTED + n                  pages of datasets that are wanted, in the same way
    -(due time in microseconds) pages that will be read, those that are due last first
    PINNED + n                  pages of pinned datasets, which are never evicted

Each block has an entry in a queue with a lower bound of the keys of its pages. A page that is used
again, becomes due or is gone in the meantime is noticed when its entry is taken out of the queue. So
nothing is sorted again when pages are used, written or evicted.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from megablend.arrays import Float64s, Int64s, Uint32s, Uint64s
from megablend.mirror.disk.folder import FileKey
from megablend.mirror.disk.pages import PAGE_BYTES, Pages, subtract

NEVER = 1 << 62
"""Above all due times in microseconds, and all counts of uses; see the module."""
PAST_SECONDS = 2.0
"""So long after its due time a page counts as read, and as if it had no due time, unless less is
said."""
WANTED = -(NEVER >> 1)
"""Between the keys of pages without a due time and those with one."""
PINNED = NEVER
"""Above the keys of all pages that may be evicted."""
_SORT_SECONDS = 2.0
_SORT_SHARE = 20
"""Due times pass: what is evicted next is sorted again after so many seconds, or times the time that
sorting took."""
_FEW = 4096
_SORTED_AT_A_TIME = 16


class Need(NamedTuple):
    """Pages of a file that are needed, and when."""

    key: FileKey
    pages: Pages
    """Perhaps blocks in any order, with repeats: the earliest of a page's times counts."""
    due: Float64s
    """float64 [blocks], seconds of this process's monotonic clock; infinite: never."""

    @classmethod
    def of(cls, key: FileKey, pages: Pages, due: float) -> Need:
        """A need of pages that are due at the same time."""
        return cls(key, pages, np.full(len(pages.blocks), due))

    def sort(self) -> tuple[Uint32s, Uint64s, Float64s]:
        """Blocks, masks and due times, by block."""
        order = np.argsort(self.pages.blocks, kind="stable")
        return self.pages.blocks[order], self.pages.masks[order], self.due[order]


class Room:
    """Due times and uses of all pages, and a queue of what to evict.

    Args:
        held: the held pages of all files, by digest.
        held_block: the held pages of a block of a file, as a mask.
        now: seconds of the clock of due times.
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
        self._kept: Mapping[str, Int64s] = {}
        self._wholes = set[str]()
        self._due: dict[str, tuple[Uint32s, Uint64s, Float64s]] = {}  # see Need.sort
        self._due_since: dict[tuple[str, int], list[tuple[int, int]]] = {}  # key, mask
        self._queue: list[tuple[int, str, int]] = []  # a heap: key, digest, block
        self._bound = 0  # no page that is held and not in the queue has a smaller key
        self._max_entries = 0  # entries in the queue before it is made anew
        self._is_stale = True

    def add_file(self, digest: str, num_blocks: int, use: int, *, is_whole: bool = False) -> None:
        """A file whose pages were last used at count `use`.

        Args:
            is_whole: all of its pages are held, or none: those that are due first decide.
        """
        if is_whole:
            self._wholes.add(digest)
        self._uses[digest] = np.full(num_blocks, use)

    def set_due(self, needs: Iterable[Need], grace: float = PAST_SECONDS) -> None:
        """All due times, instead of those before; so many seconds after them pages count as
        read."""
        self._grace = grace
        by_file: dict[str, list[Need]] = {}
        for each in needs:
            by_file.setdefault(each.key.digest, []).append(each)
        self._due = {digest: _join(some).sort() for digest, some in by_file.items()}
        self._due_since = {}
        self._is_stale = True

    def set_kept(self, begins: Mapping[str, Int64s]) -> None:
        """What is kept whether it is due or not, instead of what was before: for each block of a file
        WANTED, PINNED or -NEVER, int64 [blocks], by digest."""
        self._kept = begins
        self._is_stale = True

    def _find_use(self, digest: str, blocks: Any) -> Any:
        """The keys of some blocks of a file without a due time; of an int, or of uint32 [n]."""
        begin = self._kept[digest][blocks] if digest in self._kept else -NEVER
        return self._uses[digest][blocks] + begin

    def touch(self, digest: str, pages: Pages, use: int) -> None:
        """Pages are used at count `use`."""
        self._uses[digest][pages.blocks] = use

    def note(self, digest: str, pages: Pages, due: float | None, use: int) -> None:
        """Pages were written, at count `use`, for a read at time `due`; None: for no known read."""
        self.touch(digest, pages, use)
        for block, mask in zip(pages.blocks.tolist(), pages.masks.tolist(), strict=True):
            if due is not None:
                self._due_since.setdefault((digest, block), []).append((_key_of(due), mask))
            heapq.heappush(self._queue, (-NEVER, digest, block))

    def choose(
        self, short: int, due: float | None, *, any_due: bool = False
    ) -> dict[tuple[str, int], int] | None:
        """What to evict so that `short` bytes more can be written, which are due then.

        Args:
            any_due: whenever it is due, as far as there is something; otherwise only what is due
                later, or never.

        Returns: masks by digest and block; None if there is not enough.
        """
        pause = max(min(_SORT_SECONDS, self._grace), _SORT_SHARE * self._sort_seconds)
        if self._now() - self._sorted_at > pause:
            self._is_stale = True
        limit = NEVER if any_due else WANTED if due is None else _key_of(due)
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
            before = chosen.get((digest, block), 0)
            rows = self._list_rows(digest, block, self._held_block(digest, block) & ~before)
            if rows and rows[0][0] <= key:
                chosen[digest, block] = before | rows[0][1]
                short -= rows.pop(0)[1].bit_count() * PAGE_BYTES
            if rows:
                heapq.heappush(self._queue, (rows[0][0], digest, block))
        return chosen

    def _list_rows(self, digest: str, block: int, held: int) -> list[tuple[int, int]]:
        """Held pages of a block as key and mask, what is evicted first before the others."""
        due = self._due_since.get((digest, block), [])
        use = int(self._find_use(digest, block))
        if use >= PINNED:
            return [(use, held)] if held else []
        if digest in self._due:
            blocks, masks, times = self._due[digest]
            begin, stop = np.searchsorted(blocks, np.array([block, block + 1], np.uint32))
            keys = map(_key_of, times[begin:stop].tolist())
            due = [*due, *zip(keys, masks[begin:stop].tolist(), strict=True)]
        found = []
        past = _key_of(self._now() - self._grace)
        for key, mask in sorted(due, reverse=True):  # the earliest first
            if mask & held and key <= past:
                found.append((key, mask & held))
                held &= ~mask
        if found and digest in self._wholes:
            return [(found[0][0], self._held_block(digest, block))]
        if held:
            found.append((use, held))
        elif not found:
            self._due_since.pop((digest, block), None)
        return found[::-1]

    def _refill(self, all_of_it: bool) -> None:
        """Sort what is evicted next, unless the queue has it; all, if the first were chosen."""
        if not self._is_stale and len(self._queue) <= self._max_entries:
            if self._queue and self._queue[0][0] <= self._bound:
                return
            if self._bound == NEVER:  # all is in the queue
                return
        self._sorted_at = self._now()
        files = [(digest, pages) for digest, pages in self._held() if len(pages.blocks)]
        keys = [self._find_keys(digest, pages) for digest, pages in files]
        all_keys = np.concatenate([np.empty(0, np.int64), *keys])
        count = len(all_keys) if all_of_it else max(_FEW, len(all_keys) // _SORTED_AT_A_TIME)
        self._bound = NEVER
        if count < len(all_keys):
            self._bound = min(NEVER, int(np.partition(all_keys, count)[count]))
        self._queue = sorted(
            (key, digest, block)
            for (digest, pages), some in zip(files, keys, strict=True)
            for key, block in zip(
                some[some <= self._bound].tolist(),
                pages.blocks[some <= self._bound].tolist(),
                strict=True,
            )
        )
        self._max_entries = 2 * len(self._queue) + _FEW
        self._is_stale = False
        self._sort_seconds = self._now() - self._sorted_at

    def _find_keys(self, digest: str, pages: Pages) -> Int64s:
        """For each block with held pages a key that none of them is below."""
        keys: Int64s = self._find_use(digest, pages.blocks)
        if digest not in self._due:
            return keys
        pinned = keys >= PINNED
        blocks, masks, times = self._due[digest]
        is_coming = times >= self._now() - self._grace
        if not is_coming.any():
            return keys
        first = np.flatnonzero(np.diff(blocks[is_coming], prepend=-1))
        masks_due = np.bitwise_or.reduceat(masks[is_coming], first)
        due = Pages(blocks[is_coming][first], masks_due)
        last = np.maximum.reduceat(times[is_coming], first)
        is_due = np.isin(pages.blocks, subtract(pages, due).blocks, invert=True)
        at = np.searchsorted(due.blocks, pages.blocks[is_due])
        keys[is_due] = np.fromiter(map(_key_of, last[at].tolist()), np.int64, len(at))
        keys[pinned] = PINNED
        return keys


def _key_of(due: float) -> int:
    """Smaller keys are evicted first: those of pages without a due time are below all of these."""
    return -round(due * 1_000_000)


def _join(needs: list[Need]) -> Need:
    blocks = np.concatenate([each.pages.blocks for each in needs])
    masks = np.concatenate([each.pages.masks for each in needs])
    return Need(needs[0].key, Pages(blocks, masks), np.concatenate([each.due for each in needs]))
