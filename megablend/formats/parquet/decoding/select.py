"""Sorting requested blocks into file order: pages, and column chunks that are read whole."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megablend.arrays import Int64s
from megablend.formats.base import Array
from megablend.formats.parquet.decoding.values import BY_ROW_GROUP


class SelectedBlocks(NamedTuple):
    """Blocks in the order of the file, each once."""

    pages: Array
    """PLACED_BLOCK_DTYPE [num_pages]"""
    groups: Array
    """PLACED_BLOCK_DTYPE [num_groups], column chunks that pyarrow reads whole."""
    places: Int64s
    """int64 [n], for each requested block its position in pages followed by groups."""


def select_blocks(blocks: Array) -> SelectedBlocks:
    """Sort blocks PLACED_BLOCK_DTYPE [n] of any order into the order in which they are read."""
    offsets = blocks["offset"]
    if (offsets[1:] > offsets[:-1]).all():  # as they are mostly requested
        wanted = blocks
        places = np.arange(len(blocks))
    else:
        firsts, places = _in_file_order(offsets)
        wanted = blocks[firsts]
    is_group = wanted["encoding"] == BY_ROW_GROUP
    if not is_group.any():
        return SelectedBlocks(wanted, wanted[:0], places)
    return SelectedBlocks(
        wanted[~is_group], wanted[is_group], np.argsort(np.argsort(is_group, kind="stable"))[places]
    )


def places_of(blocks: Array) -> tuple[Int64s, Int64s]:
    """First bytes, and sizes: int64 [n] each."""
    return np.ascontiguousarray(blocks["offset"]), blocks["stored_bytes"].astype(np.int64)


def _in_file_order(offsets: Int64s) -> tuple[Int64s, Int64s]:
    """First occurrence of each of `offsets` int64 [n], ascending, and each one's position among
    these: np.unique, but faster."""
    order = np.argsort(offsets, kind="stable")
    ascending = offsets[order]
    is_new = np.ones(len(order), np.bool_)
    np.not_equal(ascending[1:], ascending[:-1], out=is_new[1:])
    places = np.empty(len(order), np.int64)
    places[order] = np.cumsum(is_new) - 1
    return order[is_new], places
