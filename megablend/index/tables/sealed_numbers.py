"""Numbers that a cache stores in a separate file, which ends with a digest of its content.

    seen, token_ranges      numbers for each file of a snapshot, in its folder but not part of its digest, which is the seal's key
    <cache>/idx/            digests of the parts of long `.idx` files
    <cache>/lengths/        lengths of the documents of a range of blocks
    <cache>/splits/         what was computed from a snapshot or a table of documents; the seal's key is a digest of all that
                            it depends on

A file is magic text, if its kind has one, the numbers (little-endian), and a BLAKE2b digest of 16
bytes (`system.atomic_write.seal`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megablend.errors import CacheError, DamagedCacheError
from megablend.index.tables.cache_folders import splits
from megablend.system.atomic_write import keep_computed, seal, unseal
from megablend.system.failures import cause_of
from megablend.system.safe_open import read_regular

Numbers = npt.NDArray[Any]


def pack_numbers(numbers: Numbers, magic: bytes = b"", key: bytes = b"") -> bytes:
    """Return the stored form of numbers, or of records."""
    return seal(magic + numbers.astype(numbers.dtype.newbyteorder("<"), copy=False).tobytes(), key)


def parse_numbers(
    data: bytes,
    dtype: np.dtype[Any],
    count: int | None = None,
    magic: bytes = b"",
    key: bytes = b"",
) -> Numbers | None:
    """Parse the stored form of numbers: `count` of them, or all if `count` is None. Returns None if
    the data is damaged."""
    body = unseal(data, key)
    if body is None or not body.startswith(magic):
        return None
    size = len(body) - len(magic)
    if size % dtype.itemsize or count not in (None, size // dtype.itemsize):
        return None
    return np.frombuffer(body, dtype.newbyteorder("<"), size // dtype.itemsize, len(magic))


def read_numbers(
    path: Path, dtype: np.dtype[Any], count: int | None = None, magic: bytes = b"", key: bytes = b""
) -> Numbers | None:
    """Read the numbers in a file, see `parse_numbers`; return None if the file does not exist.
    Raises: CacheError if it is damaged."""
    try:
        numbers = parse_numbers(read_regular(path), dtype, count, magic, key)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedCacheError.of(f"{path}: cannot be read ({cause_of(error)})") from error
    if numbers is None:
        raise DamagedCacheError.of(f"{path}: damaged (its checksum is wrong)")
    return numbers


class ComputedNumbers:
    """A file of `splits/` with numbers that were computed from other files of the cache, and are
    computed again when needed if the file is missing.

    Args:
        cache: folder of the cache.
        owner: digest of the snapshot or the table of documents that the numbers were computed from;
            the file is removed together with it.
        request: everything that the numbers depend on; it can be written as JSON.
    """

    def __init__(self, cache: Path, owner: str, request: Sequence[object]) -> None:
        self._key = hashlib.blake2b(json.dumps(request).encode(), digest_size=16).digest()
        self._path = splits(cache) / f"{owner}-{self._key.hex()}"

    def find(self, dtype: np.dtype[Any], count: int | None = None) -> Numbers | None:
        """Return the numbers, [count]; None if the file is missing, damaged or cannot be read."""
        with contextlib.suppress(CacheError):
            return read_numbers(self._path, dtype, count, key=self._key)
        return None

    def keep(self, numbers: Numbers) -> None:
        """Store the numbers. Raises: CacheError if they cannot be written."""
        keep_computed(self._path, pack_numbers(numbers, key=self._key))
