"""Commit finished artefacts in batches: the files of a batch are flushed to disk together, and then
renamed to their final names, descriptions last.

Megatron considers an artefact complete if its files exist. So no file may get its final name before
its bytes are on the disk, and no description before its arrays. If a build is killed or a machine
loses power, no incomplete artefact is then taken for a complete one.

On local file systems, `syncfs` flushes all files together, which takes about as long as flushing
two or three single files. On other file systems, each file is flushed before it is closed, since
network file systems may ignore `syncfs`.
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
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from megablend.formats.base import Array
from megablend.megatron.cache_builder.artefacts import ArraySpec, Artefact
from megablend.system.atomic_write import TEMPORARY, flush_folder, translate_os_errors

WORK_FOLDER = ".megablend"
"""The folder for the build lock and incomplete files. It is inside the cache, so that it is on the
same file system."""
_MIN_BATCH_BYTES = 8 << 20
"""Minimum number of bytes of arrays that are committed together, so that there are few flushes."""
_MAX_BATCH_BYTES = 64 << 20
"""Maximum number of bytes that are committed together, so that a killed build loses little."""
_MIN_BATCHES = 4
"""Minimum number of commits in a build, if batches are large enough. All commits but the last
overlap with building."""
MAX_BUFFERS = 1024
"""Maximum number of buffers that Linux writes in one call (IOV_MAX)."""
_NEW_FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_LOCAL_FILE_SYSTEMS = {0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x01021994, 0x794C7630}
"""The magic numbers of ext2/3/4, XFS, Btrfs, F2FS, tmpfs and overlayfs, from linux/magic.h."""
_REPORTS_ERRORS = (5, 8)
"""The first version of Linux whose syncfs reports write errors."""
_BUFFER_BYTES = 1 << 20
"""Number of bytes of rows that are collected before they are written, since a system call takes
longer than writing a small array."""


class StoppedError(Exception):
    """Raised to end work in progress when the build has failed elsewhere. This exception is never
    reported."""


class Commits:
    """The finished artefacts of a rank, which are committed in batches. `finish` commits the last
    batch.

    Args:
        cache: folder of the cache, in which WORK_FOLDER exists.
        stop: set when the build has failed elsewhere. From then on nothing is committed, and
            methods raise StoppedError.
        nbytes: total number of bytes of the arrays that will be added, as far as known.
    """

    def __init__(self, cache: Path, stop: threading.Event, nbytes: int = 0) -> None:
        self.stop = stop
        self.folder = cache / WORK_FOLDER / f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}"
        """The folder of the files that are not committed yet. They already have their final names
        there."""
        self._cache = cache
        self._flushes_together = can_flush_together(cache)
        self._waiting: list[Artefact] = []
        self._waiting_bytes = 0
        self._batch_bytes = min(_MAX_BATCH_BYTES, max(_MIN_BATCH_BYTES, nbytes // _MIN_BATCHES))
        self._lock = threading.Lock()
        with translate_os_errors(self.folder):
            self.folder.mkdir()
            self._folder_fd = self._open(self.folder)
            self._cache_fd = self._open(cache)

    def _open(self, folder: Path) -> int:
        fd = os.open(folder, _FOLDER_FLAGS)
        # Not closed by `close`: a thread that is still running may use the descriptor, whose number
        # might belong to another file by then
        weakref.finalize(self, os.close, fd)
        return fd

    @contextmanager
    def new_file(self, name: str) -> Iterator[int]:
        """Create a new file with this name, as a context manager that yields its file descriptor.
        Raises: CacheError if the file cannot be written."""
        with translate_os_errors(self._cache / name), _naming_files_of(self.folder):
            fd = os.open(name, _NEW_FILE_FLAGS, 0o666, dir_fd=self._folder_fd)
            try:
                yield fd
                if not self._flushes_together:
                    os.fsync(fd)
            finally:
                os.close(fd)

    def add(self, artefact: Artefact) -> None:
        """Add an artefact whose files are completely written. It is committed now or later. May be
        called from any thread. Raises: CacheError if it cannot be committed; StoppedError."""
        with self._lock:
            self._waiting.append(artefact)
            self._waiting_bytes += artefact.nbytes
            is_due = self._waiting_bytes >= self._batch_bytes
        if is_due:
            self.finish()

    def finish(self) -> None:
        """Commit all artefacts that are still waiting. Raises: CacheError if they cannot be
        committed; StoppedError."""
        with self._lock:
            batch = self._waiting
            self._waiting = []
            self._waiting_bytes = 0
        if self.stop.is_set():
            raise StoppedError
        if batch:
            with translate_os_errors(self._cache), _naming_files_of(self._cache):
                self._commit(batch)

    def discard(self, artefact: Artefact) -> None:
        """Remove the files of an artefact that has not been added."""
        for name in artefact.file_names:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self._folder_fd)

    def close(self) -> None:
        """Remove files that were not committed."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _commit(self, batch: Sequence[Artefact]) -> None:
        if self._flushes_together:
            _syncfs(self._cache_fd)
        descriptions = [artefact.description_name for artefact in batch]
        # While damaged arrays are replaced one by one, their description must not exist
        self._remove(descriptions)
        self._rename([name for artefact in batch for name in artefact.file_names[1:]])
        flush_folder(self._cache)
        self._rename(descriptions)

    def _rename(self, names: Sequence[str]) -> None:
        for name in names:
            os.rename(name, name, src_dir_fd=self._folder_fd, dst_dir_fd=self._cache_fd)

    def _remove(self, names: Sequence[str]) -> None:
        removed = False
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._cache_fd)
                removed = True
        if removed:
            flush_folder(self._cache)


@contextmanager
def _naming_files_of(folder: Path) -> Iterator[None]:
    """Add the path of the folder to the file name in an OSError. Calls relative to a folder's
    descriptor report the bare name."""
    try:
        yield
    except OSError as error:
        if isinstance(error.filename, str) and "/" not in error.filename:
            error.filename = str(folder / error.filename)
        raise


def can_flush_together(folder: Path) -> bool:
    """Return whether `syncfs` reliably flushes all files of the folder's file system to disk and
    reports failures."""
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    if release is None or (int(release[1]), int(release[2])) < _REPORTS_ERRORS:
        return False
    if not hasattr(_libc(), "syncfs"):
        return False
    # struct statfs, whose first member is a long, f_type
    status = ctypes.create_string_buffer(256)
    if _libc().statfs(os.fsencode(folder), status):
        return False
    return ctypes.c_long.from_buffer(status).value & 0xFFFFFFFF in _LOCAL_FILE_SYSTEMS


def _syncfs(folder: int) -> None:
    """Wait until all files of an open folder's file system are on the disk.

    Args:
        folder: file descriptor of the folder.
    Raises: OSError if a file cannot be written.
    """
    while _libc().syncfs(folder):
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


@cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def write_all(fd: int, buffers: list[Any]) -> None:
    """Write all bytes of the buffers. Several system calls are needed if the system stops early,
    which happens at 2 GiB or on a signal."""
    while buffers:
        done = os.writev(fd, buffers[:MAX_BUFFERS])
        while buffers and done >= len(buffers[0]):
            done -= len(buffers.pop(0))
        if buffers and done:
            buffers[0] = memoryview(buffers[0])[done:]


class ArrayFile:
    """A `.npy` file that is written from front to back."""

    def __init__(self, fd: int, spec: ArraySpec, stop: threading.Event) -> None:
        self.dtype = np.dtype(spec.dtype)
        self._fd = fd
        self._left = spec.nbytes
        self._stop = stop
        self._buffers: list[Any] = [spec.header]
        self._buffered = 0

    def append(self, rows: Array) -> None:
        """Write the next rows. They must have the array's dtype, and must not be changed
        afterwards. Raises: StoppedError."""
        if self._stop.is_set():
            raise StoppedError
        assert rows.dtype == self.dtype
        if rows.nbytes:
            self._left -= rows.nbytes
            self._buffered += rows.nbytes
            self._buffers.append(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
        if self._buffered >= _BUFFER_BYTES or len(self._buffers) == MAX_BUFFERS:
            self._write()

    def close(self) -> None:
        """Write the remaining rows. The array must be complete."""
        assert self._left == 0, f"{self._left} bytes of the array are missing"
        self._write()

    def _write(self) -> None:
        write_all(self._fd, self._buffers)
        self._buffers = []
        self._buffered = 0


class ArtefactWriter:
    """A context manager for writing the files of one artefact. If the context exits without an
    error, the artefact is added to `commits`; otherwise its files are removed.

    When the build has been stopped, methods write nothing and raise StoppedError.
    """

    def __init__(self, artefact: Artefact, commits: Commits) -> None:
        self._artefact = artefact
        self._commits = commits
        self._written: set[str] = set()

    def __enter__(self) -> ArtefactWriter:
        return self

    @contextmanager
    def array(self, name: str) -> Iterator[ArrayFile]:
        """Open the file of an array, as a context manager. All rows must be written when the
        context ends."""
        (spec,) = (spec for spec in self._artefact.arrays if spec.name == name)
        self._written.add(name)
        with self._commits.new_file(self._artefact.file_name(name)) as fd:
            array = ArrayFile(fd, spec, self._commits.stop)
            yield array
            array.close()

    def write(self, name: str, array: Array) -> None:
        """Write a whole array to its file."""
        with self.array(name) as file:
            file.append(array)

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error_type is None:
            self._commit()
        else:
            self._commits.discard(self._artefact)

    def _commit(self) -> None:
        assert self._written == {array.name for array in self._artefact.arrays}
        with self._commits.new_file(self._artefact.description_name) as fd:
            write_all(fd, [self._artefact.description.encode()])
        self._commits.add(self._artefact)
