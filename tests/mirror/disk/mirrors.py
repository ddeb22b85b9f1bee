"""Mirrors whose files have bytes that tests can compute."""

from __future__ import annotations

import math
import random
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from megablend.mirror.disk.disk_calls import DiskCalls
from megablend.mirror.disk.folder import FileKey, MirrorFolder
from megablend.mirror.disk.mirrored_file import MirroredFile
from megablend.mirror.disk.page_store import PageStore
from megablend.mirror.disk.pages import Pages, pages_of_ranges, ranges_of_pages


def key_of(size: int, name: str = "a", etag: str = "1") -> FileKey:
    return FileKey(f"s3://bucket/{name}", etag, size)


@lru_cache(maxsize=64)
def truth(key: FileKey) -> bytes:
    """The bytes of a source file."""
    return random.Random(key.digest).randbytes(key.size)


def bytes_of(key: FileKey, pages: Pages) -> bytes:
    """The bytes of some pages, in order."""
    data = truth(key)
    ranges = zip(*(r.tolist() for r in ranges_of_pages(pages, key.size)), strict=True)
    return b"".join(data[offset : offset + size] for offset, size in ranges)


def pages_at(*ranges: tuple[int, int]) -> Pages:
    """The pages of ranges of bytes, each as offset and size."""
    offsets, sizes = np.array(ranges, np.int64).reshape(-1, 2).T
    return pages_of_ranges(offsets, sizes)


def put(store: PageStore, key: FileKey, pages: Pages, due: float | None = None) -> bool:
    """Store the right bytes of some pages."""
    when = math.inf if due is None else due
    return store.write(key, pages, memoryview(bytes_of(key, pages)), when)


def read(file: MirroredFile, *ranges: tuple[int, int]) -> list[bytes] | None:
    """Ranges as a rank reads them; None if they are not held."""
    offsets, sizes = np.array(ranges, np.int64).reshape(-1, 2).T
    begins = sizes.cumsum() - sizes
    out = np.full(int(sizes.sum()), 7, np.uint8)
    if not file.read_into(offsets, sizes, begins, out):
        return None
    return [bytes(out[b : b + n]) for b, n in zip(begins, sizes, strict=True)]


def open_store(
    path: Path, size: int | None = None, calls: DiskCalls | None = None, **options: Any
) -> PageStore:
    """A store whose lock is not held, so that tests can leave it as a killed process does."""
    return PageStore(
        MirrorFolder.create(path), size=size, reserve=0, calls=calls or DiskCalls(), **options
    )


def to_sets(pages: Pages) -> set[int]:
    """The numbers of pages in the file."""
    return {
        64 * block + i
        for block, mask in zip(pages.blocks.tolist(), pages.masks.tolist(), strict=True)
        for i in range(64)
        if mask >> i & 1
    }
