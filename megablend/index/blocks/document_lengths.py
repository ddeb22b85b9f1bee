"""Count the tokens of each document, block by block. Each rank counts a share of the ranges of
blocks, and stores the document lengths of each range in a file.

    <cache>/lengths/<file>-<stretch>   int32, lengths of the documents of a range of blocks: see sealed_numbers

If a document is in several blocks, the lengths of its pieces are added up. The files with the
lengths are kept, so that a build can continue the work of a build that was killed, and counts only
new files when files are added. Tokens of `.bin/.idx` and Arrow files are not read. Parquet pages
are read, since the boundaries of documents are encoded in their levels. When reads wait for a
network, several ranges are counted at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megablend.arrays import Int32s
from megablend.caches.base import CacheStore
from megablend.distributed.assign import assign_longest_first
from megablend.distributed.base import Communicator
from megablend.errors import CacheError, UnsupportedFileError
from megablend.formats.base import STARTS_MID_DOCUMENT, Array
from megablend.index.blocks.block_store import BlockStore
from megablend.index.read.snapshot import Snapshot
from megablend.index.tables.sealed_numbers import pack_numbers, parse_numbers
from megablend.storage.requested_reads import RequestedReads, run_in_threads
from megablend.system.atomic_write import reading, replace_file
from megablend.system.safe_open import read_regular

STRETCH_BYTES = 256 << 20
"""Stored size in bytes of the blocks of a file that one rank counts at a time."""
LENGTHS_KIND = "lengths"
"""The kind under which the cache stores files of document lengths."""
_BATCH_BLOCKS = 64
"""Number of blocks that are read together."""
_LONGEST = (1 << 31) - 1
"""Maximum number of tokens of a document that a table can record."""
_SEEN_SECONDS = 10.0
"""Number of seconds to wait until a file that another rank wrote is visible on a network file
system."""


def count_documents(store: BlockStore, first: int, end: int) -> Iterator[tuple[int, Array, int]]:
    """Count the tokens of the documents that begin in blocks [first, end), a batch of blocks at a
    time.

    The first block must begin with a document. If the last document continues in block `end`, its
    tokens there are not counted.

    Args:
        store: reads an index whose documents were counted.

    Yields: the number of the batch's first document; the number of tokens of each document, int64
        [n], without end-of-document tokens; the number of data bytes read.
    Raises: see BlockStore.read.
    """
    while first < end:
        stop = next_cut(store.snapshot, min(first + _BATCH_BLOCKS, end), end)
        ids = np.arange(first, stop)
        rows = store.snapshot.running("rows_before", np.append(ids, stop))
        lengths = np.zeros(int(rows[-1] - rows[0]), np.int64)
        continues = store.snapshot.blocks(ids)["flags"] & STARTS_MID_DOCUMENT
        offsets, scanned_bytes = store.pieces(ids)
        for row, pieces, continued in zip(rows[:-1].tolist(), offsets, continues, strict=True):
            begin = row - int(rows[0]) - bool(continued)
            lengths[begin : begin + len(pieces) - 1] += np.diff(pieces)
        yield int(rows[0]), lengths, scanned_bytes
        first = stop


def next_cut(snapshot: Snapshot, block: int, end: int) -> int:
    """Return the first block in [block, end) that begins with a new document, or `end` if no block
    does."""
    while block < end and snapshot.blocks(np.array([block]))["flags"][0] & STARTS_MID_DOCUMENT:
        block += 1
    return block


class BlockRange(NamedTuple):
    """Consecutive blocks of one file."""

    name: str
    """Name of the file that stores the lengths of the range's documents."""
    first_block: int
    stop_block: int
    """The block after the last one."""
    documents: int
    """Number of documents that begin in the range."""
    stored_bytes: int


def split_into_ranges(
    snapshot: Snapshot, source: int, stretch_bytes: int = STRETCH_BYTES
) -> Iterator[BlockRange]:
    """Split a source's blocks into ranges. A range ends at the end of a file or, within a file,
    after about `stretch_bytes`, before a block that begins with a document."""
    entry = snapshot.sources[source]
    for number, key in zip(entry.files, snapshot.files.keys(entry), strict=True):
        file = snapshot.files.entry(number)
        running_bytes = np.cumsum(snapshot.blocks(file.blocks)["stored_bytes"], dtype=np.int64)
        edges = file.first_block + 1 + np.flatnonzero(np.diff(running_bytes // stretch_bytes))
        end = file.first_block + file.num_blocks
        cuts = sorted(
            {file.first_block, *(next_cut(snapshot, int(edge), end) for edge in edges), end}
        )
        for first, stop in pairwise(cuts):
            rows = int(np.diff(snapshot.running("rows_before", [first, stop]))[0])
            bytes_before = running_bytes[first - 1 - file.first_block] if first > cuts[0] else 0
            size = int(running_bytes[stop - 1 - file.first_block] - bytes_before)
            yield BlockRange(f"{key}-{first - file.first_block}", first, stop, rows, size)


def count_share(
    store: BlockStore, parts: Sequence[BlockRange], launch: Communicator
) -> tuple[int, int]:
    """Count the documents of this rank's share of the ranges, except ranges that have already been
    counted. Return the number of documents counted and the number of data bytes read."""
    cache = store.snapshot.store
    mine = assign_longest_first([part.stored_bytes for part in parts], launch.size)[launch.rank]
    cache.fetch_files(LENGTHS_KIND, owners_of(parts))
    missing = [
        parts[i]
        for i in mine
        if _find_lengths(cache.folder / LENGTHS_KIND / parts[i].name, parts[i]) is None
    ]
    counted = scanned_bytes = 0
    for part, size in run_in_threads(partial(_count_part, store), missing, store.max_files):
        counted += part.documents
        scanned_bytes += size
        cache.publish_file(LENGTHS_KIND, part.name)
    return counted, scanned_bytes


def _count_part(store: BlockStore, part: BlockRange, _: RequestedReads) -> int:
    """Count the tokens of the documents of a range, and store the counts on this node. Return the
    number of data bytes read."""
    scanned_bytes = 0
    lengths = np.empty(part.documents, np.int32)
    first_document = int(store.snapshot.running("rows_before", [part.first_block])[0])
    for first, batch, size in count_documents(store, part.first_block, part.stop_block):
        if batch.max(initial=0) > _LONGEST:
            file = int(store.snapshot.file_of([part.first_block])[0])
            raise UnsupportedFileError(
                store.snapshot.path(file, store.roots),
                f"a document has {batch.max():,} tokens, but document tables support at most {_LONGEST:,}; split it",
            )
        start = first - first_document
        lengths[start : start + len(batch)] = batch
        scanned_bytes += size
    replace_file(store.snapshot.store.folder / LENGTHS_KIND / part.name, pack_numbers(lengths))
    return scanned_bytes


def owners_of(parts: Sequence[BlockRange]) -> set[str]:
    """Return the owners of the files that store the ranges' lengths; see CacheStore.fetch_files."""
    return {part.name.partition("-")[0] for part in parts}


def _find_lengths(path: Path, part: BlockRange) -> Int32s | None:
    """Read the lengths of a range's documents; return None if they are missing or damaged."""
    try:
        with reading(path, apart_from=(FileNotFoundError,)):
            data = read_regular(path)
        return parse_numbers(data, np.dtype(np.int32), part.documents)
    except FileNotFoundError:
        return None


def await_lengths(cache: CacheStore, part: BlockRange) -> Int32s:
    """Read the lengths of a range that a rank has written; on network file systems they may appear
    a few seconds later. Raises: CacheError."""
    deadline = time.monotonic() + _SEEN_SECONDS
    path = cache.folder / LENGTHS_KIND / part.name
    while True:
        lengths = _find_lengths(path, part)
        if lengths is None:
            lengths = _find_lengths(cache.fetch_file(LENGTHS_KIND, part.name), part)
        if lengths is not None:
            return lengths
        if time.monotonic() > deadline:
            raise CacheError(
                f"{path}: rank 0 cannot read all of this file, which another rank wrote; use a cache on a file system that "
                "all ranks share, or run all ranks on one node"
            )
        time.sleep(0.1)
