"""Token totals of groups of blocks, computed at build time: large sources need them before their first sample.

Block b of a split belongs to group b // run % num_groups. The totals are stored in the cache's `splits/`, 8 bytes per group, with
a checksum, under a key of everything that they depend on; missing totals are computed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from megablend.arrays import Int64s
from megablend.fs.atomic_write import keep_computed
from megablend.fs.safe_open import read_regular

VERSION = 1
_PASS = 1 << 20
"""Blocks per pass of counting tokens."""


def count(before: Callable[[Int64s], Int64s], num_blocks: int, num_groups: int, run: int) -> Int64s:
    """Count the tokens of each group: int64 [num_groups].

    Args:
        before: returns the tokens before each of the given blocks, int64 [n] -> int64 [n].
    """
    totals, turn = np.zeros(num_groups, np.int64), num_groups * run
    step = max(1, _PASS // turn) * turn
    for start in range(0, num_blocks, step):
        edges = np.arange(start, min(start + step, num_blocks) + run, run).clip(max=num_blocks)
        tokens = np.diff(before(edges))  # tokens of each run; the last run may be short
        whole = len(tokens) // num_groups * num_groups
        totals += tokens[:whole].reshape(-1, num_groups).sum(axis=0)
        totals[: len(tokens) - whole] += tokens[whole:]
    return totals


def load_group_totals(cache: Path, key_parts: Sequence[object], num_groups: int) -> Int64s | None:
    """Load the totals stored under `key_parts`: int64 [num_groups]; None if they are missing or damaged.

    Args:
        key_parts: everything that they depend on, JSON-able; the first is the digest of the snapshot or table that they belong
            to, with which they are removed.
    """
    path, key = _location(cache, key_parts)
    with contextlib.suppress(OSError):
        data, checksum = (stored := read_regular(path))[:-16], stored[-16:]
        if len(data) == 8 * num_groups and _checksum(key, data) == checksum:
            return np.frombuffer(data, np.int64)
    return None


def save_group_totals(cache: Path, key_parts: Sequence[object], totals: Int64s) -> None:
    """Store totals under `key_parts`. Raises: CacheError if they cannot be written."""
    path, key = _location(cache, key_parts)
    keep_computed(path, totals.tobytes() + _checksum(key, totals.tobytes()))


def _location(cache: Path, key_parts: Sequence[object]) -> tuple[Path, bytes]:
    key = hashlib.blake2b(json.dumps(["totals", VERSION, key_parts]).encode(), digest_size=16).digest()
    return cache / "splits" / f"{key_parts[0]}-{key.hex()}", key


def _checksum(key: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, key=key, digest_size=16).digest()
