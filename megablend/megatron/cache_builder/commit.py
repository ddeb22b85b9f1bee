"""Giving finished artefacts their names, many at a time: one flush for all of their files, then renames, descriptions last.

Megatron takes an artefact for present when its files exist, so no name may appear before the bytes are on the disk, and no
description before its arrays: a build that is killed, or a machine that loses power, then leaves nothing that is taken for a hit.

Where the file system is a local one its `syncfs` flushes all files at once, which costs about as much as flushing two or three of
them. Elsewhere (network file systems need not pass it on) each file is flushed when it is closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

from megablend.fs.atomic_write import TEMPORARY, flush_folder, translate_os_errors
from megablend.megatron.cache_builder.artefacts import Artefact

WORK_FOLDER = ".megablend"
"""Inside the cache, on the same file system: the build lock, and files that are not whole yet."""
_BATCH_BYTES = 64 << 20
"""Arrays that are committed together; large enough that flushes are few, small enough that a killed build loses little."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
_LOCAL = {0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x01021994, 0x794C7630}
"""Magic numbers of ext2/3/4, XFS, Btrfs, F2FS, tmpfs and overlayfs, from linux/magic.h."""
_REPORTS_ERRORS = (5, 8)
"""The Linux version from which on syncfs reports errors of writing."""


class StoppedError(Exception):
    """The build has failed elsewhere; whatever is under way ends, and its error is not reported."""


class Commits:
    """One rank's finished artefacts; a context that commits the last ones when it ends well, and removes what is not committed.

    Args:
        cache: in which WORK_FOLDER exists.
        stop: set from elsewhere where the build has failed: nothing is committed from then on, StoppedError is raised.
    """

    def __init__(self, cache: Path, stop: threading.Event) -> None:
        self.stop = stop
        self.folder = cache / WORK_FOLDER / f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}"
        """Where files are until they are committed, under their final names."""
        self._cache = cache
        self._together = can_flush_together(cache)
        self._waiting: list[Artefact] = []
        self._waiting_bytes = 0
        self._lock = threading.Lock()
        with translate_os_errors(self.folder):
            self.folder.mkdir()

    def __enter__(self) -> Commits:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.close()

    @contextmanager
    def new_file(self, name: str) -> Iterator[int]:
        """A descriptor of a new file of this name, to write to. Raises: CacheError where it cannot be written."""
        try:
            fd = os.open(f"{self.folder}/{name}", _NEW, 0o666)
            try:
                yield fd
                if not self._together:
                    os.fsync(fd)
            finally:
                os.close(fd)
        except OSError:
            with translate_os_errors(self._cache / name):
                raise

    def add(self, artefact: Artefact) -> None:
        """Commit an artefact whose files are all written, now or later. From any thread. Raises: CacheError; StoppedError."""
        with self._lock:
            self._waiting.append(artefact)
            self._waiting_bytes += artefact.nbytes
            due = self._waiting_bytes >= _BATCH_BYTES
        if due:
            self.finish()

    def finish(self) -> None:
        """Commit all that were added. Raises: CacheError; StoppedError."""
        with self._lock:
            batch, self._waiting, self._waiting_bytes = self._waiting, [], 0
        if self.stop.is_set():
            raise StoppedError
        if batch:
            with translate_os_errors(self._cache):
                self._commit(batch)

    def discard(self, artefact: Artefact) -> None:
        """Remove the files of an artefact that was not added."""
        for name in artefact.file_names:
            with contextlib.suppress(OSError):
                os.unlink(f"{self.folder}/{name}")  # noqa: PTH108 a third of the time of a Path, of thousands

    def close(self) -> None:
        """Remove what was not committed."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _commit(self, batch: Sequence[Artefact]) -> None:
        if self._together:
            _syncfs(self._cache)
        # A description of damaged arrays must not be there while they are replaced one by one.
        removed = [self._removed(artefact.description_name) for artefact in batch]
        if any(removed):
            flush_folder(self._cache)
        for artefact in batch:
            for array in artefact.arrays:
                self._rename(artefact.file_name(array.name))
        flush_folder(self._cache)
        for artefact in batch:
            self._rename(artefact.description_name)

    def _rename(self, name: str) -> None:
        os.rename(f"{self.folder}/{name}", f"{self._cache}/{name}")  # noqa: PTH104

    def _removed(self, name: str) -> bool:
        try:
            os.unlink(f"{self._cache}/{name}")  # noqa: PTH108
        except FileNotFoundError:
            return False
        return True


def can_flush_together(folder: Path) -> bool:
    """Whether `syncfs` puts all files of the folder's file system on the disk, and reports where that fails."""
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    if release is None or (int(release[1]), int(release[2])) < _REPORTS_ERRORS or not hasattr(_libc(), "syncfs"):
        return False
    state = ctypes.create_string_buffer(256)  # struct statfs, whose first member is a long, f_type
    if _libc().statfs(os.fsencode(folder), state):
        return False
    return ctypes.c_long.from_buffer(state).value & 0xFFFFFFFF in _LOCAL


def _syncfs(folder: Path) -> None:
    """Wait until all files of the folder's file system are on the disk. Raises: OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while _libc().syncfs(fd):
            if (number := ctypes.get_errno()) != errno.EINTR:
                raise OSError(number, os.strerror(number), str(folder))
    finally:
        os.close(fd)


@cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)
