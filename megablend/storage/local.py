"""Read files of a local or mounted file system, through a pool of descriptors that the process
shares."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Container
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from megablend.arrays import Int64s
from megablend.errors import (
    CHANGED_REMEDY,
    ChangedFileError,
    CorruptFileError,
    DataError,
    MissingFileError,
    RefusedFileError,
)
from megablend.storage.base import Allocate, Bytes, FileStat, KnownFiles, ReadLimits, Storage
from megablend.storage.descriptors import DescriptorPool, OpenedFiles, identity_of, shared_pool
from megablend.storage.find import SPECIAL, Found, find_files
from megablend.storage.futures import call_now
from megablend.system import count_cpus
from megablend.system.failures import cause_of, read_remedy_of
from megablend.system.safe_open import open_regular

_UNCHECKED_BYTES = 1 << 20
"""Reads above this size are first checked against the size of the file, since a damaged offset
could otherwise make the process allocate far too much memory."""
MAX_READS = 8
"""The maximum number of reads in flight; no disk is faster with more. LIMITS allows at most one
read per CPU, since reads through the page cache also copy bytes. More reads would only take
memory."""
_INODES = re.compile(r"(?<=\b[0-9a-f]{16}-[0-9a-f]{16})-[0-9a-f]+\b")
"""The inodes in etags of `file_stat`, after two times in nanoseconds since 1970. Times before 2006
have fewer digits: etags of other storages may look like those, and stay as they are."""
LIMITS = ReadLimits(
    separate_bytes=32 << 10,
    max_gap_bytes=2 << 10,  # less than a page
    max_merged_bytes=4 << 20,
    max_reads=min(MAX_READS, count_cpus()),
    is_synchronous=True,
)
"""Limits of reads through the page cache."""


@dataclass(frozen=True, slots=True)
class LocalStorage:
    """A storage of files named by plain paths: thread-safe, picklable, usable after a fork.

    It keeps reading the file that it opened first at each path. If another file has replaced it,
    reads fail until `find` returns the path again.
    """

    pool: DescriptorPool = field(default_factory=partial(shared_pool, "local"))
    direct_pool: DescriptorPool = field(default_factory=partial(shared_pool, "direct"))
    """Descriptors that bypass the page cache; see `storage.direct`."""
    opened: OpenedFiles = field(default_factory=dict, compare=False, repr=False)
    """The identity of the file that was opened first at each path. Only this file is read."""

    def __reduce__(self) -> tuple[type[LocalStorage], tuple[DescriptorPool, DescriptorPool]]:
        return type(self), (self.pool, self.direct_pool)  # another process opens files itself

    def limits(self, path: str) -> ReadLimits:
        """See Storage.limits."""
        return LIMITS

    def for_checking(self) -> Storage:
        """See Storage.for_checking."""
        return _CheckingStorage(shared_pool("checking"))

    def for_reading(self) -> Storage:
        """See Storage.for_reading; the pools of descriptors are shared."""
        return replace(self, opened={})

    def find(self, pattern: str) -> Found:
        """See Storage.find. Later reads accept files that have replaced others."""
        try:
            listing = find_files(pattern)
        except OSError as error:
            raise data_error(str(error.filename or pattern), error) from error
        if self.opened:
            for match in listing.files:
                self.opened.pop(match.path, None)
        return listing

    def glob(self, pattern: str) -> list[str]:
        """See Storage.glob."""
        return [match.path for match in self.find(pattern).files]

    def is_folder(self, path: str) -> bool:
        """See Storage.is_folder."""
        return Path(path).is_dir()

    def is_readable(self, path: str) -> bool:
        """See Storage.is_readable."""
        if os.access(path, os.R_OK):
            return True
        try:
            with open_regular(path):
                return True
        except PermissionError:
            return False
        except OSError as error:
            raise data_error(path, error) from error

    def stat(self, path: str) -> FileStat:
        """See Storage.stat.

        Raises: MissingFileError; ChangedFileError if another file has replaced the one that is
            being read; DataError if the path is not a file or cannot be accessed.
        """
        state = _stat_file(path, self.opened)
        if self.opened:
            identity = identity_of(state)
            if not self.opened.get(path, identity).is_same(identity):
                raise replaced_error(path)
        return file_stat(state)

    def stat_opened(self, path: str) -> FileStat:
        """See Storage.stat_opened."""
        try:
            with self.pool.borrow(path, self.opened) as fd:
                return file_stat(os.fstat(fd))
        except OSError as error:
            raise data_error(path, error, self.opened) from error

    def known_files(self) -> KnownFiles:
        """Return an empty dict, since a stat is cheap."""
        return {}

    def add_known_files(self, known: KnownFiles) -> None:
        """See Storage.add_known_files."""

    def read(self, path: str, offset: int, size: int) -> bytes:
        """See Storage.read.

        Raises: MissingFileError; ChangedFileError if `path` refers to a different file than before,
            and `find` was not called in between; CorruptFileError if the range extends beyond the
            end of the file; DataError if the file cannot be read.
        """
        if offset < 0 or size < 0 or offset + size >= 1 << 63:
            raise CorruptFileError(
                path,
                f"invalid range: offset {offset}, length {size}; restore the file, or index it again",
            )
        try:
            with self.pool.borrow(path, self.opened) as fd:
                if size > _UNCHECKED_BYTES and os.fstat(fd).st_size < offset + size:
                    raise ends_early(path, offset, size, os.fstat(fd).st_size)
                data = os.pread(fd, size, offset)
                if len(data) == size:
                    return data
                return _read_rest(path, fd, offset, size, data)
        except OSError as error:
            raise data_error(path, error, self.opened) from error

    def read_ranges(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate
    ) -> tuple[Bytes, Int64s]:
        """See Storage.read_ranges."""
        ends = sizes.cumsum()
        begins = ends - sizes
        out = allocate(int(ends[-1]) if len(ends) else 0)
        try:
            with self.pool.borrow(path, self.opened) as fd:
                # A single range takes one call, unless the call stops early
                is_read = len(sizes) == 1 and os.preadv(fd, [out.data], int(offsets[0])) == len(out)
                if not is_read:
                    _fill(path, fd, offsets, sizes, begins, out)
        except OSError as error:
            raise data_error(path, error, self.opened) from error
        return out, begins

    def fetch(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate
    ) -> Future[tuple[Bytes, Int64s]]:
        """See Storage.fetch. The ranges are read before the call returns."""
        return call_now(self.read_ranges, path, offsets, sizes, allocate)

    def descriptor(self, path: str) -> AbstractContextManager[int]:
        """See Storage.descriptor. The descriptor belongs to the pool."""
        try:
            return self.pool.borrow(path, self.opened)
        except OSError as error:
            raise data_error(path, error, self.opened) from error


class _CheckingStorage(LocalStorage):
    """A storage of local files for checking. It has its own descriptors, so that other readers keep
    the files that they opened."""

    __slots__ = ()

    def stat(self, path: str) -> FileStat:
        """See Storage.stat. Later reads use the file that exists at this call."""
        state = _stat_file(path, self.opened)
        identity = identity_of(state)
        if self.opened.get(path, identity) != identity:
            self.opened[path] = identity
        return file_stat(state)


def _stat_file(path: str, opened: Container[str]) -> os.stat_result:
    """Return the state of a regular file. Raises: MissingFileError; DataError if the path is not a
    file or cannot be accessed."""
    try:
        state = os.stat(path)  # noqa: PTH116  (of 100,000 files, a Path of each takes as long as its stat)
    except OSError as error:
        raise data_error(path, error, opened) from error
    if not stat.S_ISREG(state.st_mode):
        description = "a folder, not a regular file" if stat.S_ISDIR(state.st_mode) else SPECIAL
        raise DataError(path, f"is {description}; restore the file, or remove it from the config")
    return state


def file_stat(state: os.stat_result) -> FileStat:
    """Return the size and the identity of a file, given its stat result."""
    return FileStat(
        size=state.st_size, etag=f"{state.st_mtime_ns:x}-{state.st_ctime_ns:x}-{state.st_ino:x}"
    )


def without_inodes(etags: str) -> str:
    """Return the etag of a file, or those of several, without inodes. Some file systems (FUSE) give
    a file another inode from time to time, and on each node. Etags of other storages stay as they
    are."""
    return _INODES.sub("", etags)


def modification_time(etag: str) -> str:
    """Return the part of the etag of `file_stat` that is the same on all nodes that mount the
    file's folder: the other time and the inode may differ between mounts."""
    return etag.partition("-")[0]


def _fill(path: str, fd: int, offsets: Int64s, sizes: Int64s, begins: Int64s, out: Bytes) -> None:
    """Read ranges into `out`, completing reads that stopped early (at 2 GiB on Linux, or because of
    a signal)."""
    # Imported here, since readers of a mirror need no compiled kernels
    from megablend.kernels.file_ranges import fill_ranges

    # Announcing a single range gains nothing, and disables the system's own read-ahead
    for i in fill_ranges(fd, offsets, sizes, begins, len(offsets) > 1, out):
        begin = int(begins[i])
        size = int(sizes[i])
        data = _read_rest(path, fd, int(offsets[i]), size, b"")
        out[begin : begin + size] = np.frombuffer(data, np.uint8)


def _read_rest(path: str, fd: int, offset: int, size: int, data: bytes) -> bytes:
    """Complete a read that returned only `data`. Raises: CorruptFileError if the file ends before
    the range does."""
    parts = [data]
    num_bytes = len(data)
    while num_bytes < size:
        part = os.pread(fd, size - num_bytes, offset + num_bytes)
        if not part:
            raise ends_early(path, offset, size, os.fstat(fd).st_size)
        parts.append(part)
        num_bytes += len(part)
    return b"".join(parts)


def ends_early(path: str, offset: int, size: int, found: int) -> CorruptFileError:
    """Return the error for a range that extends beyond the end of a file.

    Args:
        offset, size: the requested range.
        found: the size of the file.
    """
    return CorruptFileError(
        path,
        f"is truncated (expected {size} bytes here, but the file ends at byte {found}); restore the file",
        offset=offset,
    )


def data_error(path: str, error: OSError, opened: Container[str] = ()) -> DataError:
    """Return the error for a file that the system cannot open or read.

    Args:
        opened: the paths at which the storage has opened files before.
    """
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return MissingFileError(path, "no such file")
    if error.errno == errno.ESTALE and path in opened:
        return replaced_error(path)
    error_class = RefusedFileError if isinstance(error, PermissionError) else DataError
    return error_class(path, f"cannot be read: {cause_of(error)}; {read_remedy_of(error.errno)}")


def replaced_error(path: str) -> ChangedFileError:
    """Return the error for a path that no longer refers to the file that is being read."""
    return ChangedFileError(path, f"was replaced while it was in use; {CHANGED_REMEDY}")
