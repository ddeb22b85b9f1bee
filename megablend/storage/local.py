"""Files of a local or mounted file system: positioned reads on a pool of descriptors that the process shares."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from megablend.errors import CHANGED_REMEDY, ChangedFileError, CorruptFileError, DataError, MissingFileError
from megablend.kernels.file_ranges import read_ranges
from megablend.storage.base import Allocate, Bytes, FileStat, Int64s, ReadLimits, Storage
from megablend.storage.descriptors import DescriptorPool, shared_pool
from megablend.storage.find import Found, find_files
from megablend.storage.futures import call_now
from megablend.system.failures import cause_of, remedy_of

_UNCHECKED_BYTES = 1 << 20
"""Larger reads are compared with the file's size first, since a read allocates what it asks for."""


_LIMITS = ReadLimits(max_gap_bytes=2 << 10, max_merged_bytes=4 << 20, max_reads=8)
"""A gap is less than a page."""


@dataclass(frozen=True, slots=True)
class LocalStorage:
    """Files named by plain paths. Holds nothing but pools of descriptors: safe to share, to pickle and to use after a fork."""

    pool: DescriptorPool = field(default_factory=partial(shared_pool, "local"))
    direct_pool: DescriptorPool = field(default_factory=partial(shared_pool, "direct"))
    """Descriptors that pass the page cache; see `storage.direct`."""

    def limits(self, path: str) -> ReadLimits:
        """See Storage.limits."""
        return _LIMITS

    def for_checking(self) -> Storage:
        """See Storage.for_checking."""
        return _CheckingStorage(shared_pool("checking"))

    def find(self, pattern: str) -> Found:
        """Files that match `pattern`, and what could not be looked into; see Storage.find."""
        return find_files(pattern)

    def glob(self, pattern: str) -> list[str]:
        """Paths of files that match `pattern`, sorted; see Storage.glob. Directories are no files."""
        return [match.path for match in find_files(pattern).files]

    def is_folder(self, path: str) -> bool:
        """Whether `path` is a folder that is there."""
        return Path(path).is_dir()

    def is_readable(self, path: str) -> bool:
        """See Storage.is_readable."""
        return os.access(path, os.R_OK)

    def stat(self, path: str) -> FileStat:
        """Size and identity of a file. A descriptor of a file that `path` no longer names is let go.

        Raises: MissingFileError; DataError where it is no file or cannot be reached.
        """
        try:
            state = os.stat(path)  # noqa: PTH116  (of 100,000 files, a Path of each takes as long as its stat)
        except OSError as error:
            raise data_error(path, error) from error
        if not stat.S_ISREG(state.st_mode):
            raise DataError(path, "is not a regular file")
        self.pool.invalidate_if_replaced(path, state)
        self.direct_pool.invalidate_if_replaced(path, state)
        return file_stat(state)

    def stat_opened(self, path: str) -> FileStat:
        """See Storage.stat_opened."""
        try:
            with self.pool.borrow(path) as fd:
                return file_stat(os.fstat(fd))
        except OSError as error:
            raise data_error(path, error) from error

    def read(self, path: str, offset: int, size: int) -> bytes:
        """Exactly `size` bytes from `offset`.

        Raises: MissingFileError; ChangedFileError where `path` names another file than before, and was not asked for its
            state since; CorruptFileError where the file ends before; DataError where it cannot be read.
        """
        if offset < 0 or size < 0 or offset + size >= 1 << 63:
            raise CorruptFileError(path, f"{size} bytes are wanted from byte {offset}: no file has these")
        try:
            with self.pool.borrow(path) as fd:
                if size > _UNCHECKED_BYTES and os.fstat(fd).st_size < offset + size:
                    raise ends_early(path, offset, size, os.fstat(fd).st_size)
                data = os.pread(fd, size, offset)
                if len(data) == size:
                    return data
                return _read_rest(path, fd, offset, size, data)
        except OSError as error:
            raise data_error(path, error) from error

    def read_ranges(self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate) -> tuple[Bytes, Int64s]:
        """Several ranges, side by side in one array; see Storage.read_ranges. Raises as `read` does."""
        ends = np.cumsum(sizes)
        begins, out = ends - sizes, allocate(int(ends[-1]) if len(ends) else 0)
        try:
            with self.pool.borrow(path) as fd:
                _fill(path, fd, offsets, sizes, begins, out)
        except OSError as error:
            raise data_error(path, error) from error
        return out, begins

    def fetch(self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate) -> Future[tuple[Bytes, Int64s]]:
        """See Storage.fetch: they are read before this returns."""
        return call_now(self.read_ranges, path, offsets, sizes, allocate)

    @contextmanager
    def descriptor(self, path: str) -> Iterator[int]:
        """Lends the pool's descriptor of a file. Raises: MissingFileError; DataError where it cannot be opened."""
        with ExitStack() as stack:
            try:
                fd = stack.enter_context(self.pool.borrow(path))
            except OSError as error:
                raise data_error(path, error) from error
            yield fd


@dataclass(frozen=True, slots=True)
class _CheckingStorage(LocalStorage):
    """Local files through descriptors of their own, so that their readers keep what they opened."""

    def stat(self, path: str) -> FileStat:
        """See Storage.stat."""
        try:
            state = Path(path).stat()
        except OSError as error:
            raise data_error(path, error) from error
        self.pool.invalidate_if_replaced(path, state)
        return file_stat(state)


def file_stat(state: os.stat_result) -> FileStat:
    """Size and identity of a file in this state."""
    return FileStat(size=state.st_size, etag=f"{state.st_mtime_ns:x}-{state.st_ctime_ns:x}-{state.st_ino:x}")


def _fill(path: str, fd: int, offsets: Int64s, sizes: Int64s, begins: Int64s, out: Bytes) -> None:
    """Read ranges; one that stops early (at 2 GiB on Linux, or where a signal came) is gone on with here."""
    done = 0
    while True:
        ahead = (
            len(offsets) - done > 1
        )  # of a single range nothing is gained, and the system's own reading ahead is lost
        done += read_ranges(fd, offsets[done:], sizes[done:], begins[done:], ahead, out)
        if done == len(offsets):
            return
        offset, size, begin = int(offsets[done]), int(sizes[done]), int(begins[done])
        out[begin : begin + size] = np.frombuffer(_read_rest(path, fd, offset, size, b""), np.uint8)
        done += 1


def _read_rest(path: str, fd: int, offset: int, size: int, data: bytes) -> bytes:
    """A read may stop early (at 2 GiB on Linux, or where a signal came): go on until all is there or the file ends."""
    parts, got = [data], len(data)
    while got < size:
        part = os.pread(fd, size - got, offset + got)
        if not part:
            raise ends_early(path, offset, size, os.fstat(fd).st_size)
        parts.append(part)
        got += len(part)
    return b"".join(parts)


def ends_early(path: str, offset: int, size: int, found: int) -> CorruptFileError:
    """What to say of a file of `found` bytes, of which `size` are wanted from `offset` on."""
    return CorruptFileError(
        path,
        f"truncated: {size} bytes are wanted here, but the file ends at byte {found}; restore it",
        offset=offset,
    )


def data_error(path: str, error: OSError) -> DataError:
    """What to say of a file that the system does not open or read."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return MissingFileError(path, "no such file")
    if error.errno == errno.ESTALE:
        return ChangedFileError(path, f"was replaced while it was in use; {CHANGED_REMEDY}")
    return DataError(path, f"cannot be read: {cause_of(error)}: {remedy_of(error.errno)}")
