"""Tokens of groups of blocks, counted once at build: what an order of large sources needs before its first sample.

A block b of a part belongs to group b // run % num_groups. The counts lie in the cache's `splits/`, 8 bytes a group, named by all
that they depend on, with a checksum; where they are missing they are counted again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megablend.fs.atomic_write import replace_file, translate_os_errors

Int64s = npt.NDArray[np.int64]
VERSION = 1
_PASS = 1 << 20
"""Blocks whose tokens are counted at once."""


def count(before: Callable[[Int64s], Int64s], num_blocks: int, num_groups: int, run: int) -> Int64s:
    """Tokens of each group: int64 [num_groups].

    Args:
        before: tokens before each of some blocks, int64 [n] -> int64 [n].
    """
    totals, turn = np.zeros(num_groups, np.int64), num_groups * run
    step = max(1, _PASS // turn) * turn
    for start in range(0, num_blocks, step):
        edges = np.arange(start, min(start + step, num_blocks) + run, run).clip(max=num_blocks)
        tokens = np.diff(before(edges))  # of each run; the last may be short
        whole = len(tokens) // num_groups * num_groups
        totals += tokens[:whole].reshape(-1, num_groups).sum(axis=0)
        totals[: len(tokens) - whole] += tokens[whole:]
    return totals


def load_group_totals(cache: Path, asked: Sequence[object], num_groups: int) -> Int64s | None:
    """The totals that `asked` names: int64 [num_groups]; None where they are not there or not whole.

    Args:
        asked: all that they depend on, JSON-able; first the digest of what they are of, with which they go.
    """
    path, key = _place(cache, asked)
    with contextlib.suppress(OSError):
        data, checksum = (whole := path.read_bytes())[:-16], whole[-16:]
        if len(data) == 8 * num_groups and _checksum(key, data) == checksum:
            return np.frombuffer(data, np.int64)
    return None


def save_group_totals(cache: Path, asked: Sequence[object], totals: Int64s) -> None:
    """Store totals under what they depend on. Raises CacheError where they cannot be written."""
    path, key = _place(cache, asked)
    with translate_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, totals.tobytes() + _checksum(key, totals.tobytes()))


def _place(cache: Path, asked: Sequence[object]) -> tuple[Path, bytes]:
    key = hashlib.blake2b(json.dumps(["totals", VERSION, asked]).encode(), digest_size=16).digest()
    return cache / "splits" / f"{asked[0]}-{key.hex()}", key


def _checksum(key: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, key=key, digest_size=16).digest()
