"""A page's levels: how they are encoded, and where rows begin by what they say.

Source: parquet-format, README.md ("Data Pages") and Encodings.md.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.formats.parquet.metadata.names import Encoding, name_of
from megablend.formats.parquet.metadata.schema import Column
from megablend.formats.parquet.metadata.thrift import MalformedError, UnsupportedError
from megablend.kernels.parquet.levels import BROKEN, LEVELS_DTYPE, NONE, TOO_HIGH, TOO_LONG, read_levels
from megablend.kernels.parquet.page_headers import DATA_V2, Headers

Int64s = npt.NDArray[np.int64]
Levels = npt.NDArray[np.void]
"""LEVELS_DTYPE [num_pages]."""


def check_level_encodings(headers: Headers, column: Column) -> None:
    """Refuse levels in BIT_PACKED, which RLE replaced: readers disagree about its order of bits (arrow issue 42368).

    Some writers name it where there are no levels at all; that is fine. Raises UnsupportedError.
    """
    for level, field in ((column.max_def, "def_encoding"), (column.max_rep, "rep_encoding")):
        others = headers[field][headers[field] != int(Encoding.RLE)]
        if level and len(others):
            name = name_of(Encoding, int(others[0]))
            raise UnsupportedError(f"its levels are in {name}, which readers disagree about; write the file again")


def levels_of(
    headers: Headers, addresses: Int64s, sizes: Int64s, column: Column, num_pieces: Int64s | None
) -> tuple[Levels, Int64s, Int64s]:
    """Read the levels of many data pages; problems are left to `check_levels`.

    Args:
        headers: HEADER_DTYPE [n].
        addresses, sizes: int64 [n], of what begins with the levels of each.
        num_pieces: int64 [n], how many pieces each page is expected to have; below 0 where that is not known. None where
            nobody asks where pieces lie.

    Returns: LEVELS_DTYPE [n]; offsets of the pieces of all pages, int64; where those of each page begin there, int64 [n + 1].
    """
    levels = np.zeros(len(headers), LEVELS_DTYPE)
    levels["address"], levels["size"] = addresses, sizes
    levels["num_levels"] = headers["num_values"]
    in_front = headers["type"] == DATA_V2
    levels["rep_bytes"] = np.where(in_front, headers["rep_bytes"], -1)
    levels["def_bytes"] = np.where(in_front, headers["def_bytes"], -1)
    if num_pieces is None:
        offsets, first = np.empty(0, np.int64), np.zeros(len(headers) + 1, np.int64)
        read_levels(levels, column.max_def, column.max_rep > 0, offsets, first)
        return levels, offsets, first
    num_pieces = np.minimum(num_pieces, headers["num_values"])
    while True:
        first = np.concatenate(([0], np.cumsum(num_pieces + 1)))
        offsets = np.empty(first[-1], np.int64)
        read_levels(levels, column.max_def, column.max_rep > 0, offsets, first)
        if (num_pieces < 0).any() and (levels["problem"] == NONE).all():
            num_pieces = levels["pieces"]
            continue
        return levels, offsets, first


def check_levels(level: np.void, column: Column) -> None:
    """Say what is wrong with the levels of a page (of LEVELS_DTYPE), if something is. Raises MalformedError."""
    problem, detail = level["problem"], int(level["detail"])
    if problem == NONE:
        return
    if problem == TOO_LONG:
        left = max(0, int(level["size"] - level["begin"]))
        raise MalformedError(f"its levels should take {detail} bytes, {left} are left in the page")
    if problem == TOO_HIGH:
        raise MalformedError(f"it has a level {detail}, above the column's {column.max_def}")
    found = "broken" if problem == BROKEN else detail
    raise MalformedError(f"its levels are {found}, its header says {level['num_levels']}")
