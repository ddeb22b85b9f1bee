"""Writing in folders that other users may write to as well: nothing is followed that one of them may have put there.

New files are made exclusively (mode "x", which follows no link). A file that is opened again must be a plain file with one name,
not a link to a file elsewhere; a folder may be reached by a symbolic link only where this user or root made the link.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_again(path: Path | str, flags: int) -> int:
    """Open a file that is there, or (os.O_CREAT) may have to be made: its descriptor.

    Raises: OSError with ELOOP where a link stands in its place, hard or symbolic, or what is not a plain file.
    """
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    state = os.fstat(fd)
    if stat.S_ISREG(state.st_mode) and state.st_nlink == 1:
        return fd
    os.close(fd)
    raise OSError(errno.ELOOP, "not a plain file with one name", str(path))


def check_folder(folder: Path) -> None:
    """Check a folder below one that others may write to. Nothing where it is not there.

    Raises: OSError with ELOOP where another user made it a symbolic link.
    """
    try:
        state = folder.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISLNK(state.st_mode) and state.st_uid not in (os.geteuid(), 0):
        raise OSError(errno.ELOOP, f"user {state.st_uid} made it a link to {folder.readlink()}", str(folder))
