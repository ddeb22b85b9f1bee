"""Numbers per file that a build stores with a snapshot, outside its digest.

Magic text, numbers (little-endian, in the order of the table of files), blake2b digest (16 bytes, keyed by the snapshot's).
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megablend.errors import DamagedCacheError
from megablend.fs.safe_open import read_regular
from megablend.system.failures import cause_of

_DIGEST_BYTES = 16
Numbers = npt.NDArray[Any]


def pack_numbers(magic: bytes, digest: str, numbers: Numbers) -> bytes:
    """The stored form of a table of a snapshot (by its digest)."""
    data = magic + numbers.astype(numbers.dtype.newbyteorder("<")).tobytes()
    return data + _checksum(digest, data)


def read_numbers(path: Path, magic: bytes, dtype: np.dtype[Any], count: int) -> Numbers | None:
    """Read the `count` numbers of a table, which is stored in its snapshot's folder; None if the file does not exist.

    Raises: CacheError if it is damaged, or cannot be read.
    """
    try:
        data = read_regular(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedCacheError.of(f"{path}: cannot be read ({cause_of(error)})") from error
    body, dtype = data[:-_DIGEST_BYTES], dtype.newbyteorder("<")
    if len(body) != len(magic) + dtype.itemsize * count or data[-_DIGEST_BYTES:] != _checksum(path.parent.name, body):
        raise DamagedCacheError.of(f"{path}: damaged (its checksum is wrong)")
    return np.frombuffer(body, dtype, count, len(magic))


def _checksum(digest: str, data: bytes) -> bytes:
    return hashlib.blake2b(data, key=digest.encode(), digest_size=_DIGEST_BYTES).digest()
