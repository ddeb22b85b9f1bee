"""Open files in folders that other users can also write to.

A file is read only if it is a regular file of a bounded size: a pipe in its place would block the
reader forever, and a device might fill the memory. A file is written without following links that
another user may have placed there.

New files are created exclusively (mode "x", which follows no link). An existing file that is opened
for writing must be a regular file with one name, not a link to a file elsewhere; a folder may be
reached through a symbolic link only if this user or root created the link.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from pathlib import Path
from typing import BinaryIO

MAX_BYTES = 1 << 32
"""The maximum size of a file that is read as a whole. Tables may be larger, since they are mapped
into memory instead."""
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP)
"""The values of errno for which `Path.is_file` returns False."""


def open_regular(path: Path | str) -> BinaryIO:
    """Open a regular file for reading. A pipe is an error, so the call never waits for another
    process to write to it.

    Raises: OSError, with ENXIO for a pipe, a socket or a device, and EISDIR for a folder.
    """
    return os.fdopen(_open_descriptor(path)[0], "rb")


def read_regular(path: Path | str, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file. Raises: the same errors as `open_regular`; OSError with
    EFBIG if the file has more than `max_bytes`."""
    fd, size = _open_descriptor(path)
    try:
        if size > max_bytes:
            raise OSError(
                errno.EFBIG, f"it has {size:,} bytes, expected at most {max_bytes:,}", str(path)
            )
        data = os.read(fd, size)  # memory for `max_bytes` would be reserved first
        while len(data) < size:  # one call reads at most 2 GiB
            rest = os.read(fd, size - len(data))
            if not rest:
                break
            data += rest
        return data
    finally:
        os.close(fd)


def _open_descriptor(path: Path | str) -> tuple[int, int]:
    """Return a descriptor and the size of a regular file; see `open_regular`."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    state = os.fstat(fd)
    if stat.S_ISREG(state.st_mode):
        return fd, state.st_size
    os.close(fd)
    if stat.S_ISDIR(state.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.ENXIO, "not a regular file (it is a pipe, socket or device)", str(path))


def map_descriptor(fd: int, size: int = 0) -> mmap.mmap:
    """Map a file, or its first `size` bytes, into memory to read it.

    The mapping is private, because FUSE file systems with `direct_io` refuse shared ones. Processes
    share its memory all the same. Raises: OSError; ValueError if the file is empty.
    """
    return mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)


def open_again(path: Path | str, flags: int) -> int:
    """Open an existing file, or create it if `flags` has os.O_CREAT. Returns: the descriptor of the
    file.

    Raises: OSError with ELOOP if it is a hard or symbolic link, or not a regular file.
    """
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    state = os.fstat(fd)
    if stat.S_ISREG(state.st_mode) and state.st_nlink == 1:
        return fd
    os.close(fd)
    raise OSError(
        errno.ELOOP, "not a regular file, or has more than one name (hard links)", str(path)
    )


def check_folder(folder: Path) -> None:
    """Check that a folder is not a symbolic link that another user created. A folder that does not
    exist is accepted.

    Raises: OSError with ELOOP if it is such a link.
    """
    try:
        state = folder.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISLNK(state.st_mode) and state.st_uid not in (os.geteuid(), 0):
        raise OSError(
            errno.ELOOP,
            f"it is a symbolic link to {folder.readlink()}, created by user {state.st_uid}",
            str(folder),
        )


def get_file_size(path: str) -> int | None:
    """Return the size of a regular file; None if the path does not exist, or is not a regular file.
    Faster than `Path.is_file` and `Path.stat`. Raises: OSError if the path cannot be inspected."""
    try:
        state = os.stat(path)  # noqa: PTH116  (the path is a string)
    except ValueError:  # a NUL character
        return None
    except OSError as error:
        if error.errno in _ABSENT:
            return None
        raise
    return state.st_size if stat.S_ISREG(state.st_mode) else None
