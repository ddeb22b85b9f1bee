"""Writing in folders that other users can also write to, without following links that one of them may have placed there.

New files are created exclusively (mode "x", which follows no link). A file that is opened again must be a regular file with one
name, not a link to a file elsewhere; a folder may be reached through a symbolic link only if this user or root created the link.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_again(path: Path | str, flags: int) -> int:
    """Open an existing file, or with os.O_CREAT one that may have to be created: its descriptor.

    Raises: OSError with ELOOP if it is a hard or symbolic link, or not a regular file.
    """
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    state = os.fstat(fd)
    if stat.S_ISREG(state.st_mode) and state.st_nlink == 1:
        return fd
    os.close(fd)
    raise OSError(errno.ELOOP, "not a regular file with one name", str(path))


def check_folder(folder: Path) -> None:
    """Check a folder below one that others may write to. Does nothing if it does not exist.

    Raises: OSError with ELOOP if it is a symbolic link that another user created.
    """
    try:
        state = folder.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISLNK(state.st_mode) and state.st_uid not in (os.geteuid(), 0):
        raise OSError(
            errno.ELOOP, f"it is a symbolic link to {folder.readlink()}, created by user {state.st_uid}", str(folder)
        )
