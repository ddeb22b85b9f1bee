"""Write and rename many new files in one call, without running Python between the system calls for
a small file."""

from __future__ import annotations

from megablend.arrays import Int64s, Uint8s
from megablend.intrinsics import library_function
from megablend.jit import kernel

_LIBC = "libc.so.6"
_openat = library_function(_LIBC, "openat", "intc", "intc", "uintp", "intc", "intc")
_write = library_function(_LIBC, "write", "intp", "intc", "uintp", "uintp")
_close = library_function(_LIBC, "close", "intc", "intc")
_renameat = library_function(_LIBC, "renameat", "intc", "intc", "uintp", "intc", "uintp")
_faccessat = library_function(_LIBC, "faccessat", "intc", "intc", "uintp", "intc", "intc")
_EXISTS = 0  # F_OK

AVAILABLE = None not in (_openat, _write, _close, _renameat, _faccessat)
"""Whether these functions can be called on this system."""


@kernel
def write_new_files(
    folder: int,
    flags: int,
    names: Uint8s,
    name_starts: Int64s,
    data: Uint8s,
    starts: Int64s,
    sizes: Int64s,
) -> int:
    """Write n new files one after another. Returns the number of files that were written: fewer
    than n if a system call failed.

    Args:
        folder: descriptor of the folder in which the files are created.
        flags: the flags for open(2).
        names: uint8, the files' names, each followed by a zero byte.
        name_starts: int64 [n], where each name begins in `names`.
        data: uint8, the bytes of all files.
        starts, sizes: int64 [n], where the bytes of each file are in `data`; the caller has checked
            these ranges.
    """
    for i in range(len(starts)):
        fd = _openat(folder, names.ctypes.data + name_starts[i], flags, 0o666)  # type: ignore[misc]
        if fd < 0:
            return i
        done = 0
        while done < sizes[i]:
            written = _write(fd, data.ctypes.data + starts[i] + done, sizes[i] - done)  # type: ignore[misc]
            if written <= 0:  # disk full, or a signal: the caller handles it
                break
            done += written
        if _close(fd) != 0 or done < sizes[i]:  # type: ignore[misc]
            return i
    return len(starts)


@kernel
def rename_files(source: int, target: int, names: Uint8s, name_starts: Int64s) -> int:
    """Move n files from one folder to another, under the same names. Returns the number of files
    that were moved: fewer than n if a system call failed.

    Args:
        source, target: descriptors of the folders.
        names, name_starts: as `write_new_files` takes them.
    """
    for i in range(len(name_starts)):
        name = names.ctypes.data + name_starts[i]
        if _renameat(source, name, target, name) != 0:  # type: ignore[misc]
            return i
    return len(name_starts)


@kernel
def contains_any(folder: int, names: Uint8s, name_starts: Int64s) -> bool:
    """Return whether a folder, given by its descriptor, contains a file with any of these names;
    see `write_new_files`."""
    num_found = 0
    for start in name_starts:
        num_found += _faccessat(folder, names.ctypes.data + start, _EXISTS, 0) == 0  # type: ignore[misc]
    return num_found > 0
