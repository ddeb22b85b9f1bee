"""The levels of pages: check their encoding, and find the rows that they describe.

Source: parquet-format, README.md ("Data Pages") and Encodings.md.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s, running_totals
from megablend.formats.parquet.metadata.names import Encoding, name_of
from megablend.formats.parquet.metadata.schema import Column
from megablend.formats.parquet.metadata.thrift import MalformedError, UnsupportedError
from megablend.kernels.parquet.levels import (
    BROKEN,
    LEVELS_DTYPE,
    NONE,
    TOO_HIGH,
    TOO_LONG,
    read_levels,
)
from megablend.kernels.parquet.page_headers import DATA_V2, Headers

Levels = npt.NDArray[np.void]
"""LEVELS_DTYPE [num_pages]: the place of each page's levels, and the counts derived from them."""


def check_level_encodings(headers: Headers, column: Column) -> None:
    """Reject levels encoded as BIT_PACKED, which RLE replaced: readers disagree about its bit order
    (arrow issue 42368). It is accepted in pages without levels, since some writers state it there.
    Raises: UnsupportedError."""
    for level, field in ((column.max_def, "def_encoding"), (column.max_rep, "rep_encoding")):
        others = headers[field][headers[field] != int(Encoding.RLE)]
        if level and len(others):
            name = name_of(Encoding, int(others[0]))
            raise UnsupportedError(
                f"its levels are encoded as {name}, which readers interpret differently; rewrite the file with a current writer"
            )


def levels_of(
    headers: Headers, addresses: Int64s, sizes: Int64s, column: Column, num_pieces: Int64s | None
) -> tuple[Levels, Int64s, Int64s]:
    """Decode the levels of many data pages; `check_levels` reports problems.

    Args:
        headers: HEADER_DTYPE [n].
        addresses, sizes: int64 [n], address and size of the bytes that begin with each page's
            levels.
        num_pieces: int64 [n], number of pieces that each page is expected to have, negative if
            unknown; None if the offsets of pieces are not needed.

    Returns: LEVELS_DTYPE [n]; the offsets of the pieces of all pages, int64; and the position among
        these of each page's first offset, int64 [n + 1].
    """
    levels = np.zeros(len(headers), LEVELS_DTYPE)
    levels["address"] = addresses
    levels["size"] = sizes
    levels["num_levels"] = headers["num_values"]
    # A V1 page states the sizes in its body
    is_v2 = headers["type"] == DATA_V2
    levels["rep_bytes"] = np.where(is_v2, headers["rep_bytes"], -1)
    levels["def_bytes"] = np.where(is_v2, headers["def_bytes"], -1)
    if num_pieces is None:
        offsets = np.empty(0, np.int64)
        first = np.zeros(len(headers) + 1, np.int64)
        read_levels(levels, column.max_def, column.max_rep > 0, offsets, first)
        return levels, offsets, first
    num_pieces = np.minimum(num_pieces, headers["num_values"])
    while True:
        first = running_totals(num_pieces + 1)
        offsets = np.empty(first[-1], np.int64)
        read_levels(levels, column.max_def, column.max_rep > 0, offsets, first)
        is_complete = (num_pieces >= 0).all() or (levels["problem"] != NONE).any()
        if is_complete:
            return levels, offsets, first
        # The first pass has counted the pieces
        num_pieces = levels["pieces"]


def check_levels(level: np.void, column: Column) -> None:
    """Raise MalformedError if a problem was found when the levels of a page were decoded. level: a
    record of LEVELS_DTYPE."""
    problem = level["problem"]
    detail = int(level["detail"])
    if problem == NONE:
        return
    if problem == TOO_LONG:
        left = max(0, int(level["size"] - level["begin"]))
        raise MalformedError(
            f"its levels need {detail} bytes, but only {left} are left in the page"
        )
    if problem == TOO_HIGH:
        raise MalformedError(
            f"it has level {detail}, above the column's maximum of {column.max_def}"
        )
    num_levels = "broken" if problem == BROKEN else detail
    raise MalformedError(f"it has {num_levels} levels, but its header states {level['num_levels']}")
