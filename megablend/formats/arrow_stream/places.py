"""Convert the positions of a stream's batches to compact JSON for the index, and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from megablend.errors import CorruptFileError
from megablend.formats.arrow.footer import PLACE_DTYPE
from megablend.formats.base import Array


def pack_places(places: Array) -> dict[str, Any]:
    """Convert places, PLACE_DTYPE [num_batches], to a JSON object; see `unpack_places`.

    Most batches begin where the previous batch ends, and most have metadata of the same size and
    bodies of the same size. If all later values of a list are equal to the second, only the first
    two values are stored.
    """
    ends = places["offset"] + places["metadata_bytes"] + places["body_bytes"]
    ends_before = np.concatenate([np.zeros(1, np.int64), ends[:-1]])[: len(places)]
    columns = {
        "gaps": places["offset"] - ends_before,
        "metadata_bytes": places["metadata_bytes"],
        "body_bytes": places["body_bytes"],
    }
    return {
        "count": len(places),
        **{name: _shorten(values.tolist()) for name, values in columns.items()},
    }


def unpack_places(path: str, packed: dict[str, Any], size: int) -> Array:
    """Convert the result of `pack_places` to places: PLACE_DTYPE [num_batches].
    Raises: CorruptFileError if they are not within a file of `size` bytes."""
    count = int(packed["count"])
    # A wrong count, which is refused below, must not allocate memory
    places = np.zeros(count if 0 <= count <= size else 0, PLACE_DTYPE)
    try:
        gaps, metadata, body = (
            _expand(packed[name], len(places)) for name in ("gaps", "metadata_bytes", "body_bytes")
        )
        places["metadata_bytes"] = metadata
        places["body_bytes"] = body
        places["offset"] = np.cumsum(gaps + metadata + body) - metadata - body
        smallest = min(int(values.min(initial=0)) for values in (gaps, metadata, body))
        if smallest < 0 or len(places) != count or places["offset"].max(initial=0) > size:
            raise ValueError(f"{count} batches do not fit in {size} bytes")
    except (ValueError, OverflowError) as error:
        raise CorruptFileError(
            path, f"the index has wrong positions for the batches of this file ({error})"
        ) from error
    return places


def _shorten(values: list[int]) -> list[int]:
    """Return the first two values if all later values are equal to the second; otherwise all
    values."""
    return values[:2] if len(set(values[1:])) == 1 else values


def _expand(values: list[int], count: int) -> Array:
    """Undo `_shorten`: return the `count` values that it was given (int64 [count]). Raises:
    ValueError if `_shorten` cannot have returned `values` for `count` values."""
    is_shortened = len(values) == 2 and count > 2
    if is_shortened:
        first, others = values
        values = [first, *[others] * (count - 1)]
    expanded = np.array(values, np.int64)
    if len(expanded) != count:
        raise ValueError(f"found {len(expanded)} values, expected one for each of {count} batches")
    return expanded
