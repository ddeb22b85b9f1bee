"""Translate errors of the operating system (no permission, a failing disk, no memory) into
megablend's own errors, whose messages give the path, the cause and a remedy."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator

from megablend.errors import REMOVE_REMEDY, ConfigError, MegablendError, ResourceError

_ELSEWHERE = "use another folder"
_UNREACHABLE = (
    "the server of its file system has ended, or cannot be reached, or has cut this machine off: check it, mount the file "
    "system again if the server responds, then try again"
)
_LACKING = f"its file system lacks an operation that is needed: {_ELSEWHERE}"
_REMEDIES = {
    errno.EACCES: f"check the permissions of the path, or {_ELSEWHERE}",
    errno.EPERM: f"check the permissions of the path, or {_ELSEWHERE}",
    errno.EROFS: f"make it writable, or {_ELSEWHERE}",
    errno.EIO: "the disk or the file server is failing: check it, then try again",
    errno.ESTALE: "the file server replaced or removed it: try again, and check the mount if it happens again",
    errno.ECONNABORTED: _UNREACHABLE,
    errno.ENOTCONN: _UNREACHABLE,
    errno.ESHUTDOWN: _UNREACHABLE,
    errno.ETIMEDOUT: "the file server does not respond: check it, then try again",
    errno.ENOSYS: _LACKING,
    errno.EOPNOTSUPP: _LACKING,
    errno.ESPIPE: _LACKING,
    errno.ENOSPC: f"free disk space (or inodes: `df -i`), or {_ELSEWHERE}",
    errno.EDQUOT: f"free space within your disk quota, or {_ELSEWHERE}",
    errno.ENOMEM: "the machine, or the job's limit, has no memory left: stop other processes, or request more memory",
    errno.ELOOP: "links are not followed for security reasons: remove the link",
    errno.ENXIO: "specify the path of a file",
    errno.EISDIR: "specify the path of a file",
    errno.ENOENT: "check that it exists",
    errno.ENAMETOOLONG: "use shorter names",
    errno.EFBIG: "allow larger files (`ulimit -f`), or use another file system",
}
"""The remedies for system errors, by errno."""
_COPIES = set[str]()
"""The folders on this node that hold copies of caches in object stores. The setting `local_cache`
chooses their location."""
_ENOUGH_FILES = 1024
"""The number of open files that is usually enough for a process."""
_NO_THREAD = "can't start new thread"
"""Part of Python's message if the system refuses to start a thread."""
_NOT_SHARED = ("unable to allocate shared memory", "unable to resize file")
"""Parts of torch's messages if /dev/shm has no room for a tensor."""
_NOT_OPENED = "unable to open shared memory object"
"""Part of torch's message if it cannot open shared memory, for which each tensor takes a file."""
_NOT_STORED = "no locator available"
"""Part of numba's message if it cannot make a file in the folder of the kernel cache."""
_NOT_LOADED = (
    "failed to map segment",
    "cannot allocate memory",
    "Could not find/load shared object",
)
"""Parts of the messages of Python's loader, glibc and llvmlite if there is no memory for a library.
These errors have no errno."""


def remedy_of(number: int | None) -> str:
    """Return the remedy for a system error, by its errno."""
    if number in (errno.EMFILE, errno.ENFILE):
        return _open_files_remedy(*resource.getrlimit(resource.RLIMIT_NOFILE))
    return _REMEDIES.get(number or 0, f"check the path and the file system, or {_ELSEWHERE}")


def read_remedy_of(number: int | None) -> str:
    """Return the remedy for a system error while reading data. Unlike `remedy_of`, it does not
    suggest another folder."""
    return remedy_of(number).removesuffix(f", or {_ELSEWHERE}")


def note_copies(folder: str) -> None:
    """Register a folder that holds this node's copy of a cache, so that the remedies for errors in
    it name the setting `local_cache`."""
    _COPIES.add(folder)


def cache_remedy_of(number: int | None, path: object) -> str:
    """Return the remedy for a system error that concerns a path inside a cache. If the path should
    be a file but is a folder or a device, the remedy is to remove it: a build writes the file
    again."""
    if number in (errno.ENXIO, errno.EISDIR):
        return REMOVE_REMEDY
    remedy = remedy_of(number)
    if any(f"{path}/".startswith(f"{folder}/") for folder in _COPIES):
        if number == errno.ENOENT:
            return "run the job again, which downloads it to `local_cache`"
        return remedy.replace(_ELSEWHERE, f"{_ELSEWHERE} (`local_cache`, MEGABLEND_LOCAL_CACHE)")
    return remedy


def _open_files_remedy(limit: int, hard_limit: int) -> str:
    """Return the remedy for too many open files, given the soft and the hard limit."""
    enough = max(_ENOUGH_FILES, 4 * limit)
    if hard_limit == limit:
        return f"the limit is {limit} open files, which only root or the job's settings can raise (`ulimit -Hn`)"
    if hard_limit != resource.RLIM_INFINITY:
        enough = min(enough, hard_limit)
    return f"raise the limit of {limit} open files (`ulimit -n {enough}`)"


def _kernel_cache_remedy() -> str:
    """Return the remedy if compiled kernels cannot be stored, which may also be due to too many
    open files."""
    elsewhere = (
        "make the kernel cache's folder writable, or set MEGABLEND_KERNEL_CACHE to a folder that is"
    )
    if 0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] < _ENOUGH_FILES:
        return f"{remedy_of(errno.EMFILE)}; if that does not help, {elsewhere}"
    return elsewhere


def cause_of(error: OSError) -> str:
    """Return the system's own description of an error."""
    return error.strerror or (os.strerror(error.errno) if error.errno else str(error))


def translate(error: BaseException, place: str) -> MegablendError | None:
    """Return a system error as a megablend error; None if it is a megablend error already, or not a
    system error.

    Args:
        place: the file, folder or command concerned, if the error itself does not name a file.
    """
    if isinstance(error, MegablendError):
        return None
    if isinstance(error, MemoryError):
        cause = f" ({error})" if str(error) else ""
        return ResourceError(
            f"{place}: out of memory{cause}; {_REMEDIES[errno.ENOMEM]}; lower `memory:` if it is "
            "set"
        )
    if isinstance(error, FileNotFoundError) and error.filename is None and _is_cwd_removed():
        return ResourceError(
            f"{place}: the working directory of this process has been removed; start it in a folder "
            "that exists"
        )
    if isinstance(error, OSError) and error.errno is not None and not is_broken_pipe(error):
        return ResourceError(f"{_name(error, place)}: {cause_of(error)}; {remedy_of(error.errno)}")
    if isinstance(error, UnicodeEncodeError):
        return ConfigError(
            f"{place}: {error.object!a:.200} cannot be encoded as {error.encoding}; use a name of valid UTF-8, and set "
            "PYTHONUTF8=1 if the locale has another encoding"
        )
    if isinstance(error, ImportError | OSError) and any(text in str(error) for text in _NOT_LOADED):
        return ResourceError(
            f"{place}: a library cannot be loaded ({error}); {_REMEDIES[errno.ENOMEM]}"
        )
    if isinstance(error, RuntimeError) and _NOT_STORED in str(error):
        return ResourceError(
            f"{place}: compiled kernels cannot be stored ({error}); {_kernel_cache_remedy()}"
        )
    if isinstance(error, RuntimeError) and any(text in str(error) for text in _NOT_SHARED):
        return ResourceError(
            f"{place}: /dev/shm has no room for a worker's batch ({error}); enlarge it (`docker run --shm-size=8g`, or "
            "--ipc=host), or use fewer workers or a lower prefetch_factor"
        )
    too_many_files = os.strerror(errno.EMFILE)
    if (
        isinstance(error, RuntimeError)
        and _NOT_OPENED in str(error)
        and too_many_files in str(error)
    ):
        return ResourceError(
            f"{place}: a worker's batch cannot be shared ({too_many_files}: each tensor takes one); {remedy_of(errno.EMFILE)}"
        )
    if isinstance(error, RuntimeError) and _NO_THREAD in str(error):
        return ResourceError(
            f"{place}: the system refuses to start more threads; raise the limit (`ulimit -u`), or stop other processes"
        )
    return None


def is_broken_pipe(error: BaseException) -> bool:
    """Return whether the reader of a pipe has exited. Python also raises BrokenPipeError for
    ESHUTDOWN, which file systems such as CephFS return once the server has cut a machine off."""
    return isinstance(error, BrokenPipeError) and error.errno != errno.ESHUTDOWN


def _is_cwd_removed() -> bool:
    """Return whether the working directory no longer exists. Relative paths, and some libraries
    when they are imported, then fail with an error that names no file."""
    try:
        os.getcwd()  # noqa: PTH109  (Path.cwd may name it from memory)
    except FileNotFoundError:
        return True
    return False


@contextlib.contextmanager
def translating(place: str) -> Iterator[None]:
    """Raise system errors as megablend errors; see `translate`. All public functions are wrapped in
    this context manager, which is used as a decorator."""
    try:
        yield
    except Exception as error:
        translated = translate(error, place)
        if translated is None:
            raise
        raise translated from error


def _name(error: OSError, fallback: str) -> str:
    """Return the path that an error names; `fallback` if it names none."""
    return os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else fallback
