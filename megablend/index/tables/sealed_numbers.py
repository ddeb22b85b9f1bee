"""Arrays of numbers that a cache stores in separate files. Each file ends with a digest (a seal).

    seen, token_ranges      numbers for each file of a snapshot, in its folder but not part of its digest, which is the seal's key
    <cache>/idx/            digests of the parts of long `.idx` files
    <cache>/lengths/        lengths of the documents of a range of blocks
    <cache>/splits/         what was computed from a snapshot or a table of documents; the seal's key is a digest of all that
                            it depends on

A file consists of a magic text, if its kind has one, the numbers (little-endian), and a BLAKE2b
digest of 16 bytes (`system.atomic_write.seal`).
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
    """Serialize an array of numbers, or of records, and append the digest."""
    return seal(magic + numbers.astype(numbers.dtype.newbyteorder("<"), copy=False).tobytes(), key)


def parse_numbers(
    data: bytes,
    dtype: np.dtype[Any],
    count: int | None = None,
    magic: bytes = b"",
    key: bytes = b"",
) -> Numbers | None:
    """Parse the content of a file that contains `count` numbers, or any number of them if `count`
    is None. Return None if the data is damaged."""
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
    """Read a file of numbers, see `parse_numbers`. Return None if the file does not exist. Raises:
    CacheError if it is damaged."""
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
    """A file in `splits/` whose numbers were computed from other files of the cache. If the file is
    missing, the numbers are computed again when they are needed.

    Args:
        cache: folder of the cache.
        owner: digest of the snapshot or the table of documents that the numbers were computed from;
            the file is removed together with it.
        request: everything that the numbers depend on; must be serializable as JSON.
    """

    def __init__(self, cache: Path, owner: str, request: Sequence[object]) -> None:
        self._key = hashlib.blake2b(json.dumps(request).encode(), digest_size=16).digest()
        self._path = splits(cache) / f"{owner}-{self._key.hex()}"

    def find(self, dtype: np.dtype[Any], count: int | None = None) -> Numbers | None:
        """Return the numbers ([count]), or None if the file is missing or damaged, or cannot be
        read."""
        with contextlib.suppress(CacheError):
            return read_numbers(self._path, dtype, count, key=self._key)
        return None

    def keep(self, numbers: Numbers) -> None:
        """Store the numbers. Raises: CacheError if they cannot be written."""
        keep_computed(self._path, pack_numbers(numbers, key=self._key))
