"""Shuffle as numpy.random.RandomState.shuffle does: with the same swaps in the same order, and the
same state of the generator afterwards.

Random draws do not depend on the entries: swap partners are drawn one buffer ahead, so that their
cache lines are prefetched before their swap. The swaps of one buffer and the draws of the next are
one loop: the draws compute while the swaps wait for memory.

Source: numpy's legacy `random_interval`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from megablend.arrays import Uint32s
from megablend.intrinsics import prefetch
from megablend.jit import device, kernel

# MT19937 (Matsumoto and Nishimura, 1998)
WORDS = 624
_MIDDLE = 397
_UPPER = np.uint32(0x80000000)
_LOWER = np.uint32(0x7FFFFFFF)
_MATRIX = np.uint32(0x9908B0DF)
_TEMPER_B = np.uint32(0x9D2C5680)
_TEMPER_C = np.uint32(0xEFC60000)
_0 = np.uint32(0)
_1 = np.uint32(1)
_7 = np.uint32(7)
_11 = np.uint32(11)
_15 = np.uint32(15)
_18 = np.uint32(18)

Entries = npt.NDArray[Any]

BUFFER = 8192
"""Number of swap partners that are drawn at once (32 KiB)."""
AHEAD = 96
"""Prefetch distance, in swaps."""


@kernel
def shuffle(entries: Entries, key: Uint32s, position: int) -> int:
    """Shuffle entries in place with the generator (key, position), whose key is advanced. Returns
    the new position.

    Args:
        entries: [n], at most 2^32, contiguous.
        key: uint32 [624], the state of MT19937.
        position: number of words of the key that are used up, 0 to 624.
    """
    last = len(entries) - 1
    count = 0
    if last < 1:
        return position
    words = np.empty(WORDS, np.uint32)
    temper(key, words)
    # A buffer; AHEAD entries of any content, which are prefetched but not used; and room for a draw
    # that is not accepted
    room = min(BUFFER, last) + AHEAD + 1
    partners = np.zeros(room, np.uint32)
    next_partners = np.zeros(room, np.uint32)
    while last > 0:
        next_last = last - count
        next_count = min(BUFFER, next_last)
        for k in range(min(AHEAD, count)):
            prefetch(entries, np.int64(partners[k]))
        position, done = _draw(
            key,
            words,
            position,
            next_last,
            next_partners,
            next_count,
            entries,
            last,
            partners,
            count,
        )
        _swap(entries, last, partners, done, count)
        partners, next_partners = next_partners, partners
        last = next_last
        count = next_count
    return position


@device
def _draw(
    key: Uint32s,
    words: Uint32s,
    position: int,
    bound: int,
    out: Uint32s,
    count: int,
    entries: Entries,
    last: int,
    partners: Uint32s,
    swaps: int,
) -> tuple[int, int]:
    """Draw `count` uniform numbers: the first in [0, bound], the next in [0, bound - 1], and so on;
    bound < 2^32, count <= bound.

    Each number is a random word, masked to the bits of its bound, and drawn again while it is above
    the bound. In the meantime, up to `swaps` swaps of entries[last], entries[last - 1], ... with
    their partners are made, one for each word.

    Args:
        key: uint32 [WORDS], is advanced.
        words: uint32 [WORDS], tempered from the key.
        position: number of words that are used up, 0 to WORDS.
        out: uint32, with room for count + 1.
        partners: uint32, partners of the swaps, and AHEAD more.

    Returns: the new position; the number of swaps that were made.
    """
    filled = 0
    done = 0
    while filled < count:
        if position == WORDS:
            next_words(key)
            temper(key, words)
            position = 0
        mask = bound
        for shift in (1, 2, 4, 8, 16):
            mask |= mask >> shift
        # A word lowers the bound by at most one, so up to `stop` the mask holds, and `out` has room
        stop = min(WORDS, position + min(count - filled, bound - (mask >> 1)))
        # Unsigned: a signed index could be negative, and every access would check for that
        num_words = np.uint64(stop - position)
        num_with_swap = np.uint64(min(stop - position, swaps - done))
        first_here = np.uint64(last - done)
        here_partners = partners[done:]
        later_partners = partners[done + AHEAD :]
        new_words = words[position:]
        wide_bound = np.uint64(bound)
        wide_mask = np.uint64(mask)
        # The bound falls by one whenever a number is accepted, so this sum stays the same
        bound_plus_filled = np.uint64(bound + filled)
        for k in range(num_with_swap):
            prefetch(entries, np.int64(later_partners[k]))
            partner = here_partners[k]
            index = first_here - np.uint64(k)
            entry = entries[index]
            entries[index] = entries[partner]
            entries[partner] = entry
            value = new_words[k] & wide_mask
            out[bound_plus_filled - wide_bound] = value
            wide_bound -= np.uint64(value <= wide_bound)
        for k in range(num_with_swap, num_words):
            value = new_words[k] & wide_mask
            out[bound_plus_filled - wide_bound] = value
            wide_bound -= np.uint64(value <= wide_bound)
        done += np.int64(num_with_swap)
        filled = np.int64(bound_plus_filled - wide_bound)
        bound = np.int64(wide_bound)
        position = stop
    return position, done


@device
def next_words(key: Uint32s) -> None:
    """Advance the generator's key, uint32 [WORDS], by WORDS words."""
    for k in range(WORDS - _MIDDLE):
        key[k] = _twist(key[k], key[k + 1], key[k + _MIDDLE])
    rest = key[WORDS - _MIDDLE :]  # so that no index below is negative, and the loop is vectorised
    for k in range(_MIDDLE - 1):
        rest[k] = _twist(rest[k], rest[k + 1], key[k])
    key[WORDS - 1] = _twist(key[WORDS - 1], key[0], key[_MIDDLE - 1])


@device
def _twist(upper: np.uint32, lower: np.uint32, far: np.uint32) -> np.uint32:
    y = (upper & _UPPER) | (lower & _LOWER)
    word: np.uint32 = far ^ (y >> _1) ^ ((_0 - (y & _1)) & _MATRIX)
    return word


@device
def temper(key: Uint32s, words: Uint32s) -> None:
    """Fill words, uint32 [WORDS], with the random numbers of the generator whose state is `key`."""
    for k in range(WORDS):
        y = key[k]
        y ^= y >> _11
        y ^= (y << _7) & _TEMPER_B
        y ^= (y << _15) & _TEMPER_C
        y ^= y >> _18
        words[k] = y


@device
def _swap(entries: Entries, last: int, partners: Uint32s, start: int, stop: int) -> None:
    """Make swaps `start` to `stop` of entries[last], entries[last - 1], ... with their partners."""
    for k in range(np.uint64(start), np.uint64(stop)):
        prefetch(entries, np.int64(partners[np.uint64(k) + np.uint64(AHEAD)]))
        index = np.uint64(last) - np.uint64(k)
        partner = partners[k]
        entry = entries[index]
        entries[index] = entries[partner]
        entries[partner] = entry
