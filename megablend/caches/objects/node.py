"""This node's folder for a cache in an object store, which the processes of the node share, and the
locks in it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from megablend.system.atomic_write import TEMPORARY, translate_os_errors
from megablend.system.digest import hex_digest
from megablend.system.failures import note_copies
from megablend.system.private_folder import find_private_folder
from megablend.system.safe_open import check_folder, open_again
from megablend.system.waits import log_slow_wait

_LOCKS = ".locks"
_LEFTOVER_SECONDS = 86400.0
"""The age at which an unfinished file is assumed to belong to a killed process."""


@lru_cache(maxsize=64)
def find_node_folder(location: str, endpoint: str | None, local_cache: str | None) -> Path:
    """Return the folder of a cache on this node. It is created if it is missing.

    The folder is below `local_cache`, if that is given. Otherwise it is below XDG_CACHE_HOME or
    ~/.cache, if no other user can write there, or else a temporary folder of this process.

    Raises: CacheError if it cannot be created.
    """
    key = hex_digest(f"{location}\n{endpoint or ''}", 12)
    if local_cache:
        folder = Path(local_cache).absolute() / key
        note_copies(str(folder))
        with translate_os_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            check_folder(folder)
        return folder
    cache_home = os.environ.get("XDG_CACHE_HOME")
    bases = [Path(cache_home).absolute()] if cache_home else []
    with contextlib.suppress(RuntimeError):  # a user without a home
        bases.append(Path("~/.cache").expanduser())
    with translate_os_errors(Path(bases[0] if bases else "/tmp")):
        folder = find_private_folder(
            bases, Path("megablend") / "caches" / key, prefix="megablend-cache-"
        )[0]
    note_copies(str(folder))
    return folder


@contextlib.contextmanager
def lock_node(folder: Path, name: str) -> Iterator[None]:
    """Keep other processes of this node from doing the same work at the same time, such as
    downloading a folder."""
    with _open_lock(folder, name) as fd:
        with log_slow_wait(f"another process of this node that holds {folder / _LOCKS / name}"):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def try_lock_node(folder: Path, name: str) -> Iterator[bool]:
    """Acquire the same lock as `lock_node`, but without waiting. Yields: False if another process
    holds the lock."""
    with _open_lock(folder, name) as fd:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def remove_old_leftovers(folder: Path) -> None:
    """Remove the unfinished files that are too old to belong to a running process."""
    before = time.time() - _LEFTOVER_SECONDS
    for path in folder.rglob(f"{TEMPORARY}*"):
        with contextlib.suppress(FileNotFoundError):  # just finished by its process
            if path.lstat().st_mtime >= before:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


@contextlib.contextmanager
def _open_lock(folder: Path, name: str) -> Iterator[int]:
    """Yield a descriptor of a lock file, which is created if it is missing. Raises: CacheError if
    that fails."""
    path = folder / _LOCKS / name
    with translate_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = open_again(path, os.O_RDWR | os.O_CREAT)
    try:
        yield fd
    finally:
        os.close(fd)
