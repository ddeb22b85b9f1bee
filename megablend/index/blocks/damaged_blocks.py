"""Replace damaged blocks with zeros, if the config says that samples with damaged blocks are
masked.

Only damage that is the same on every rank is replaced: bytes that violate their format or do not
match a checksum (CorruptFileError). A file that is missing, has been replaced, or cannot be read is
always an error.
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
    """Read blocks, and return zeros for blocks that are damaged. Add the numbers of damaged blocks
    to `store.damaged`, and issue one warning for each (`ids`: int64 [n]).

    Raises: the same errors as BlockStore.read, except CorruptFileError.
    """
    return DecodedBlocks.of(
        [_read_or_replace(store, block, pieces=pieces) for block in ids.tolist()]
    )


def find_masked(
    store: BlockStore, rows: Int64s, blocks: Int64s, num_samples: int
) -> npt.NDArray[np.bool_]:
    """Return which samples contain tokens of a damaged block.

    Args:
        rows, blocks: int64 [m], the sample number and the block number of each span of tokens.

    Returns: bool [num_samples].
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
    extra_zeros = tuple(np.zeros(num_tokens, column.dtype) for column in extra)
    offsets = np.array([0, num_tokens]) if pieces else NO_OFFSETS
    return DecodedBlock(np.zeros(num_tokens, dtype), offsets, extra_zeros)
