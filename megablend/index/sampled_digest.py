"""A digest of samples of a file's body, since footers alone do not distinguish all files."""

from __future__ import annotations

import hashlib

from megablend.storage.base import Storage

NUM_RANGES = 16
RANGE_BYTES = 4096


def body_ranges(size: int) -> list[tuple[int, int]]:
    """Evenly spaced (offset, length) in a file of `size` bytes, including its start and end; a small file completely."""
    if size <= NUM_RANGES * RANGE_BYTES:
        return [(0, size)]
    return [(i * (size - RANGE_BYTES) // (NUM_RANGES - 1), RANGE_BYTES) for i in range(NUM_RANGES)]


def sampled_content_digest(path: str, size: int, storage: Storage) -> str:
    """Compute the hex digest (blake2b, 16 bytes) of a file's sampled ranges. Raises as Storage.read does."""
    digest = hashlib.blake2b(digest_size=16)
    for offset, length in body_ranges(size):
        digest.update(storage.read(path, offset, length))
    return digest.hexdigest()
