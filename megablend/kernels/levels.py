"""Parquet's repetition and definition levels: the hybrid of runs and bit-packed groups, and what levels say about rows.

Source: parquet-format, Encodings.md ("Run Length Encoding / Bit-Packing Hybrid").
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.jit import kernel


@kernel
def count_hybrid(data: npt.NDArray[np.uint8], width: int) -> int:
    """How many values a hybrid stream holds; -1 where it breaks off inside a run's header or value.

    Args:
        data: uint8 [n], runs until its end.
        width: bits a value, 1 to 32.
    """
    position, count, size = 0, 0, len(data)
    while position < size:
        header, shift = 0, 0
        while True:
            if position >= size or shift > 28:
                return -1
            byte = int(data[position])
            position += 1
            header |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        if header & 1:  # the last group may be cut short by its writer
            groups_bytes = (header >> 1) * width
            available = min(groups_bytes, size - position)
            count += available * 8 // width
            position += available
        else:
            position += (width + 7) // 8
            if position > size:
                return -1
            count += header >> 1
    return count


@kernel
def decode_hybrid(data: npt.NDArray[np.uint8], width: int, out: npt.NDArray[np.uint8]) -> None:
    """Decode the first len(out) values of a hybrid stream that `count_hybrid` found to hold as many.

    Args:
        data: uint8 [n].
        width: bits a value, 1 to 8.
        out: uint8 [num_values], filled.
    """
    position, filled, size, total = 0, 0, len(data), len(out)
    mask = (1 << width) - 1
    while filled < total and position < size:
        header, shift = 0, 0
        while position < size:
            byte = int(data[position])
            position += 1
            header |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        if header & 1:
            available = min((header >> 1) * width, size - position)
            stop = min(total, filled + available * 8 // width)
            bits, held, at = 0, 0, position
            while filled < stop:
                if held < width:
                    bits |= int(data[at]) << held
                    at += 1
                    held += 8
                out[filled] = bits & mask
                bits >>= width
                held -= width
                filled += 1
            position += available
        else:
            stop = min(total, filled + (header >> 1))
            out[filled:stop] = data[position]
            filled = stop
            position += 1


@kernel
def piece_offsets(
    rep: npt.NDArray[np.uint8], definition: npt.NDArray[np.uint8], max_def: int, out: npt.NDArray[np.int64]
) -> int:
    """Where the pieces of rows lie among a page's tokens: a piece begins with the page and at each repetition level 0.

    Args:
        rep: uint8 [num_levels], 0 where a row begins.
        definition: uint8 [num_levels], max_def where there is a token.
        max_def: the level of a token.
        out: int64, room for num_levels + 1: filled with [num_pieces + 1] offsets.

    Returns: num_pieces + 1.
    """
    tokens, filled = 0, 0
    for i in range(len(rep)):
        if rep[i] == 0 or i == 0:
            out[filled] = tokens
            filled += 1
        if definition[i] == max_def:
            tokens += 1
    out[filled] = tokens
    return filled + 1
