"""Decoding the levels of Parquet pages: where rows begin among a page's tokens.

Levels are followed run by run, both streams side by side: a run of levels that are all inside one
row costs a step, however long it is.

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
        ("address", "<u8"),  # of the bytes that begin with the page's levels
        ("size", "<i8"),  # of these bytes
        ("num_levels", "<i8"),
        ("rep_bytes", "<i8"),  # of repetition levels; -1 where four bytes before them tell (V1)
        ("def_bytes", "<i8"),  # of definition levels; -1 likewise
        # output
        ("begin", "<i8"),  # byte at which the values begin, after the levels
        ("tokens", "<i8"),
        ("pieces", "<i8"),
        ("continues", "?"),  # the first piece continues a row of the page before
        ("head", "<i8"),  # tokens of the first piece where it continues a row
        ("inner", "<i8"),  # rows with tokens that begin in the page, the last row left out
        ("tail", "<i8"),  # tokens of the last row that begins in the page
        ("problem", "<i8"),  # one of those below
        ("detail", "<i8"),
    ]
)
"""The levels of one page."""
NONE = 0
TOO_LONG = 1
"""`detail` bytes are announced at byte `begin`, more than there are."""
BROKEN = 2
"""A run is truncated."""
TOO_FEW = 3
"""There are only `detail` levels."""
TOO_HIGH = 4
"""There is a level `detail`."""


@kernel
def read_levels(
    pages: npt.NDArray[np.void],
    max_def: int,
    repeated: bool,
    offsets: npt.NDArray[np.int64],
    first_offset: npt.NDArray[np.int64],
) -> None:
    """Read the levels of many pages.

    Args:
        pages: LEVELS_DTYPE [n]; its second part is filled.
        max_def: the definition level of a token; 0 if definition levels are not stored.
        repeated: whether repetition levels are stored: 0 where a row begins, 1 inside of it.
        offsets: int64, filled: piece i of page j begins at its token offsets[first_offset[j] + i]
            and ends at the one after. If a page has no room for all, by `pieces`, the others are
            omitted.
        first_offset: int64 [n + 1].
    """
    for i in range(len(pages)):
        _read_page(pages[i], max_def, repeated, offsets[first_offset[i] : first_offset[i + 1]])


@device
def _read_page(page: np.void, max_def: int, repeated: bool, offsets: npt.NDArray[np.int64]) -> None:
    data = pointer_at(page["address"], page["size"])
    page["tokens"] = page["pieces"] = page["head"] = page["inner"] = page["tail"] = 0
    page["continues"] = False
    page["problem"] = NONE
    rep_at, rep_end = _stretch(page, data, 0, page["rep_bytes"], repeated)
    def_at, def_end = _stretch(page, data, rep_end, page["def_bytes"], max_def > 0)
    if page["problem"] == NONE:
        page["begin"] = def_end
        _follow(page, data, rep_at, rep_end, def_at, def_end, max_def, repeated, offsets)


@device
def _stretch(page: np.void, data: Pointer, at: int, size: int, stored: bool) -> tuple[int, int]:
    """Where the levels begin and end that come next in `data`."""
    if size < 0:
        if not stored:
            return at, at
        size = 0
        for i in range(min(4, page["size"] - at)):
            size |= int(data[at + i]) << 8 * i
        at += 4
    if size > page["size"] - at and page["problem"] == NONE:
        page["problem"] = TOO_LONG
        page["detail"] = size
        page["begin"] = at
    return at, at + size


@device
def _follow(
    page: np.void,
    data: Pointer,
    rep_at: int,
    rep_end: int,
    def_at: int,
    def_end: int,
    max_def: int,
    repeated: bool,
    offsets: npt.NDArray[np.int64],
) -> None:
    """Go through both streams together; one that is not stored says of each level that it begins a
    row, or that it is a token."""
    num_levels = int(page["num_levels"])
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
    while done < num_levels:
        while rep_left == 0 and rep_at < rep_end:
            rep_left, rep_packed, rep, rep_at = next_run(data, rep_at, rep_end, 1)
        while def_left == 0 and def_at < def_end:
            def_left, def_packed, definition, def_at = next_run(data, def_at, def_end, def_width)
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
            # levels counted to row belong to the piece that is open
            found = _count_tokens(
                data, def_end, def_packed, definition, def_width, max_def, counted, row
            )
            if found < 0:
                page["problem"] = TOO_HIGH
                page["detail"] = -found
                return
            tokens += found
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
    """The first of levels i to count of a run that begins a row; count if none does."""
    if not packed:
        return count if rep else i
    while i < count:
        # Eight more of the same row
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
    """How many of levels i to count of a run are tokens;
    a level above max_def is returned with its sign changed."""
    if not packed:
        return -definition if definition > max_def else (count - i) * (definition == max_def)
    found = 0
    for j in range(i, count):
        level = bits_at(data, end, definition + j * width, width)
        if level > max_def:
            return -level
        found += level == max_def
    return found
