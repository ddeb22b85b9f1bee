"""Block tables of the formats that have no column chunks."""

from __future__ import annotations

import numpy as np

from megablend.formats.base import CHUNK_DTYPE, Array


def single_chunk() -> Array:
    """CHUNK_DTYPE [1]: the whole file as one chunk."""
    chunks = np.zeros(1, CHUNK_DTYPE)
    chunks["dictionary_offset"] = -1
    return chunks
