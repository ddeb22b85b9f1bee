"""Reading ranges of a file in one call: no Python between two reads, and all are requested before waiting for the first."""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.intrinsics import fadvise, pointer_at, pread
from megablend.jit import kernel

WILLNEED = os.POSIX_FADV_WILLNEED


@kernel
def read_ranges(
    fd: int, offsets: Int64s, sizes: Int64s, begins: Int64s, ahead: bool, out: npt.NDArray[np.uint8]
) -> int:
    """Read ranges of a file. Returns the number of the first that was not read completely; n if all were.

    Args:
        fd: descriptor of the file.
        offsets, sizes: int64 [n], in bytes of the file.
        begins: int64 [n], where each goes in `out`; within it, as the caller has checked.
        ahead: announce all ranges to the system first, so that it reads them in parallel, and nothing else.
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
            if got <= 0:  # end of file, or a signal: the caller handles it
                return i
            done += got
    return len(offsets)
