"""A digest of samples of a file's body, since footers alone do not distinguish all files."""

from __future__ import annotations

import hashlib

import numpy as np

from megablend.storage.base import Storage
from megablend.storage.prefetched import request_ranges

NUM_RANGES = 16
RANGE_BYTES = 4096


def body_ranges(size: int) -> list[tuple[int, int]]:
    """Evenly spaced (offset, length) in a file of `size` bytes, including its start and end; a small file completely."""
    if size <= NUM_RANGES * RANGE_BYTES:
        return [(0, size)]
    return [(i * (size - RANGE_BYTES) // (NUM_RANGES - 1), RANGE_BYTES) for i in range(NUM_RANGES)]


def request_samples(path: str, size: int, storage: Storage) -> None:
    """Announce the reads of `sampled_content_digest`; see `storage.prefetched`."""
    request_ranges(storage, path, *zip(*body_ranges(size), strict=True))


def sampled_content_digest(path: str, size: int, storage: Storage) -> str:
    """Compute the hex digest (blake2b, 16 bytes) of a file's sampled ranges. Raises as Storage.read does."""
    digest = hashlib.blake2b(digest_size=16)
    offsets, sizes = np.array(body_ranges(size), np.int64).T.copy()
    data, begins = storage.read_ranges(path, offsets, sizes, lambda total: np.empty(total, np.uint8))
    for begin, length in zip(begins.tolist(), sizes.tolist(), strict=True):
        digest.update(data[begin : begin + length].data)
    return digest.hexdigest()
