"""The lock that lets only one build run at a time: an flock on the cache's lock file. The operating
system releases it when the process that holds it exits."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from megablend.errors import CacheError
from megablend.system.atomic_write import translate_os_errors
from megablend.system.limited_json import parse_json
from megablend.system.safe_open import open_again, read_regular
from megablend.system.waits import log_slow_wait

WAIT_SECONDS = 60.0
"""The default time that a build waits for another build."""
_POLL_SECONDS = 0.1
"""The pause between two attempts to acquire the lock."""
_SEEN_SECONDS = 10.0
"""The time within which another host's write becomes visible on a network file system."""
_NOTICE_SECONDS = 1.0
"""The time after which `on_wait` is called."""
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}
"""The values of errno on a file system without locks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockInfo:
    """A lock that this process holds."""

    nonce: str
    """A random text that is written into the lock file, so that other ranks can tell whether they
    see the same cache."""
    exclusive: bool
    """Whether other builds are kept out; False on a file system that has no locks."""
    waited: bool = False
    """Whether another build held the lock when this process asked for it."""


@contextlib.contextmanager
def build_lock(
    cache: Path, wait_seconds: float | None = None, *, on_wait: Callable[[str], None] | None = None
) -> Iterator[LockInfo]:
    """Hold the cache's build lock.

    Args:
        wait_seconds: the time to wait for another build; None for WAIT_SECONDS.
        on_wait: called once if another build holds the lock for longer than a second, with a
            description of that build.

    Raises: CacheError if another build holds the lock for longer than `wait_seconds`, naming that
        build's host, pid and start time; or if the cache cannot be written.
    """
    path = _lock_path(cache)
    with contextlib.ExitStack() as stack:
        with translate_os_errors(path):
            fd = open_again(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
            file = open(fd, "a", encoding="utf-8")  # noqa: SIM115  (closed by `_closing`)
            stack.enter_context(_closing(file, path))
            with log_slow_wait(f"the build lock {path}"):
                exclusive, waited = _acquire(
                    file, path, WAIT_SECONDS if wait_seconds is None else wait_seconds, on_wait
                )
            nonce = secrets.token_hex(8)
            since = time.strftime("%Y-%m-%d %H:%M:%S %z")
            holder = {
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "since": since,
                "nonce": nonce,
            }
            file.truncate(0)
            file.write(json.dumps(holder))
            file.flush()
            os.fsync(file.fileno())
        yield LockInfo(nonce=nonce, exclusive=exclusive, waited=waited)


@contextlib.contextmanager
def _closing(file: IO[str], path: Path) -> Iterator[None]:
    """Close a file at the end. Raises: CacheError if that fails, as on a full disk."""
    try:
        yield
    finally:
        with translate_os_errors(path):
            file.close()


def verify_shared_filesystem(cache: Path, nonce: str, *, seconds: float = _SEEN_SECONDS) -> None:
    """Check that this rank sees the lock file that rank 0 wrote.

    Args:
        nonce: the text that rank 0 wrote into the lock file; see LockInfo.
        seconds: the time that a network file system may take to show another host's write.

    Raises: CacheError if the two ranks have different cache folders.
    """
    deadline = time.monotonic() + seconds
    while _read_holder(cache).get("nonce") != nonce:
        if time.monotonic() > deadline:
            raise CacheError(
                f"{cache}: the cache on {socket.gethostname()} is not the one that rank 0 sees; use a folder on a file system "
                "that all ranks share, or run all ranks on one node"
            )
        time.sleep(_POLL_SECONDS)


def lock_time(cache: Path) -> float:
    """Return the time at which the cache's lock was last acquired, in seconds since 1970, by the
    clock of the file system."""
    return _lock_path(cache).stat().st_mtime


def _acquire(
    file: IO[str], path: Path, wait_seconds: float, on_wait: Callable[[str], None] | None
) -> tuple[bool, bool]:
    """Acquire the lock. Returns: `exclusive` and `waited` of LockInfo. Raises: CacheError if another
    build holds it for too long."""
    begin = time.monotonic()
    deadline = begin + wait_seconds
    problem = _try_lock(file)
    waited = problem == errno.EWOULDBLOCK
    while problem == errno.EWOULDBLOCK:
        if time.monotonic() > deadline:
            raise _in_use(path, wait_seconds)
        if on_wait is not None and time.monotonic() > begin + _NOTICE_SECONDS:
            on_wait(_name_holder(path))
            on_wait = None
        time.sleep(_POLL_SECONDS)
        problem = _try_lock(file)
    if problem and problem not in _NO_LOCKS:
        raise OSError(problem, os.strerror(problem), str(path))
    return problem == 0, waited


def _try_lock(file: IO[str]) -> int:
    """Try to acquire the lock, without waiting. Returns: 0, or the errno of the failure."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _in_use(path: Path, waited: float) -> CacheError:
    """Return the error for a lock that another build still holds after `waited` seconds."""
    verb = f"has held the cache for {waited:.0f} s" if waited else "holds the cache"
    return CacheError(
        f"{path}: another build {verb} ({_name_holder(path)}); wait for that build to finish, or stop it"
    )


def _name_holder(path: Path) -> str:
    """Return the host, pid and start time of the build that holds the lock, for messages."""
    holder = _read_holder(path.parent)
    host, pid, since = (holder.get(name, "unknown") for name in ("host", "pid", "since"))
    return f"host {host}, pid {pid}, since {since}"


def _read_holder(cache: Path) -> dict[str, object]:
    """Return the JSON object in the lock file, which describes the build that holds the lock; an
    empty dict if it cannot be read."""
    try:
        holder = parse_json(read_regular(_lock_path(cache), 1 << 20))
    except (OSError, ValueError):  # the file does not exist yet, or is being written
        return {}
    return holder if isinstance(holder, dict) else {}


def _lock_path(cache: Path) -> Path:
    return cache / ".lock"
