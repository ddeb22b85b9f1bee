"""Local copies of the `.idx` files of pairs in object stores. They save many small requests: for
each document of a sample, eight bytes of an `.idx` are read.

    <folder>/<bucket>/<key>.idx        as Megatron itself places them in `object_storage_cache_path`
    <folder>/<bucket>/<key>.idx.seen   the version of the object that was copied; written last
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from megablend.arrays import Int64s
from megablend.distributed.base import Communicator
from megablend.errors import ChangedFileError
from megablend.storage.base import Allocate, Bytes, FileStat, Storage
from megablend.storage.location import find_scheme
from megablend.storage.parallel_map import parallel_map
from megablend.storage.wrapper import WrapperStorage
from megablend.system.atomic_write import replace_file, translate_os_errors

_COPY_BYTES = 64 << 20
"""Number of bytes that are read at a time while a file is copied."""


class IdxCopies(WrapperStorage):
    """A storage that reads each `.idx` of an object store from its local copy, if there is a copy
    of the current version. `stat` still asks the object store."""

    def __init__(self, inner: Storage, folder: Path) -> None:
        super().__init__(inner)
        self._folder = folder
        self._places: dict[str, str] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return IdxCopies, (self.inner, self._folder)

    def for_reading(self) -> Storage:
        """See Storage.for_reading. The returned storage compares the versions of copies again."""
        return IdxCopies(self.inner.for_reading(), self._folder)

    def place(self, path: str) -> str:
        """Return the path from which a file is read: the path of its local copy, or `path`
        itself."""
        if not path.endswith(".idx") or not find_scheme(path):
            return path
        if path not in self._places:
            copy = copy_path(self._folder, path)
            is_current = _read_seen(copy) == self.inner.stat(path)
            if is_current:
                # The copy may have been replaced since the storage opened it: `stat` notices that,
                # and closes the old file
                self.inner.stat(str(copy))
            self._places[path] = str(copy) if is_current else path
        return self._places[path]

    def read(self, path: str, offset: int, size: int) -> bytes:
        """See Storage.read."""
        return self.inner.read(self.place(path), offset, size)

    def read_ranges(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate
    ) -> tuple[Bytes, Int64s]:
        """See Storage.read_ranges."""
        return self.inner.read_ranges(self.place(path), offsets, sizes, allocate)

    def descriptor(self, path: str) -> AbstractContextManager[int]:
        """See Storage.descriptor."""
        return self.inner.descriptor(self.place(path))


def copy_path(folder: Path, path: str) -> Path:
    """Return the path of the local copy of an `.idx`.

    Args:
        path: the URL of the `.idx`.
    """
    return folder / path.partition("://")[2]


def make_copies(
    prefixes: Sequence[str], folder: Path, *, launch: Communicator, storage: Storage
) -> None:
    """Copy the `.idx` files of pairs in object stores, unless there are copies of the current
    versions. All ranks must call this function; each copies a share of the files.

    Raises: DataError if a file cannot be read; CacheError if its copy cannot be written.
    """
    paths = sorted(f"{prefix}.idx" for prefix in prefixes if find_scheme(prefix))
    share = paths[launch.rank :: launch.size]
    if share:
        threads = storage.limits(share[0]).max_files
        parallel_map(lambda path: _copy(path, folder, storage), share, threads)
    launch.barrier()


def _copy(path: str, folder: Path, storage: Storage) -> None:
    """Copy an `.idx`, unless there is a copy of the current version."""
    copy = copy_path(folder, path)
    state = storage.stat(path)
    if _read_seen(copy) == state:
        return
    starts = range(0, state.size, _COPY_BYTES)
    data = b"".join(
        storage.read(path, start, min(_COPY_BYTES, state.size - start)) for start in starts
    )
    if storage.stat(path) != state:
        raise ChangedFileError(
            path, "changed while it was being copied; build again when its writer has finished"
        )
    with translate_os_errors(copy):
        copy.parent.mkdir(parents=True, exist_ok=True)
        _seen_path(copy).unlink(missing_ok=True)
        replace_file(copy, data)
        replace_file(_seen_path(copy), json.dumps(dataclasses.asdict(state)).encode())


def _seen_path(copy: Path) -> Path:
    return copy.with_name(f"{copy.name}.seen")


def _read_seen(copy: Path) -> FileStat | None:
    """Return the version of the object that was copied; None if the copy is missing or
    incomplete."""
    try:
        seen = FileStat(**json.loads(_seen_path(copy).read_text(encoding="utf-8")))
        return seen if copy.stat().st_size == seen.size else None
    except (OSError, ValueError, TypeError):
        return None
