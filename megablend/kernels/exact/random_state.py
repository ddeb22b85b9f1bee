"""NumPy's RandomState as a source of 32-bit words: the Mersenne Twister MT19937.

Source: Matsumoto and Nishimura (1998), mt19937ar.c.
"""

from __future__ import annotations

import numpy as np

from megablend.arrays import Uint32s
from megablend.jit import device

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
