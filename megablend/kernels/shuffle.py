"""numpy.random.RandomState.shuffle: the same swaps in the same order, and the same state afterwards.

What is drawn does not depend on what is shuffled: a buffer of partners is drawn ahead, and their cache lines are on the way when
their swap's turn comes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from megablend.jit import kernel, prefetch
from megablend.kernels.random_state import WORDS, Uint32s, draw_below, temper

BUFFER = 8192
"""Partners drawn at once: 32 KiB."""
AHEAD = 96
"""Swaps between asking for a cache line and using it."""


@kernel
def shuffle(entries: npt.NDArray[Any], key: Uint32s, position: int) -> int:
    """Shuffle entries [at most 2^32] in place with the generator (key, position), which advances; the new position.

    Args:
        entries: one dimension, contiguous.
        key: uint32 [624], MT19937's.
        position: words of the key used up, 0 to 624.
    """
    words, partners = np.empty(WORDS, np.uint32), np.empty(BUFFER + 1, np.uint32)
    temper(key, words)
    last = len(entries) - 1
    while last > 0:
        count = min(BUFFER, last)
        position = draw_below(key, words, position, last, partners, count)
        for k in range(min(AHEAD, count)):
            prefetch(entries, np.int64(partners[k]))
        for k in range(count):
            if k + AHEAD < count:
                prefetch(entries, np.int64(partners[k + AHEAD]))
            here, there = last - k, np.int64(partners[k])
            entry = entries[here]
            entries[here] = entries[there]
            entries[there] = entry
        last -= count
    return position
