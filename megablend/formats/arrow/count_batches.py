"""The block table of record batches, wherever a file says that they are."""

from __future__ import annotations

import numpy as np

from megablend.errors import CorruptFileError, UnsupportedFileError
from megablend.formats.arrow.buffers import MAX_BYTES, Buffers
from megablend.formats.arrow.column import Column
from megablend.formats.arrow.documents import find_documents
from megablend.formats.arrow.message import Batch, BatchError, column_buffers
from megablend.formats.arrow.request_batches import load_batch, request_batches
from megablend.formats.base import BLOCK_DTYPE, ENDS_AT_DOCUMENT_END, Array
from megablend.storage.base import Storage


def count_batches(path: str, places: Array, column: Column, storage: Storage) -> tuple[Array, int]:
    """Count the documents and tokens of record batches, from offsets and validity bitmaps.

    Args:
        places: PLACE_DTYPE [num_batches].

    Returns: BLOCK_DTYPE [n], of the batches that have rows; the bytes of their bodies that were
        read.
    Raises: CorruptFileError; UnsupportedFileError for a batch that is too large.
    """
    request_batches(path, places, column, storage)
    blocks = np.zeros(len(places), BLOCK_DTYPE)
    scanned_bytes = 0
    for block, place in zip(blocks, places, strict=True):
        scanned_bytes += _count(path, column, place, block, storage)
    blocks = blocks[blocks["rows"] > 0]
    blocks["first_token"] = np.cumsum(blocks["tokens"]) - blocks["tokens"]
    return blocks, scanned_bytes


def _buffers(path: str, batch: Batch, place: np.void, storage: Storage) -> Buffers:
    body = int(place["offset"]) + int(place["metadata_bytes"])
    return Buffers(
        batch, lambda offset, size: np.frombuffer(storage.read(path, body + offset, size), np.uint8)
    )


def _count(path: str, column: Column, place: np.void, block: np.void, storage: Storage) -> int:
    """Fill a batch's row of the block table; returns the bytes of its body that were read."""
    offset = int(place["offset"])
    try:
        batch = load_batch(path, place, column, storage)
        buffers = _buffers(path, batch, place, storage)
        documents = find_documents(batch, column, buffers)
    except BatchError as error:
        raise CorruptFileError(path, f"record batch {error}", offset=offset) from error
    needed = column_buffers(batch, column)
    stored = int(place["metadata_bytes"]) + int(batch.buffers["size"][needed].sum())
    decoded = sum(buffers.size(number) for number in needed)
    if max(stored, decoded) > MAX_BYTES:
        raise UnsupportedFileError(
            path,
            f"record batch of {batch.rows} rows has {max(stored, decoded)} bytes of tokens, more than {MAX_BYTES}; "
            "write smaller batches (max_chunksize of RecordBatchFileWriter.write_table)",
            offset=offset,
        )
    block["offset"] = offset
    block["stored_bytes"] = stored
    block["decoded_bytes"] = decoded
    block["rows"] = batch.rows
    block["tokens"] = documents.offsets[-1]
    block["ends"] = np.count_nonzero(np.diff(documents.offsets))
    block["flags"] = ENDS_AT_DOCUMENT_END
    return buffers.fetched_bytes
