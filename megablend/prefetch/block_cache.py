"""A least-recently-used cache of decoded blocks, bounded in bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from operator import attrgetter
from typing import Any

import numpy as np

from megablend.formats.base import DecodedBlock
from megablend.index.blocks.block_sizes import BLOCK_OVERHEAD_BYTES
from megablend.index.blocks.block_store import BlockStore
from megablend.system.after_fork import unlock_in_children
from megablend.system.log import LOG


class BlockCache:
    """A cache of decoded blocks by number. It can be shared, pickled, and used after a fork.

    Args:
        store: reads the blocks.
        max_bytes: maximum size of the cached blocks and those being read; a single read may exceed
            it.
    """

    def __init__(self, store: BlockStore, max_bytes: int) -> None:
        self.store = store
        self.max_bytes = max_bytes
        self._blocks: OrderedDict[int, DecodedBlock] = OrderedDict()
        self.unlock_after_fork()
        unlock_in_children(self)

    def unlock_after_fork(self) -> None:
        """Replace the lock, which another thread may have held at the fork, and count the bytes
        again, since that thread may have counted a block but not yet stored it."""
        self._lock = threading.Lock()
        self._bytes = sum(map(_bytes, self._blocks.values()))

    def get(self, ids: list[int]) -> list[DecodedBlock]:
        """Return the requested blocks; read those that are not cached. Raises: see
        `BlockStore.read`."""
        blocks = dict[int, DecodedBlock]()
        missing = list[int]()
        with self._lock:
            for i in dict.fromkeys(ids):
                if i in self._blocks:
                    blocks[i] = self._blocks[i]
                    self._blocks.move_to_end(i)
                else:
                    missing.append(i)
        if missing:
            numbers = np.array(missing, np.int64)
            rows = self.store.snapshot.blocks(numbers)
            sizes, reading = self.store.memory_bytes(numbers, rows, documents=True)
            needed = int(sizes.sum()) + int(reading.sum())
            with self._lock:
                self._shrink(self.max_bytes - needed)
            read = dict(zip(missing, self.store.read(numbers, rows=rows), strict=True))
            blocks |= read
            with self._lock:
                for i, block in read.items():
                    if i not in self._blocks:
                        self._bytes += _bytes(block)
                    self._blocks[i] = block
                self._shrink(self.max_bytes)
        return list(map(blocks.__getitem__, ids))

    def resize(self, max_bytes: int) -> None:
        """Change the limit to `max_bytes`."""
        with self._lock:
            self.max_bytes = max_bytes
            self._shrink(max_bytes)

    def _shrink(self, max_bytes: int) -> None:
        """Evict the least recently used blocks. The caller must hold the cache's lock."""
        num_blocks = len(self._blocks)
        num_bytes = self._bytes
        while self._bytes > max_bytes and self._blocks:
            self._bytes -= _bytes(self._blocks.popitem(last=False)[1])
        if len(self._blocks) < num_blocks:
            LOG.debug(
                "%s: evicted %d blocks (%.1f MB) from the block cache; %d remain",
                self.store.snapshot.folder,
                num_blocks - len(self._blocks),
                (num_bytes - self._bytes) / 1e6,
                len(self._blocks),
            )

    def __getstate__(self) -> dict[str, Any]:
        return {"store": self.store, "max_bytes": self.max_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def _bytes(block: DecodedBlock) -> int:
    arrays = (block.tokens, block.offsets, *block.extra)
    size: int = sum(map(attrgetter("nbytes"), arrays), BLOCK_OVERHEAD_BYTES)
    return size
