"""Which version of each file the last build saw, next to a generation's roots (a table of a uint64 a file, see side_table).

A number stands for the sizes, times and inodes of all that a file consists of (`sources.SourceFile.etag`); 0 where they are not
known. Where a file has another number when it is opened, it was moved, touched or replaced, and its content decides: its
description must have the digest that was indexed, and so must sampled ranges of its body.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megablend.errors import CHANGED_REMEDY, ChangedFileError
from megablend.index.manifest import SEEN
from megablend.index.sampled_digest import NUM_RANGES, RANGE_BYTES, sampled_content_digest
from megablend.index.side_table import pack_numbers, read_numbers
from megablend.storage.base import FileStat, Storage

_MAGIC = b"megablend seen 1"
_LOG = logging.getLogger("megablend")
_TOLD_SLOTS = 1 << 16
_told = mmap.mmap(-1, _TOLD_SLOTS)
"""Memory that forked processes share: a DataLoader forks new workers for every epoch."""
Numbers = npt.NDArray[np.uint64]


def join_etags(stats: Sequence[FileStat]) -> str:
    """What tells a version of a file from others, out of the states of all that it stands for."""
    return " ".join(f"{stat.size}:{stat.etag}" for stat in stats)


def number_of(etag: str) -> int:
    """A version of a file as a number, 1 to 2^64 - 1."""
    return int.from_bytes(hashlib.blake2b(etag.encode(), digest_size=8).digest(), "little") or 1


def seen_bytes(digest: str, numbers: Numbers) -> bytes:
    """The table of a generation (by its digest) as it is stored; numbers: uint64 [num_files]."""
    return pack_numbers(_MAGIC, digest, numbers)


def read_seen(folder: Path, num_files: int) -> Numbers | None:
    """The numbers of a generation's files, uint64 [num_files]; None where an older version built it. Raises: CacheError."""
    return read_numbers(folder / SEEN, _MAGIC, np.dtype(np.uint64), num_files)


def check_body(path: str, size: int, body: str, storage: Storage) -> None:
    """Compare sampled ranges of a file of `size` bytes with the digest that was indexed.

    Raises: ChangedFileError; as Storage.read does.
    """
    if (found := sampled_content_digest(path, size, storage)) != body:
        raise ChangedFileError(
            path,
            f"changed since it was indexed: it has the same size, but its content has digest {found}, was {body}; "
            f"{CHANGED_REMEDY}",
        )


def tell_moved(folder: Path, path: str) -> None:
    """Say once that files are not where or when they were, though their content looks the same.

    Once a generation, in this process and those that are forked from it.
    """
    if _is_first(folder):
        _LOG.warning(
            "%s (perhaps others too): moved, copied or touched since index %s was built; %d KiB of it compared, and found the "
            "same; `megablend verify --data` compares all",
            path,
            folder.name,
            NUM_RANGES * RANGE_BYTES >> 10,
        )


def tell_unknown(folder: Path) -> None:
    """Say once, in this process and those forked with it, that nothing tells which files a generation was built from."""
    if _is_first(folder / SEEN):
        _LOG.warning(
            "%s: built by an older version of megablend, which did not keep sizes and times of files: %d KiB of each file are "
            "compared as it is opened; `megablend build CONFIG` adds them",
            folder,
            NUM_RANGES * RANGE_BYTES >> 10,
        )


def _is_first(place: Path) -> bool:
    """Whether nothing was said of a place yet."""
    slot = number_of(str(place)) % _TOLD_SLOTS
    is_first = not _told[slot]
    _told[slot] = 1
    return is_first
