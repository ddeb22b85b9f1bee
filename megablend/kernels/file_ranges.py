"""Read ranges of a file in one call, without running Python between two reads, and join ranges that
should be read together."""

from __future__ import annotations

import os
from collections.abc import Iterator

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
    """Read ranges of a file. Returns the number of the first range that was not read completely; n
    if all were.

    Args:
        fd: descriptor of the file.
        offsets, sizes: int64 [n], in bytes of the file.
        begins: int64 [n], where each range begins in `out`; the caller has checked that all ranges
            fit.
        ahead: whether to first ask the system to read all ranges ahead, in parallel; this changes
            only the speed.
        out: uint8, is filled.
    """
    if ahead:
        for i in range(len(offsets)):
            fadvise(fd, offsets[i], sizes[i], WILLNEED)
    for i in range(len(offsets)):
        done = 0
        while done < sizes[i]:
            left = sizes[i] - done
            data = pointer_at(out.ctypes.data + begins[i] + done, left)
            num_read = pread(fd, data, left, offsets[i] + done)
            if num_read <= 0:  # end of file, or a signal: the caller handles it
                return i
            done += num_read
    return len(offsets)


def fill_ranges(
    fd: int, offsets: Int64s, sizes: Int64s, begins: Int64s, ahead: bool, out: npt.NDArray[np.uint8]
) -> Iterator[int]:
    """Read all ranges as `read_ranges` does. Yields the number of each range that was not read
    completely: the caller completes this range before more ranges are read."""
    num_read = 0
    while True:
        num_read += read_ranges(
            fd, offsets[num_read:], sizes[num_read:], begins[num_read:], ahead, out
        )
        if num_read == len(offsets):
            return
        yield num_read
        num_read += 1


@kernel
def join_ranges(
    offsets: Int64s, sizes: Int64s, loads: Int64s, max_gap: int, max_load: int, out: Int64s
) -> int:
    """Join ranges into runs: each range joins the last run, or begins a new one if the gap or the
    run would be too large. Returns the number of runs.

    Args:
        offsets, sizes: int64 [n], in bytes of the file; offsets ascending.
        loads: int64 [n], the load of each range. The load of a run is the sum of the loads of its
            ranges.
        max_gap: maximum number of bytes between a range and the end of the earlier ranges of its
            run.
        max_load: maximum load of a run of several ranges.
        out: int64 [3, n], filled: [0] and [1] with the runs' starts and stops, [2] with the number
            of the run of each range.
    """
    count = 0
    load = 0
    reach = 0
    for i in range(len(offsets)):
        load += loads[i]
        if count == 0 or offsets[i] - reach > max_gap or load > max_load:
            out[0, count] = out[1, count] = offsets[i]
            load = loads[i]
            count += 1
        stop = offsets[i] + sizes[i]
        reach = max(reach, stop)
        out[1, count - 1] = max(out[1, count - 1], stop)
        out[2, i] = count - 1
    return count
