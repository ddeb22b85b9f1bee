"""Keyed permutations of [0, n): one entry at a time without an array, or all at once."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from megablend.jit import device, kernel
from megablend.kernels.blend.keyed_hash import bounded_hash, hash_combine

ROUNDS = 8
"""Number of rounds of the Feistel network. With two rounds, it fails statistical tests of
uniformity by hundreds of sigma; with four to eight, it passes them."""
PACKED = 15
"""Maximum number of entries whose permutation fits into a 63-bit integer, with four bits for each
entry."""


@device
def permuted(i: int, n: int, key: int) -> int:
    """Return entry i of the permutation of [0, n) that belongs to `key`; 0 <= i < n <= 2^50.

    The permutation is a Feistel network on a * b >= n, a = ceil(sqrt(n)), applied until the result
    is below n (nearly always at once). For few entries such a network is far from uniform, so these
    are shuffled exactly.
    """
    if n <= PACKED:
        return (_packed(n, key) >> 4 * i) & 15
    a = int(math.sqrt(n))
    a += a * a < n
    b = (n + a - 1) // a
    while True:
        left = i // b
        right = i % b
        for turn in range(0, ROUNDS, 2):
            left = (left + bounded_hash(key ^ turn, right, a)) % a
            right = (right + bounded_hash(key ^ (turn + 1), left, b)) % b
        i = left * b + right
        if i < n:
            return i


@device
def unpermuted(entry: int, n: int, key: int) -> int:
    """Return the i for which `permuted(i, n, key)` is `entry`; 0 <= entry < n <= 2^50."""
    if n <= PACKED:
        packed = _packed(n, key)
        i = 0
        while (packed >> 4 * i) & 15 != entry:
            i += 1
        return i
    a = int(math.sqrt(n))
    a += a * a < n
    b = (n + a - 1) // a
    while True:
        left = entry // b
        right = entry % b
        for turn in range(ROUNDS - 2, -2, -2):
            right = (right - bounded_hash(key ^ (turn + 1), left, b)) % b
            left = (left - bounded_hash(key ^ turn, right, a)) % a
        entry = left * b + right
        if entry < n:
            return entry


@device
def _packed(n: int, key: int) -> int:
    """Return an exact Fisher-Yates shuffle of n <= PACKED entries, as one integer with four bits
    for each entry."""
    entries = 0xEDCBA9876543210
    for last in range(n - 1, 0, -1):
        other = bounded_hash(key, last, last + 1)
        differ = ((entries >> 4 * last) ^ (entries >> 4 * other)) & 15
        entries ^= (differ << 4 * last) | (differ << 4 * other) if other != last else 0
    return entries


@kernel
def shuffle(entries: npt.NDArray[np.int64], key: int, epoch: int, group: int) -> None:
    """Shuffle entries, int64 [n], in place by an exact Fisher-Yates shuffle. (key, epoch, group) is
    its seed; each is in [0, 2^63)."""
    shuffle_key = hash_combine(hash_combine(key, epoch), group)
    for last in range(len(entries) - 1, 0, -1):
        other = bounded_hash(shuffle_key, last, last + 1)
        entries[last], entries[other] = entries[other], entries[last]
