"""Pairs of `.bin/.idx` of given lengths, and what lies in a cache made of them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt


def write_pair(prefix: Path, lengths: Sequence[int] | npt.NDArray[np.int64]) -> str:
    """A pair whose sequences have these lengths; returns the prefix."""
    sizes = np.asarray(lengths, "<i4")
    prefix.parent.mkdir(parents=True, exist_ok=True)
    tokens = np.arange(sizes.sum(dtype=np.int64), dtype=np.uint64).astype("<u2")
    prefix.with_name(prefix.name + ".bin").write_bytes(tokens.tobytes())
    pointers = 2 * (np.cumsum(sizes, dtype="<i8") - sizes)
    prefix.with_name(prefix.name + ".idx").write_bytes(
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, 8, len(sizes), len(sizes) + 1)
        + sizes.tobytes()
        + pointers.astype("<i8").tobytes()
        + np.arange(len(sizes) + 1, dtype="<i8").tobytes()
    )
    return str(prefix)


def contents(cache: Path) -> dict[str, bytes]:
    """All files of a cache by name, hidden ones left out."""
    return {
        path.name: path.read_bytes()
        for path in sorted(cache.iterdir())
        if not path.name.startswith(".")
    }
