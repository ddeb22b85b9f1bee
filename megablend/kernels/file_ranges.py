"""Ranges of a file, read by one call: no Python between two reads, and all of them asked for before the first is awaited."""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from megablend.jit import fadvise, kernel, pointer_at, pread

Int64s = npt.NDArray[np.int64]

WILLNEED = os.POSIX_FADV_WILLNEED


@kernel
def read_ranges(
    fd: int, offsets: Int64s, sizes: Int64s, begins: Int64s, ahead: bool, out: npt.NDArray[np.uint8]
) -> int:
    """Read ranges of a file. Returns the number of the first that did not come whole; n if all did.

    Args:
        fd: descriptor of the file.
        offsets, sizes: int64 [n], in bytes of the file.
        begins: int64 [n], where each goes in `out`; within it, as the caller has checked.
        ahead: tell the system of all ranges first: their bytes are on the way from the disk side by side, and none besides them.
        out: uint8, filled.
    """
    if ahead:
        for i in range(len(offsets)):
            fadvise(fd, offsets[i], sizes[i], WILLNEED)
    for i in range(len(offsets)):
        done = 0
        while done < sizes[i]:
            left = sizes[i] - done
            got = pread(fd, pointer_at(out.ctypes.data + begins[i] + done, left), left, offsets[i] + done)
            if got <= 0:  # the file ends, or a signal came: the caller finds out
                return i
            done += got
    return len(offsets)
