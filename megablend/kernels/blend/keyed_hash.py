"""Keyed hashes from integers in [0, 2^63) to integers in [0, 2^63).

Products wrap only in uint64: for signed integers, numba lets LLVM assume that none overflows.
Outside of this module all numbers are signed, because numba promotes a uint64 and an int64 to
float64.

Source: SplitMix64's finalizer (Steele, Lea, Flood, OOPSLA 2014; the variant of Vigna's
    splitmix64.c).
"""

from __future__ import annotations

import numpy as np

from megablend.jit import device

MASK = (1 << 63) - 1
"""Keys are reduced modulo 2^63."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_30 = np.uint64(30)
_27 = np.uint64(27)
_31 = np.uint64(31)
_1 = np.uint64(1)


@device
def mix(x: np.uint64) -> np.uint64:
    """Map a 64-bit integer one to one to a random-looking 64-bit integer."""
    x = (x ^ (x >> _30)) * _FIRST
    x = (x ^ (x >> _27)) * _SECOND
    x ^= x >> _31
    return x


@device
def hash_combine(key: int, value: int) -> int:
    """Derive a new key from `key` and `value`. All three are in [0, 2^63)."""
    return int(np.int64(mix(mix(np.uint64(key) + _GOLDEN) ^ np.uint64(value)) >> _1))


@device
def bounded_hash(key: int, value: int, size: int) -> int:
    """Return the hash of `value` under `key`, reduced to [0, size), with a bias of less than size /
    2^63."""
    return hash_combine(key, value) % int(size)
