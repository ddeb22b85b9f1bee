"""Read samples of Megatron's index arrays over a `.bin/.idx` pair in one call, without running
Python between two reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.intrinsics import pointer_at, pread
from megablend.jit import device, kernel

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
    """Read the tokens of samples. Returns False if a sample is not full, or if a file is not as
    expected. The caller then has to find the reason.

    Args:
        numbers: int64 [n], entries of the shuffle index; negative ones count from its end.
        fds: int64 [5], descriptors of the document, the sample and the shuffle index, of the `.idx`
            and of the `.bin`.
        layout: int64 [7]: number of entries of the shuffle index; sizes in bytes of a number in the
            sample index, of a number in the shuffle index, and of a token; number of bytes before
            the entries of the index arrays, and before the pointers of the `.idx`; number of extra
            tokens, 0 or 1.
        lengths: int32 [num_documents], tokens of each document.
        out: uint8 [n, bytes of a sample], filled.
    """
    document_index, sample_index, shuffle_index, idx_file, bin_file = fds
    num_samples, row_width, shuffle_width, token_bytes, start, pointers, extra = layout
    # What was read last: a number of the shuffle index, two rows of the sample index, or a pointer
    words = np.empty(4, np.int64)
    documents = np.empty(_ENTRIES, np.int32)
    for k in range(len(numbers)):
        number = numbers[k] + num_samples if numbers[k] < 0 else numbers[k]
        if number < 0 or number >= num_samples:
            return False
        words[0] = 0
        if not _read(shuffle_index, words, shuffle_width, start + number * shuffle_width):
            return False
        row = words[0]
        if row < 0:  # positions beyond the end of a file are found by reads of fewer bytes
            return False
        # A row is a position in the document index, and an offset in the document there. A sample
        # begins at its own row, and ends at the next one
        if not _read(sample_index, words, 4 * row_width, start + row * 2 * row_width):
            return False
        if row_width == 4:
            first = words[0] & 0x7FFFFFFF
            offset = words[0] >> 32
            last = words[1] & 0x7FFFFFFF
            end = words[1] >> 32
        else:
            first, offset, last, end = words
        if first < 0:
            return False
        done = 0  # bytes of the sample so far
        for position in range(first, last + 1):
            entry = (position - first) % _ENTRIES
            if entry == 0:
                size = 4 * min(_ENTRIES, last + 1 - position)
                if not _read(document_index, documents, size, start + 4 * position):
                    return False
            document = np.int64(documents[entry])
            if document < 0 or document >= len(lengths):
                return False
            begin = offset if position == first else 0
            stop = end + extra if position == last else np.int64(lengths[document])
            size = (stop - begin) * token_bytes
            if begin < 0 or size < 0 or stop > lengths[document] or done + size > out.shape[1]:
                return False
            if size == 0:
                continue
            if not _read(idx_file, words, 8, pointers + 8 * document):
                return False
            if not _read(bin_file, out[k, done:], size, words[0] + begin * token_bytes):
                return False
            done += size
        if done != out.shape[1]:
            return False
    return True


@device
def _read(fd: int, array: npt.NDArray[Any], size: int, offset: int) -> bool:
    """Read `size` bytes of a file to the beginning of an array. Returns whether all of them were
    read."""
    return pread(fd, pointer_at(array.ctypes.data, size), size, offset) == size
