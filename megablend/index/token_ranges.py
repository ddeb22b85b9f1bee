"""The smallest and the largest token of each file, if its statistics contain them.

They are stored with a snapshot, outside its digest; snapshots of older versions have none.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megablend.index.manifest import TOKEN_RANGES
from megablend.index.sealed_numbers import pack_numbers, read_numbers

_MAGIC = b"megablend tokens"
_UNKNOWN = (1, 0)
Ranges = npt.NDArray[np.int64]


def pack_ranges(digest: str, ranges: Iterable[tuple[int, int] | None]) -> bytes:
    """The stored form of the ranges of a snapshot's files (None: unknown)."""
    numbers = np.array([each or _UNKNOWN for each in ranges], np.int64)
    return pack_numbers(numbers, _MAGIC, digest.encode())


def read_ranges(folder: Path, num_files: int) -> Ranges:
    """int64 [num_files, 2]: smallest and largest token of each file; smallest > largest where unknown. Raises: CacheError."""
    numbers = read_numbers(folder / TOKEN_RANGES, np.dtype(np.int64), 2 * num_files, _MAGIC, folder.name.encode())
    return np.tile(np.array(_UNKNOWN), (num_files, 1)) if numbers is None else numbers.reshape(-1, 2)
