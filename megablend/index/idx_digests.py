"""Digests of the parts of long `.idx` files: made once by `build`, so that no reader has to go through a whole file.

    <cache>/idx/<digest of the .idx>   magic, uint64 a group, a blake2b digest (16 bytes) of all before

They follow from the file alone: all indexes that hold it share them. One that is missing or damaged is made by the next build;
until then readers digest the whole file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megablend.errors import ChangedFileError
from megablend.formats.megatron.lengths import WHOLE_BYTES, digest_idx
from megablend.formats.megatron.reader import MEGATRON
from megablend.fs.atomic_write import list_committed, replace_file
from megablend.index.snapshot import FileEntry, Snapshot
from megablend.storage.base import Storage

_MAGIC = b"megablend idx 1\n"
_DIGEST_BYTES = 16
Digests = npt.NDArray[np.uint64]


class LongIdx(NamedTuple):
    """A long `.idx` whose digests are missing."""

    path: str
    idx_bytes: int
    structure: str


def idx_digests(cache: str | Path) -> Path:
    """The folder of these digests."""
    return Path(cache).absolute() / "idx"


def read_digests(cache: str | Path, format_name: str, file: FileEntry) -> Digests | None:
    """The digests of a file's parts, uint64 [num_groups]; None where it needs none, or the cache has none that are whole."""
    if not _is_long(format_name, file):
        return None
    return _read(idx_digests(cache) / file.opened.structure)


def find_missing(generation: Snapshot) -> Iterator[LongIdx]:
    """Long `.idx` files of an index whose digests are missing, each once."""
    known: set[str] = set()
    for source in generation.sources:
        if source.format != MEGATRON.name:
            continue
        for number in source.files:
            file = generation.file(number)
            structure = file.opened.structure
            if _is_long(source.format, file) and structure not in known:
                known.add(structure)
                if _read(idx_digests(generation.cache) / structure) is None:
                    path = MEGATRON.files(generation.path(number))[1]
                    yield LongIdx(path, file.opened.meta["idx_bytes"], structure)


def damaged_digests(cache: str | Path) -> Iterator[str]:
    """A line for each file of digests that is damaged."""
    folder = idx_digests(cache)
    for name in list_committed(folder):
        if _read(folder / name) is None:
            yield f"{folder / name}: damaged digests of an .idx file; `megablend build CONFIG` makes them again"


def make_digests(cache: str | Path, idx: LongIdx, storage: Storage) -> None:
    """Digest a file and keep what was found. Raises: ChangedFileError where it is not what was indexed; DataError; CacheError."""
    found, digests = digest_idx(idx.path, idx.idx_bytes, storage)
    if found != idx.structure:
        raise ChangedFileError(idx.path, "changed while it was being indexed; let its writer finish, then build again")
    data = _MAGIC + digests.astype("<u8").tobytes()
    replace_file(idx_digests(cache) / idx.structure, data + _checksum(data))


def _is_long(format_name: str, file: FileEntry) -> bool:
    return format_name == MEGATRON.name and file.opened.meta["idx_bytes"] > WHOLE_BYTES


def _read(path: Path) -> Digests | None:
    try:
        data = path.read_bytes()
    except OSError:  # it is only missed
        return None
    body, trailer = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if not body.startswith(_MAGIC) or _checksum(body) != trailer:
        return None
    return np.frombuffer(body, "<u8", offset=len(_MAGIC))


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
