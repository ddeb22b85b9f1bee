"""Writing many new files in one call: no Python between the three system calls that a small file takes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.jit import kernel, library_function

Int64s = npt.NDArray[np.int64]
Uint8s = npt.NDArray[np.uint8]

_LIBC = "libc.so.6"
_openat = library_function(_LIBC, "openat", "intc", "intc", "uintp", "intc", "intc")
_write = library_function(_LIBC, "write", "intp", "intc", "uintp", "uintp")
_close = library_function(_LIBC, "close", "intc", "intc")

AVAILABLE = None not in (_openat, _write, _close)
"""Whether `write_new_files` may be called on this system."""


@kernel
def write_new_files(
    folder: int, flags: int, names: Uint8s, name_starts: Int64s, data: Uint8s, starts: Int64s, sizes: Int64s
) -> int:
    """Write files one after the other. Returns how many are written; n unless the system refused something.

    Args:
        folder: descriptor of the folder that they are created in.
        flags: as open(2) takes them.
        names: uint8, names that each end in a zero byte.
        name_starts: int64 [n], where each begins in `names`.
        data: uint8, the bytes of all files.
        starts, sizes: int64 [n], the bytes of each file in `data`; within it, as the caller has checked.
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
