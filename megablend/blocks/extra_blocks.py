"""A cache of decoded blocks of extra columns, most of which several blocks of tokens need one after another."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from megablend.formats.base import DecodedBlock
from megablend.formats.decoded import DecodedBlocks


class ExtraBlocks:
    """Blocks of extra columns by number. Needs no lock: operations of a dict are atomic.

    Args:
        max_bytes: limit for the cached blocks.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._blocks: dict[int, DecodedBlock] = {}  # the most recently used is the last

    def get(self, ids: npt.NDArray[np.int64], *, read: Callable[[list[int]], DecodedBlocks]) -> list[DecodedBlock]:
        """Blocks `ids` int64 [n]; those that are not cached are read, by their numbers."""
        kept = self._blocks
        found = {i: block for i in ids.tolist() if (block := kept.pop(i, None)) is not None}
        missing = [i for i in ids.tolist() if i not in found]
        if missing:
            found |= zip(missing, read(missing), strict=True)
        kept |= found
        size = sum(block.tokens.nbytes + block.offsets.nbytes for block in list(kept.values()))
        for i, block in list(kept.items()):
            if size <= self._max_bytes:
                break
            kept.pop(i, None)
            size -= block.tokens.nbytes + block.offsets.nbytes
        return [found[i] for i in ids.tolist()]
