"""Blocks whose bytes are damaged, replaced by zeros when a config wants their samples masked.

Only what every rank finds alike is replaced: bytes that are not what their format or a
checksum says (CorruptFileError). A file that is missing, was replaced, or cannot be
read is an error everywhere.
"""

from __future__ import annotations

import warnings

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.errors import CorruptFileError
from megablend.formats.base import NO_OFFSETS, DecodedBlock
from megablend.formats.decoded import DecodedBlocks
from megablend.index.blocks.block_store import BlockStore
from megablend.index.tables.source_entry import SourceEntry


def read_or_replace(store: BlockStore, ids: Int64s, *, pieces: bool) -> DecodedBlocks:
    """Read blocks `ids` int64 [n], with zeros for those that are damaged;
    each of these is noted in `store.damaged`, and warned of once.

    Raises: as BlockStore.read does, but CorruptFileError.
    """
    return DecodedBlocks.of(
        [_read_or_replace(store, block, pieces=pieces) for block in ids.tolist()]
    )


def find_masked(
    store: BlockStore, rows: Int64s, blocks: Int64s, num_samples: int
) -> npt.NDArray[np.bool_]:
    """Which samples draw on a damaged block: bool [num_samples].

    Args:
        rows, blocks: int64 [m], the samples' stretches: number of the sample, number of the block.
    """
    masked = np.zeros(num_samples, np.bool_)
    masked[rows[np.isin(blocks, list(store.damaged))]] = True
    return masked


def _read_or_replace(store: BlockStore, block: int, *, pieces: bool) -> DecodedBlock:
    try:
        return store.read([block], pieces=pieces)[0]
    except CorruptFileError as error:
        if block not in store.damaged:
            warnings.warn(
                f"samples of a damaged block are masked: {error}", RuntimeWarning, stacklevel=2
            )
        store.damaged.add(block)
        return _make_zeros(store, block, pieces=pieces)


def _make_zeros(store: BlockStore, block: int, *, pieces: bool) -> DecodedBlock:
    ids = np.array([block])
    num_tokens = int(store.num_tokens(ids)[0])
    column = store.snapshot.column_of(int(store.snapshot.file_of(ids)[0]))
    dtype = np.result_type(*store.snapshot.files.token_dtypes(column.files))
    extra = store.extra.get(column.source_name, ()) if isinstance(column, SourceEntry) else ()
    zeros = tuple(np.zeros(num_tokens, each.dtype) for each in extra)
    return DecodedBlock(
        np.zeros(num_tokens, dtype), np.array([0, num_tokens]) if pieces else NO_OFFSETS, zeros
    )
