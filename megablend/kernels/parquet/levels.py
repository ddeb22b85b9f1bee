"""Decode the levels of Parquet pages, which determine where rows begin among a page's tokens.

The streams of repetition and definition levels are read side by side, run by run: a run of levels
within one row takes one step, however long it is.

Source: parquet-format, README.md ("Nested Encoding", "Data Pages").
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.intrinsics import Pointer, pointer_at
from megablend.jit import device, kernel
from megablend.kernels.parquet.hybrid import bits_at, next_run

LEVELS_DTYPE = np.dtype(
    [
        # input
        ("address", "<u8"),  # address of the bytes that begin with the page's levels
        ("size", "<i8"),  # size of these bytes
        ("num_levels", "<i8"),
        ("rep_bytes", "<i8"),  # size of the repetition levels; -1 if it is stored before them (V1)
        ("def_bytes", "<i8"),  # size of the definition levels; -1 if it is stored before them
        # output
        ("begin", "<i8"),  # byte at which the values begin, after the levels
        ("tokens", "<i8"),  # number of tokens
        ("pieces", "<i8"),  # number of rows, and parts of rows
        ("continues", "?"),  # whether the first piece continues a row of the previous page
        ("head", "<i8"),  # tokens of the first piece if it continues a row; 0 otherwise
        ("inner", "<i8"),  # rows with tokens that begin in the page, except the last one
        ("tail", "<i8"),  # tokens of the last row that begins in the page
        ("problem", "<i8"),  # NONE, TOO_LONG, BROKEN, TOO_FEW or TOO_HIGH
        ("detail", "<i8"),  # a number for the message about the problem
    ]
)
"""The levels of one page."""
NONE = 0
TOO_LONG = 1
"""Levels of `detail` bytes should begin at byte `begin`, but the page has fewer."""
BROKEN = 2
"""A run is truncated."""
TOO_FEW = 3
"""The page has only `detail` levels."""
TOO_HIGH = 4
"""The page has a level `detail`, above the maximum."""


@kernel
def read_levels(
    pages: npt.NDArray[np.void],
    max_def: int,
    repeated: bool,
    offsets: npt.NDArray[np.int64],
    first_offset: npt.NDArray[np.int64],
) -> None:
    """Decode the levels of many pages.

    Args:
        pages: LEVELS_DTYPE [n]; its output fields are filled.
        max_def: definition level of a token; 0 if definition levels are not stored.
        repeated: whether repetition levels are stored: 0 if a row begins, 1 within it.
        offsets: int64, filled: piece i of page j is tokens offsets[first_offset[j] + i] to
            offsets[first_offset[j] + i + 1] of the page. If a page has more `pieces` than there is
            room for, the last ones are left out.
        first_offset: int64 [n + 1], where the offsets of each page begin.
    """
    for i in range(len(pages)):
        _read_page(pages[i], max_def, repeated, offsets[first_offset[i] : first_offset[i + 1]])


@device
def _read_page(page: np.void, max_def: int, repeated: bool, offsets: npt.NDArray[np.int64]) -> None:
    """Decode the levels of one page, and fill `offsets` with the offsets of its pieces."""
    data = pointer_at(page["address"], page["size"])
    page["tokens"] = page["pieces"] = page["head"] = page["inner"] = page["tail"] = 0
    page["continues"] = False
    page["problem"] = NONE
    rep_position, rep_end = _find_stream(page, data, 0, page["rep_bytes"], repeated)
    def_position, def_end = _find_stream(page, data, rep_end, page["def_bytes"], max_def > 0)
    if page["problem"] == NONE:
        page["begin"] = def_end
        _follow(
            page, data, rep_position, rep_end, def_position, def_end, max_def, repeated, offsets
        )


@device
def _find_stream(
    page: np.void, data: Pointer, position: int, size: int, stored: bool
) -> tuple[int, int]:
    """Return the begin and the end of the stream of levels at data[position]. `size` is -1 if the
    size is stored in front of the stream."""
    if size < 0:
        if not stored:
            return position, position
        size = 0
        for i in range(min(4, page["size"] - position)):
            size |= int(data[position + i]) << 8 * i
        position += 4
    if size > page["size"] - position and page["problem"] == NONE:
        page["problem"] = TOO_LONG
        page["detail"] = size
        page["begin"] = position
    return position, position + size


@device
def _follow(
    page: np.void,
    data: Pointer,
    rep_position: int,
    rep_end: int,
    def_position: int,
    def_end: int,
    max_def: int,
    repeated: bool,
    offsets: npt.NDArray[np.int64],
) -> None:
    """Read both streams together, and fill the page's output fields. Without repetition levels,
    each level begins a row; without definition levels, each level is a token."""
    num_levels = int(page["num_levels"])
    # Bits of a definition level
    def_width = 0
    while max_def >> def_width:
        def_width += 1
    rep_left = 0 if repeated else num_levels
    rep_packed = False
    rep = 0
    def_left = 0 if max_def else num_levels
    def_packed = False
    definition = max_def
    done = tokens = pieces = piece_begin = head = inner = 0
    continues = False
    # Each step is the rest of a run of either stream, or of both
    while done < num_levels:
        while rep_left == 0 and rep_position < rep_end:
            rep_left, rep_packed, rep, rep_position = next_run(data, rep_position, rep_end, 1)
        while def_left == 0 and def_position < def_end:
            def_left, def_packed, definition, def_position = next_run(
                data, def_position, def_end, def_width
            )
        if rep_left <= 0 or def_left <= 0:
            page["problem"] = BROKEN if min(rep_left, def_left) < 0 else TOO_FEW
            page["detail"] = done
            return
        step = min(rep_left, def_left, num_levels - done)
        counted = 0
        row = _next_row(data, rep_end, rep_packed, rep, 0, step)
        if done == 0 and row > 0:
            continues = True
            pieces = 1
            if len(offsets):
                offsets[0] = 0
        while True:
            # Levels `counted` to `row` belong to the current piece
            num_tokens = _count_tokens(
                data, def_end, def_packed, definition, def_width, max_def, counted, row
            )
            if num_tokens < 0:
                page["problem"] = TOO_HIGH
                page["detail"] = -num_tokens
                return
            tokens += num_tokens
            if row == step:
                break
            if continues and pieces == 1:
                head = tokens
            else:
                inner += tokens > piece_begin
            if pieces < len(offsets):
                offsets[pieces] = tokens
            pieces += 1
            piece_begin = tokens
            counted = row
            row = _next_row(data, rep_end, rep_packed, rep, row + 1, step)
        done += step
        rep_left -= step
        def_left -= step
        # If a run is bit-packed, its value is the number of its next bit
        rep += step * rep_packed
        definition += step * def_width * def_packed
    if pieces < len(offsets):
        offsets[pieces] = tokens
    only_continues = continues and pieces == 1
    page["tokens"] = tokens
    page["pieces"] = pieces
    page["continues"] = continues
    page["head"] = tokens if only_continues else head
    page["inner"] = inner
    page["tail"] = 0 if only_continues else tokens - piece_begin


@device
def _next_row(data: Pointer, end: int, packed: bool, rep: int, i: int, count: int) -> int:
    """Return the first of a run's levels [i, count) that begins a row, or `count` if none does."""
    if not packed:
        return count if rep else i
    while i < count:
        # A byte of ones: eight levels within the row
        if (rep + i) & 7 == 0 and i + 8 <= count and data[(rep + i) >> 3] == 255:
            i += 8
        elif bits_at(data, end, rep + i, 1):
            i += 1
        else:
            break
    return i


@device
def _count_tokens(
    data: Pointer,
    end: int,
    packed: bool,
    definition: int,
    width: int,
    max_def: int,
    i: int,
    count: int,
) -> int:
    """Count the tokens among the levels of a run, from level `i` up to level `count`. If a level is
    above `max_def`, return minus this level instead."""
    if not packed:
        return -definition if definition > max_def else (count - i) * (definition == max_def)
    tokens = 0
    for j in range(i, count):
        level = bits_at(data, end, definition + j * width, width)
        if level > max_def:
            return -level
        tokens += level == max_def
    return tokens
