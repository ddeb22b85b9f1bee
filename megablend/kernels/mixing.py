"""Keyed hashing in 63-bit non-negative integers.

Numbers stay below 2^63 so that the same lines give the same result compiled (where int64 wraps and the mask drops the sign)
and as plain Python (where integers do not wrap): no unsigned type, which numba would mix with int64 into floats.

Source: the finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), its arithmetic taken modulo 2^63.
"""

from __future__ import annotations

from megablend.jit import device

MASK = (1 << 63) - 1
_GOLDEN = 0x1E3779B97F4A7C15


@device
def mix(x: int) -> int:
    """Scramble x in [0, 2^63): a bijection, each step being one (odd factors, right shifts)."""
    x = ((x ^ (x >> 30)) * 0x3F58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x14D049BB133111EB) & MASK
    return x ^ (x >> 31)


@device
def fold(key: int, value: int) -> int:
    """The key of `value` under `key`, both in [0, 2^63); so is the result."""
    return mix(mix((int(key) + _GOLDEN) & MASK) ^ int(value))


@device
def draw(key: int, value: int, size: int) -> int:
    """A number in [0, size) for `value` under `key`; biased by less than size / 2^62."""
    return (fold(key, value) >> 1) % int(size)
