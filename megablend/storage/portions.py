"""Read a file from beginning to end in portions. Several portions are requested at a time if reads
wait for a network."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np

from megablend.arrays import Int64s
from megablend.storage.base import Bytes, Storage, allocate_bytes

_MAX_PENDING = 16
"""The maximum number of portions that are requested at a time, if reads wait for a network."""


def read_portions(
    storage: Storage, path: str, size: int, portion_bytes: int, first: int = 0
) -> Iterator[tuple[int, memoryview]]:
    """Read a file in order, in portions.

    Args:
        size: the size of the file.
        first: the offset of the first byte to read.

    Yields: the offset in the file of each portion, and its bytes.
    Raises: the same errors as Storage.read.
    """
    waits_for_network = storage.limits(path).max_files > 1
    max_pending = _MAX_PENDING if waits_for_network else 1
    starts = deque(range(first, size, portion_bytes))
    pending = deque[tuple[int, Future[tuple[Bytes, Int64s]]]]()
    try:
        while starts or pending:
            while starts and len(pending) < max_pending:
                start = starts.popleft()
                length = min(portion_bytes, size - start)
                read = storage.fetch(path, np.array([start]), np.array([length]), allocate_bytes)
                pending.append((start, read))
            start, read = pending.popleft()
            data, begins = read.result()
            begin = int(begins[0])
            length = min(portion_bytes, size - start)
            yield start, data.data[begin : begin + length]
    finally:
        for _, read in pending:
            read.cancel()
