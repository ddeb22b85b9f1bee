"""The system calls with which the owner writes to the disk. They are in one place so that tests can
make each of them fail."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from megablend.errors import DataError, MissingFileError
from megablend.system.failures import cause_of, remedy_of

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""The numbers of errors that indicate a full disk or quota."""
_KEEP_SIZE_PUNCH_HOLE = 1 | 2
"""Linux's FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE."""
_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64


def punch_hole(fd: int, offset: int, size: int) -> None:
    """Free the disk space of a range of a file, which then reads as zeros. Raises: OSError."""
    if _fallocate(fd, _KEEP_SIZE_PUNCH_HOLE, offset, size):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset`, by several system calls if needed. Raises: OSError."""
    while len(data):
        num_written = os.pwrite(fd, data, offset)
        data = data[num_written:]
        offset += num_written


def count_free(path: Path) -> int:
    """Return the number of bytes on a file system that are free for this user. Raises: OSError."""
    file_system = os.statvfs(path)
    return file_system.f_bavail * file_system.f_frsize


def check_writable(path: Path) -> None:
    """Check that a file system is writable. Raises: OSError if it has become read-only."""
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))


class DiskCalls(NamedTuple):
    """The system calls of the process that owns a mirror. Each raises OSError if it fails."""

    write: Callable[[int, memoryview, int], None] = write_all
    """Writes data to a file. Arguments: descriptor, data, offset."""
    allocate: Callable[[int, int, int], None] = os.posix_fallocate
    """Allocates a range of a file. Arguments: descriptor, offset, size."""
    punch: Callable[[int, int, int], None] = punch_hole
    """Makes a hole in a file. Arguments: descriptor, offset, size."""
    sync: Callable[[int], None] = os.fdatasync
    """Makes the data of a file durable. Argument: descriptor."""
    flush: Callable[[mmap.mmap], object] = mmap.mmap.flush
    """Makes the data of a mapped file durable. Argument: mapping."""
    free: Callable[[Path], int] = count_free
    """Returns the number of free bytes of a file system. Argument: a path in the file system."""
    check: Callable[[Path], None] = check_writable
    """Checks that a file system is writable. Argument: a path in the file system."""


def disk_error(path: Path, error: OSError) -> DataError:
    """Return the DataError to raise if a file of the mirror could not be written or read."""
    error_class = MissingFileError if isinstance(error, FileNotFoundError) else DataError
    return error_class(
        str(path), f"the mirror's disk failed: {cause_of(error)}; {remedy_of(error.errno)}"
    )
