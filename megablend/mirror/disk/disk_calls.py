"""What the owner asks of the disk, in one place, so that tests can let each of it fail."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from megablend.errors import DataError, MissingFileError
from megablend.system.failures import cause_of, remedy_of

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_KEEP_SIZE_PUNCH_HOLE = 1 | 2
_KEEPS_ORDER = platform.machine() == "x86_64"
_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64


def punch_hole(fd: int, offset: int, size: int) -> None:
    """Give a range of a file back to the file system; it reads as zeros then. Raises: OSError."""
    if _fallocate(fd, _KEEP_SIZE_PUNCH_HOLE, offset, size):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all of the data. Raises: OSError."""
    while len(data):
        done = os.pwrite(fd, data, offset)
        data = data[done:]
        offset += done


def count_free(path: Path) -> int:
    """Bytes that are free for this user on the file system of `path`. Raises: OSError."""
    state = os.statvfs(path)
    return state.f_bavail * state.f_frsize


class DiskCalls(NamedTuple):
    """Each raises OSError."""

    write: Callable[[int, memoryview, int], None] = write_all
    """Descriptor, data, offset."""
    allocate: Callable[[int, int, int], None] = os.posix_fallocate
    """Descriptor, offset, size."""
    punch: Callable[[int, int, int], None] = punch_hole
    """Descriptor, offset, size."""
    sync: Callable[[int], None] = os.fdatasync
    flush: Callable[[mmap.mmap], object] = mmap.mmap.flush
    free: Callable[[Path], int] = count_free


def fence() -> None:
    """Order this thread's loads and stores before it, also those of system calls, before those
    after it.

    A lock's release is ordered after all that is before it, and its acquire before all that
    follows. A release and an acquire after it are not exchanged either (on ARMv8, whose other
    loads and stores may be: they are the instructions LDAR and STLR, or their atomic forms, and
    those keep their order). So the first release and the second acquire are the fence. The lock is
    a new one each time: a shared one would be waited for by other threads, by a signal's handler
    in this one, and in a forked child for ever. x86-64 exchanges neither loads nor stores among
    themselves by itself, and nothing here needs a load ordered after a store.
    """
    if _KEEPS_ORDER:
        return
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()
    lock.release()


def disk_error(path: Path, error: OSError) -> DataError:
    """The error for a file of the mirror that the disk does not write or read."""
    kind = MissingFileError if isinstance(error, FileNotFoundError) else DataError
    return kind(str(path), f"the mirror's disk fails: {cause_of(error)}: {remedy_of(error.errno)}")
