"""Digests of the parts of long `.idx` files. `build` computes them once, so that readers do not
have to read whole files.

    <cache>/idx/<digest of the .idx>   magic, one uint64 per group, a blake2b digest (16 bytes) of everything before

The digests depend only on the file, so all snapshots that contain it share them. The next build
computes digests that are missing or damaged; until then, readers digest the whole file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megablend.caches.base import CacheStore
from megablend.errors import REMOVE_REMEDY, CacheError
from megablend.formats import get_format
from megablend.formats.base import Format, OpenedFile
from megablend.formats.megatron.lengths import READ_BYTES
from megablend.index.read.snapshot import Snapshot
from megablend.index.tables.cache_folders import idx_digests
from megablend.index.tables.file_table import FileEntry
from megablend.index.tables.sealed_numbers import pack_numbers, read_numbers
from megablend.storage.base import Storage
from megablend.storage.transfer import RequestCount
from megablend.system.atomic_write import replace_file

_MAGIC = b"megablend idx 1\n"
Digests = npt.NDArray[np.uint64]


class LongIdx(NamedTuple):
    """A long `.idx` file whose digests are missing."""

    path: str
    """The path of the `.bin/.idx` pair that the file belongs to."""
    format: str
    """The name of the pair's format."""
    opened: OpenedFile
    """The data that the format needs to open the pair."""


def read_digests(cache: str | Path, kind: Format, file: FileEntry) -> Digests | None:
    """Read the digests of a file's parts (uint64 [num_groups]). Return None if the file needs none,
    or if the cache has no undamaged ones."""
    if not kind.needs_group_digests(file.opened):
        return None
    return _find_digests(Path(cache), file.opened.structure)


def find_missing(snapshot: Snapshot) -> Iterator[LongIdx]:
    """Yield the long `.idx` files of an index whose digests are missing, each once."""
    checked: set[str] = set()
    for source in snapshot.sources:
        source_format = source.kind
        if not source_format.has_group_digests:
            continue
        for number in source.files:
            file = snapshot.files.entry(number)
            structure = file.opened.structure
            if source_format.needs_group_digests(file.opened) and structure not in checked:
                checked.add(structure)
                if _find_digests(snapshot.store.folder, structure) is None:
                    yield LongIdx(snapshot.path(number), source.format, file.opened)


def damaged_digests(store: CacheStore) -> Iterator[str]:
    """Yield an error line for each damaged file of digests."""
    for name in store.list_files("idx"):
        path = store.fetch_file("idx", name)
        if _find_digests(store.folder, name) is None:
            yield f"{path}: damaged digests of an .idx file; {REMOVE_REMEDY}"


def make_digests(store: CacheStore, idx: LongIdx, storage: Storage) -> None:
    """Compute and store the digests of a long `.idx` file. Raises: ChangedFileError if it is not
    the file that was indexed; DataError; CacheError."""
    idx_format = get_format(idx.format)
    digests = idx_format.make_group_digests(idx.path, idx.opened, storage=storage)
    structure = idx.opened.structure
    replace_file(idx_digests(store.folder) / structure, pack_numbers(digests, _MAGIC))
    store.publish_file("idx", structure)


def count_digest_reads(kind: Format, path: str, storage: Storage) -> RequestCount:
    """Return the number of requests and bytes that `make_digests` takes for the files that belong
    to `path`."""
    if not kind.has_group_digests:
        return RequestCount(0, 0)
    size = storage.stat(kind.files(path)[1]).size
    file = OpenedFile(size=0, token_dtype="", structure="", meta={"idx_bytes": size})
    if not kind.needs_group_digests(file):
        return RequestCount(0, 0)
    return RequestCount(-(-size // READ_BYTES), size)


def _find_digests(cache: Path, structure: str) -> Digests | None:
    """Read the digests of a file, given the digest of its structure. Return None if the digests are
    missing or damaged, or cannot be read."""
    with contextlib.suppress(CacheError):
        return read_numbers(idx_digests(cache) / structure, np.dtype(np.uint64), magic=_MAGIC)
    return None
