"""Count the decoded bytes of an LZ4 block, since pyarrow's codec does not report how many it wrote.

Source: lz4, doc/lz4_Block_format.md.
"""

from __future__ import annotations

import numpy as np

from megablend.intrinsics import Pointer, pointer_at
from megablend.jit import device, kernel


@kernel
def lz4_size(address: int, size: int) -> int:
    """Return the number of bytes that a block decodes to, if it can be decoded; -1 if it ends too
    early, or refers to no earlier byte.

    A block is a list of sequences. Each has a token (a byte with two lengths), literals, and a
    match: the distance back to the earlier output that is copied. The last one has no match.

    Args:
        address, size: address of the block in memory, and its size in bytes.
    """
    data = pointer_at(address, size)
    position = 0
    decoded = 0
    while position < size:
        token = np.int64(data[position])
        position, literal_bytes = _length(data, position + 1, size, token >> 4)
        position += literal_bytes
        decoded += literal_bytes
        if position == size:
            return decoded
        if size - position < 2 or not (data[position] | data[position + 1]):
            return -1
        position, match_bytes = _length(data, position + 2, size, token & 15)
        decoded += match_bytes + 4
    return -1


@device
def _length(data: Pointer, position: int, end: int, length: int) -> tuple[int, int]:
    """Read the rest of a length, given its four bits in the token. Returns the position after it,
    and the length."""
    if length == 15:
        more = 255
        while more == 255 and position < end:
            more = np.int64(data[position])
            position += 1
            length += more
    return position, length
