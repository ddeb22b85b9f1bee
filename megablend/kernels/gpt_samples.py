"""Read samples of Megatron's index arrays over a `.bin/.idx` pair in one call, with no Python
between two reads."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.intrinsics import pointer_at, pread
from megablend.jit import kernel

_ENTRIES = 16
"""Number of entries of the document index that are read at once."""


@kernel
def read_samples(
    numbers: Int64s,
    fds: Int64s,
    layout: Int64s,
    lengths: npt.NDArray[np.int32],
    out: npt.NDArray[np.uint8],
) -> bool:
    """Read the tokens of samples. Returns False if a sample is not full, or a file is not as
    expected; the caller finds out why.

    Args:
        numbers: int64 [n], entries of the shuffle index; negative ones count from its end.
        fds: int64 [5], descriptors of the document, the sample and the shuffle index, of the `.idx`
            and of the `.bin`.
        layout: int64 [7]: number of entries of the shuffle index; bytes of a number in the sample
            index, of one in the shuffle index, and of a token; bytes before the entries of the
            index arrays, and before the pointers of the `.idx`; number of extra tokens, 0 or 1.
        lengths: int32 [num_documents], tokens of each document.
        out: uint8 [n, bytes of a sample], is filled.
    """
    num_samples, row_width, shuffle_width, width, start, pointers, extra = layout
    word = np.empty(4, np.int64)
    documents = np.empty(_ENTRIES, np.int32)
    for k in range(len(numbers)):
        address = word.ctypes.data
        number = numbers[k] + num_samples if numbers[k] < 0 else numbers[k]
        if number < 0 or number >= num_samples:
            return False
        word[0] = 0
        size = shuffle_width
        if pread(fds[2], pointer_at(address, size), size, start + number * size) != size:
            return False
        row = word[0]
        if row < 0:  # positions beyond the end of a file are found by reads of fewer bytes
            return False
        size = 4 * row_width
        if pread(fds[1], pointer_at(address, size), size, start + row * 2 * row_width) != size:
            return False
        first = word[0]
        offset = word[1]
        last = word[2]
        end = word[3]
        if row_width == 4:
            first = word[0] & 0x7FFFFFFF
            offset = word[0] >> 32
            last = word[1] & 0x7FFFFFFF
            end = word[1] >> 32
        if first < 0:
            return False
        done = 0
        for position in range(first, last + 1):
            entry = (position - first) % _ENTRIES
            if entry == 0:
                size = 4 * min(_ENTRIES, last + 1 - position)
                if (
                    pread(
                        fds[0], pointer_at(documents.ctypes.data, size), size, start + 4 * position
                    )
                    != size
                ):
                    return False
            document = np.int64(documents[entry])
            if document < 0 or document >= len(lengths):
                return False
            begin = offset if position == first else 0
            stop = end + extra if position == last else np.int64(lengths[document])
            size = (stop - begin) * width
            if begin < 0 or size < 0 or stop > lengths[document] or done + size > out.shape[1]:
                return False
            if size == 0:
                continue
            if pread(fds[3], pointer_at(address, 8), 8, pointers + 8 * document) != 8:
                return False
            place = out.ctypes.data + k * out.shape[1] + done
            if pread(fds[4], pointer_at(place, size), size, word[0] + begin * width) != size:
                return False
            done += size
        if done != out.shape[1]:
            return False
    return True
