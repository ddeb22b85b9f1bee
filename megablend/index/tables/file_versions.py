"""The version of each file at the last build, which is stored with a snapshot: one uint64 per file
(see sealed_numbers).

A version is a hash of the sizes and times of a data file and of the files that belong to it
(`source_spec.SourceFile.etag`), or 0 if unknown. If a file has another version when it is opened,
it has been moved, touched or replaced. It is accepted only if the digests of its structure and of
sampled ranges of its body are the same as when it was indexed.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megablend.errors import CHANGED_REMEDY, ChangedFileError
from megablend.index.tables.manifest import SEEN
from megablend.index.tables.sealed_numbers import pack_numbers, read_numbers
from megablend.storage.base import FileStat, Storage, allocate_bytes
from megablend.storage.local import without_inodes
from megablend.storage.prefetched import request_ranges
from megablend.system.log import LOG

NUM_RANGES = 16
RANGE_BYTES = 4096
"""Size in bytes of each sampled range of a file's body. NUM_RANGES is the number of these
ranges."""
_MAGIC = b"megablend seen 1"
_WARNED_SLOTS = 1 << 16
_warned = mmap.mmap(-1, _WARNED_SLOTS)
"""One byte for each hash of a path, which is set when a warning about the path is issued. The
memory is shared with forked processes, since a DataLoader forks new workers for every epoch."""
Numbers = npt.NDArray[np.uint64]


def body_ranges(size: int) -> list[tuple[int, int]]:
    """Return the ranges of a file of `size` bytes that are sampled, as (offset, length). They are
    evenly spaced, and include the start and the end of the file. A small file has one range, of all
    bytes."""
    if size <= NUM_RANGES * RANGE_BYTES:
        return [(0, size)]
    return [(i * (size - RANGE_BYTES) // (NUM_RANGES - 1), RANGE_BYTES) for i in range(NUM_RANGES)]


def request_samples(path: str, size: int, storage: Storage) -> None:
    """Announce the reads that `sampled_content_digest` will make; see `storage.prefetched`."""
    request_ranges(storage, path, *zip(*body_ranges(size), strict=True))


def sampled_content_digest(path: str, size: int, storage: Storage) -> str:
    """Return a digest of a file's sampled ranges, as a hex string (blake2b, 16 bytes). Raises: see
    Storage.read."""
    digest = hashlib.blake2b(digest_size=16)
    offsets, sizes = np.array(body_ranges(size), np.int64).T.copy()
    data, begins = storage.read_ranges(path, offsets, sizes, allocate_bytes)
    for begin, length in zip(begins.tolist(), sizes.tolist(), strict=True):
        digest.update(data[begin : begin + length].data)
    return digest.hexdigest()


def join_etags(stats: Iterable[FileStat]) -> str:
    """Return a text that identifies the version of a data file, given the stats of all files that
    belong to it."""
    return " ".join(f"{stat.size}:{stat.etag}" for stat in stats)


def versions_of(etag: str) -> tuple[str, str]:
    """Return the texts that stand for the version of a file, given its etag: one without inodes,
    which is stored, and one with them, which earlier releases stored."""
    return without_inodes(etag), etag


def numbers_of(etag: str) -> tuple[int, ...]:
    """Return hashes of the texts of `versions_of`, from 1 to 2^64 - 1."""
    hashes = (hashlib.blake2b(version.encode(), digest_size=8) for version in versions_of(etag))
    return tuple(int.from_bytes(digest.digest(), "little") or 1 for digest in hashes)


def seen_bytes(digest: str, numbers: Numbers) -> bytes:
    """Serialize the versions of the files of a snapshot, which is given by its digest (`numbers`:
    uint64 [num_files])."""
    return pack_numbers(numbers, _MAGIC, digest.encode())


def read_seen(folder: Path, num_files: int) -> Numbers | None:
    """Read the versions of a snapshot's files (uint64 [num_files]). Return None if an older version
    of megablend built the snapshot. Raises: CacheError."""
    return read_numbers(folder / SEEN, np.dtype(np.uint64), num_files, _MAGIC, folder.name.encode())


def check_body(path: str, size: int, body: str, storage: Storage) -> None:
    """Check that sampled ranges of a file of `size` bytes still have the digest that was indexed.

    Raises: ChangedFileError; the errors of Storage.read.
    """
    digest = sampled_content_digest(path, size, storage)
    if digest != body:
        raise ChangedFileError(
            path,
            f"changed since it was indexed (its size is the same, but the digest of its content is {digest}, not "
            f"{body}); {CHANGED_REMEDY}",
        )


def warn_moved(folder: Path, path: str, *, checks_blocks: bool) -> None:
    """Warn that files were moved or touched but still have the same sampled content.

    This warns once per snapshot in this process and the processes forked from it.

    Args:
        checks_blocks: whether the snapshot has checksums of blocks, which are then compared
            whenever a block is read.
    """
    if _is_first(folder):
        further = "other blocks are compared when they are read, or all now by `megablend verify --data CONFIG`"
        if not checks_blocks:
            further = (
                "nothing more is compared, since the index has no checksums of blocks (`megablend build CONFIG "
                "--checksums`)"
            )
        LOG.warning(
            "%s: this file, and perhaps others, was moved, copied or touched since index %s was built; %d KiB of it were "
            "compared and are unchanged; %s",
            path,
            folder.name,
            NUM_RANGES * RANGE_BYTES >> 10,
            further,
        )


def warn_unknown(folder: Path) -> None:
    """Warn that a snapshot has no record of file versions. This warns once in this process and the
    processes forked from it."""
    if _is_first(folder / SEEN):
        LOG.warning(
            "%s: was built by an older version of megablend, which did not record sizes and times of files, so %d KiB of each "
            "file are compared when it is opened; run `megablend build CONFIG` to add the record",
            folder,
            NUM_RANGES * RANGE_BYTES >> 10,
        )


def _is_first(path: Path) -> bool:
    """Return whether no warning about a path has been issued yet, and mark it as issued."""
    slot = zlib.crc32(os.fsencode(path)) % _WARNED_SLOTS
    is_first = not _warned[slot]
    _warned[slot] = 1
    return is_first
