"""The system's own errors (no permission, a failing disk, no memory) as errors of megablend: path, cause, remedy."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator

from megablend.errors import MegablendError, ResourceError

_REMEDIES = {
    errno.EACCES: "get permission there, or use another folder",
    errno.EPERM: "get permission there, or use another folder",
    errno.EROFS: "make it writable, or use another folder",
    errno.EIO: "the disk or the file server fails: check it, then try again",
    errno.ESTALE: "the file server replaced or removed it: try again, and check the mount where that repeats",
    errno.ENOSPC: "make room there, or use another folder",
    errno.EDQUOT: "make room in the quota there, or use another folder",
    errno.ENOMEM: "the machine or the job's limit has no memory left: end other processes, or ask for more",
    errno.ELOOP: "a link stands where none is followed: remove it",
    errno.ENOENT: "it is not there, or was removed meanwhile",
    errno.ENAMETOOLONG: "use shorter names",
    errno.EFBIG: "allow larger files (`ulimit -f`), or use another file system",
}
_NO_THREAD = "can't start new thread"
_NOT_LOADED = ("failed to map segment", "cannot allocate memory", "Could not find/load shared object")
"""What Python's loader, glibc and llvmlite say where there is no room for a library; no number comes with it."""


def remedy_of(number: int | None, default: str = "check the path and the file system") -> str:
    """What helps against the system's error of this number (errno)."""
    if number in (errno.EMFILE, errno.ENFILE):
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"{limit} may be open at once: allow more (`ulimit -n {max(1024, 4 * limit)}`)"
    return _REMEDIES.get(number or 0, default)


def cause_of(error: OSError) -> str:
    """What the system says, in its own words."""
    return error.strerror or (os.strerror(error.errno) if error.errno else str(error))


def translate(error: BaseException, place: str) -> MegablendError | None:
    """The system's error as one of megablend; None for what is no error of the system, and for megablend's own.

    Args:
        place: which file, folder or command it concerns, where the error itself names no file.
    """
    if isinstance(error, MegablendError):
        return None
    if isinstance(error, MemoryError):
        cause = f" ({error})" if str(error) else ""
        return ResourceError(
            f"{place}: out of memory{cause}: {_REMEDIES[errno.ENOMEM]}; lower `memory:` where it is set"
        )
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, BrokenPipeError):
        return ResourceError(f"{_name(error, place)}: {cause_of(error)}: {remedy_of(error.errno)}")
    if isinstance(error, ImportError | OSError) and any(text in str(error) for text in _NOT_LOADED):
        return ResourceError(f"{place}: a library cannot be loaded ({error}): {_REMEDIES[errno.ENOMEM]}")
    if isinstance(error, RuntimeError) and _NO_THREAD in str(error):
        return ResourceError(
            f"{place}: the system starts no more threads: allow more (`ulimit -u`), or end other processes"
        )
    return None


@contextlib.contextmanager
def translating(place: str) -> Iterator[None]:
    """Raise the system's errors as ResourceError. Stands around all that users call; also a decorator."""
    try:
        yield
    except Exception as error:
        translated = translate(error, place)
        if translated is None:
            raise
        raise translated from error


def _name(error: OSError, place: str) -> str:
    return os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else place
