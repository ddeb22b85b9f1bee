"""The decoded length of an LZ4 block, which the block itself does not state.

Source: lz4_Block_format.md of the LZ4 project.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.jit import kernel


@kernel
def lz4_length(data: npt.NDArray[np.uint8]) -> int:
    """Bytes that a block decodes to; -1 where it breaks off inside a sequence.

    Args:
        data: uint8 [n], one block.
    """
    position, length, size = 0, 0, len(data)
    while position < size:
        token = int(data[position])
        position += 1
        literals = token >> 4
        if literals == 15:
            more = 255
            while more == 255:
                if position >= size:
                    return -1
                more = int(data[position])
                position += 1
                literals += more
        position += literals
        length += literals
        if position == size:  # the last sequence has no match
            return length
        position += 2
        match = token & 15
        if match == 15:
            more = 255
            while more == 255:
                if position >= size:
                    return -1
                more = int(data[position])
                position += 1
                match += more
        length += match + 4
    return -1
