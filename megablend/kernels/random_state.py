"""NumPy's RandomState as a source of bounded integers: the Mersenne Twister MT19937 with masked rejection.

Source: Matsumoto and Nishimura (1998), mt19937ar.c; numpy's legacy `random_interval`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.jit import device

Uint32s = npt.NDArray[np.uint32]

WORDS = 624
_MIDDLE = 397
_UPPER, _LOWER, _MATRIX = np.uint32(0x80000000), np.uint32(0x7FFFFFFF), np.uint32(0x9908B0DF)
_TEMPER_B, _TEMPER_C = np.uint32(0x9D2C5680), np.uint32(0xEFC60000)
_0, _1, _7, _11, _15, _18 = np.uint32(0), np.uint32(1), np.uint32(7), np.uint32(11), np.uint32(15), np.uint32(18)


@device
def _twist(upper: np.uint32, lower: np.uint32, far: np.uint32) -> np.uint32:
    y = (upper & _UPPER) | (lower & _LOWER)
    word: np.uint32 = far ^ (y >> _1) ^ ((_0 - (y & _1)) & _MATRIX)
    return word


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
def temper(key: Uint32s, words: Uint32s) -> None:
    """Fill words, uint32 [WORDS], with the numbers that the key stands for."""
    for k in range(WORDS):
        y = key[k]
        y ^= y >> _11
        y ^= (y << _7) & _TEMPER_B
        y ^= (y << _15) & _TEMPER_C
        y ^= y >> _18
        words[k] = y


@device
def draw_below(key: Uint32s, words: Uint32s, position: int, last: int, out: Uint32s, count: int) -> int:
    """Draw uniform numbers in [0, last], [0, last - 1], ...: `count` of them, last < 2^32, count <= last.

    Each is a word under the mask of its bound's bits, drawn again while above the bound.

    Args:
        key: uint32 [WORDS], advanced.
        words: uint32 [WORDS], tempered from the key.
        position: words used up, 0 to WORDS.
        last: the first bound.
        out: uint32, room for count + 1.
        count: how many.

    Returns: the new position.
    """
    filled, bound = 0, int(last)
    while filled < count:
        if position == WORDS:
            next_words(key)
            temper(key, words)
            position = 0
        mask = bound
        for shift in (1, 2, 4, 8, 16):
            mask |= mask >> shift
        # a word lowers the bound by one at most: for so many the mask holds, and there is room
        stop = min(WORDS, position + min(count - filled, bound - (mask >> 1)))
        for p in range(position, stop):
            value = np.int64(words[p]) & mask
            out[filled] = value
            accepted = np.int64(value <= bound)
            filled += accepted
            bound -= accepted
        position = stop
    return position
