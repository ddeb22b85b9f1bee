"""Tokens of several blocks, as `BlockStore.read_blocks` returns them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """Tokens of several blocks, one after the other."""

    tokens: npt.NDArray[Any]
    """[num_tokens], of the widest token dtype among the blocks."""
    offsets: npt.NDArray[np.int64]
    """int64 [num_pieces + 1]: piece i (a document, or the part of it that its block holds) is tokens[offsets[i]:offsets[i+1]]."""
    block_offsets: npt.NDArray[np.int64]
    """int64 [num_blocks + 1]: block j is tokens[block_offsets[j]:block_offsets[j+1]]."""
