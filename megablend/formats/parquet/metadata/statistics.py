"""The range of a column's values, from the statistics in the footer.

Source: parquet-format, parquet.thrift (Statistics, ColumnOrder). `min_value` and `max_value` follow
the order of the column's logical type; the older `min` and `max` always compared signed integers,
so they are used for signed columns only. Bounds that are marked as inexact are not used.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.formats.parquet.metadata.column_chunk import Chunks
from megablend.formats.parquet.metadata.names import Physical
from megablend.formats.parquet.metadata.schema import Column

_WORDS = {
    (Physical.INT32, False): "<i4",
    (Physical.INT32, True): "<u4",
    (Physical.INT64, False): "<i8",
}
"""How statistics are stored: (physical type, unsigned) -> dtype. No token column is an unsigned
INT64."""


def find_value_range(chunks: Chunks, column: Column) -> tuple[int, int] | None:
    """The smallest and the largest value of the chunks that have statistics; None if none has.

    Args:
        chunks: CHUNK_DTYPE [n].
    """
    is_unsigned = column.dtype.startswith("u")
    dtype = np.dtype(_WORDS.get((Physical(column.physical), is_unsigned), "V0"))
    if not dtype.itemsize:
        return None
    newer = _has_fields(chunks, (5, 6), dtype.itemsize) & (
        chunks["ranges"] & (1 << 7 | 1 << 8) == 0
    )
    older = _has_fields(chunks, (1, 2), dtype.itemsize) & (not is_unsigned) & ~newer
    lows, highs = (
        np.concatenate([chunks[new][newer], chunks[old][older]])
        .astype(f"<u{dtype.itemsize}")
        .view(dtype)
        for new, old in (("min_value", "old_min"), ("max_value", "old_max"))
    )
    sound = lows <= highs
    return (int(lows[sound].min()), int(highs[sound].max())) if sound.any() else None


def _has_fields(chunks: Chunks, fields: tuple[int, int], width: int) -> npt.NDArray[np.bool_]:
    """Which chunks have both fields of Statistics, of `width` bytes: bool [n]."""
    bits = sum(1 << (field if width == 4 else field + 8) for field in fields)
    has: npt.NDArray[np.bool_] = chunks["ranges"] & bits == bits
    return has
