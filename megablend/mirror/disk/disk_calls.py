"""System calls by which the owner uses the disk, in one place, so that tests can make each fail."""

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
"""Numbers of errors that mean a full disk or quota."""
_KEEP_SIZE_PUNCH_HOLE = 1 | 2
"""Linux's FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE."""
_IS_ORDERED = platform.machine() == "x86_64"
"""Whether the processor keeps the order that `fence` asks for by itself."""
_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64


def punch_hole(fd: int, offset: int, size: int) -> None:
    """Give a range of a file back to the file system; it reads as zeros then. Raises: OSError."""
    if _fallocate(fd, _KEEP_SIZE_PUNCH_HOLE, offset, size):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset`, however much one call writes. Raises: OSError."""
    while len(data):
        num_written = os.pwrite(fd, data, offset)
        data = data[num_written:]
        offset += num_written


def count_free(path: Path) -> int:
    """Bytes that are free for this user on the file system of `path`. Raises: OSError."""
    state = os.statvfs(path)
    return state.f_bavail * state.f_frsize


class DiskCalls(NamedTuple):
    """The calls; each raises OSError."""

    write: Callable[[int, memoryview, int], None] = write_all
    """Arguments: descriptor, data, offset."""
    allocate: Callable[[int, int, int], None] = os.posix_fallocate
    """Arguments: descriptor, offset, size."""
    punch: Callable[[int, int, int], None] = punch_hole
    """Arguments: descriptor, offset, size."""
    sync: Callable[[int], None] = os.fdatasync
    flush: Callable[[mmap.mmap], object] = mmap.mmap.flush
    free: Callable[[Path], int] = count_free


def fence() -> None:
    """A full fence: loads and stores of this thread before it, including those of system calls,
    come before all that follow it.

    Nothing that precedes a lock's release moves past it, and nothing that follows an acquire moves
    before it. A release and the acquire after it are not reordered with each other either (on
    ARMv8 they are the instructions LDAR and STLR, or their atomic forms, which keep their order).
    So the first release and the second acquire together are a fence. A new lock is taken each
    time, since other threads, a signal handler in this one, or a forked child could block on a
    shared one. x86-64 does not reorder loads with loads or stores with stores, and nothing here
    needs a load to be ordered after a store.
    """
    if _IS_ORDERED:
        return
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()
    lock.release()


def disk_error(path: Path, error: OSError) -> DataError:
    """The error for a file of the mirror that could not be written or read."""
    kind = MissingFileError if isinstance(error, FileNotFoundError) else DataError
    return kind(str(path), f"the mirror's disk fails: {cause_of(error)}: {remedy_of(error.errno)}")
