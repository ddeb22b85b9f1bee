"""Splits by document: each split of a source is a range of blocks whose first and last are clipped at a document's end.

The boundaries are the same as Megatron's: of n documents, a split has round(lo * n) to round(hi * n) of the running shares.
Counting the tokens before a boundary document requires decoding its block, so splits are computed once, at build.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from megablend.blocks.block_store import BlockStore
from megablend.formats.base import STARTS_MID_DOCUMENT, DecodedBlock
from megablend.fs.atomic_write import keep_computed
from megablend.fs.safe_open import read_regular
from megablend.index.cache_folders import splits
from megablend.index.document_table import PartDocuments, open_table
from megablend.index.group_totals import count, load_group_totals, save_group_totals
from megablend.index.snapshot import Snapshot

VERSION = 2
PART_DTYPE = np.dtype(
    [
        ("first_block", "<i8"),  # block numbers of the index
        ("stop_block", "<i8"),
        ("skip", "<i8"),  # tokens at the first block's start that belong to the previous split
        ("keep", "<i8"),  # tokens of the last block, counted from its start, that belong to this split
        ("documents", "<i8"),
        ("tokens", "<i8"),  # tokens of the split, end-of-document tokens included
        ("first_document", "<i8"),  # the source's documents before the split
    ]
)
"""A source's documents of one split."""
_RANGE = ("first_block", "stop_block", "skip", "keep")


def parts_of(store: BlockStore, shares: Sequence[Fraction], *, keep: bool = False) -> npt.NDArray[np.void]:
    """The splits of all sources of an index, from `splits/` in the cache if a build stored them, otherwise computed.

    Args:
        keep: store them in the cache.

    Returns: PART_DTYPE [num_sources, len(shares)].
    Raises: as `cut` does; CacheError if they cannot be written.
    """
    snapshot = store.snapshot
    asked = json.dumps([VERSION, snapshot.digest, [str(share) for share in shares], store.column_eods])
    key = hashlib.blake2b(asked.encode(), digest_size=16).digest()
    path = splits(snapshot.cache) / f"{snapshot.digest}-{key.hex()}"
    shape = (len(snapshot.columns), len(shares))  # extra columns have rows of zeros
    with contextlib.suppress(OSError):
        data, checksum = (whole := read_regular(path))[:-16], whole[-16:]
        if len(data) == shape[0] * shape[1] * PART_DTYPE.itemsize and _checksum(key, data) == checksum:
            return np.frombuffer(data, PART_DTYPE).reshape(shape)
    parts = np.zeros(shape, PART_DTYPE)
    for number in range(len(snapshot.sources)):
        parts[number] = compute_split_ranges(store, number, shares)
    if keep:
        keep_computed(path, parts.tobytes() + _checksum(key, parts.tobytes()))
    return parts


def _checksum(key: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, key=key, digest_size=16).digest()


def compute_split_ranges(store: BlockStore, source: int, shares: Sequence[Fraction]) -> npt.NDArray[np.void]:
    """Compute the splits of one source.

    Args:
        store: returns tokens with end-of-document tokens inserted.
        source: number of the source in the index.
        shares: of the splits; sum to 1.

    Returns: PART_DTYPE [len(shares)].
    Raises: as BlockStore.read does, for the boundary blocks.
    """
    entry = store.snapshot.sources[source]
    running = [sum(shares[:i], Fraction(0)) for i in range(len(shares) + 1)]
    documents = [round(share * entry.rows) for share in running]
    borders = [find_document(store, source, document) for document in documents]
    return cut_documents(store, source, list(pairwise(documents)), list(pairwise(borders)))


Border = tuple[int, int]
"""A block, and tokens in it before a document."""


def cut_documents(
    store: BlockStore, source: int, ranges: Sequence[tuple[int, int]], borders: Sequence[tuple[Border, Border]]
) -> npt.NDArray[np.void]:
    """Ranges of a source's documents, and where their first document and the one after their last begin: PART_DTYPE [n].

    Raises: CacheError where the index is damaged.
    """
    eod = store.eods[source] is not None
    edges = [block for pair in borders for block, _ in pair]
    before = store.snapshot.count_tokens_before(edges, eod=eod).reshape(-1, 2).tolist()
    parts = np.zeros(len(ranges), PART_DTYPE)
    for i, ((first, last), ((block, skip), (stop, keep))) in enumerate(zip(ranges, borders, strict=True)):
        tokens = before[i][1] + keep - before[i][0] - skip
        if first == last:
            continue  # no documents: an empty range
        if block == stop and keep == 0:  # documents without tokens have no block
            parts[i] = (block, stop, 0, 0, last - first, 0, first)
            continue
        if keep == 0:
            if stop > block:  # otherwise its documents have no tokens, and so no blocks
                keep = before[i][1] - int(store.snapshot.count_tokens_before([stop - 1], eod=eod)[0])
            stop -= 1
        parts[i] = (block, stop + 1, skip, keep, last - first, tokens, first)
    return parts


def find_document(
    store: BlockStore, source: int, document: int, read: Callable[[int], DecodedBlock] | None = None
) -> tuple[int, int]:
    """The block in which a document of the source begins, and the tokens in that block before it.

    Args:
        read: decodes a block of `store`, if its file has another path by now; by default `store` does.
    """
    snapshot, entry = store.snapshot, store.snapshot.sources[source]
    if document == 0:
        return entry.blocks.start, 0
    if document == entry.rows:
        return entry.blocks.stop, 0
    row = snapshot.running("rows_before", [entry.blocks.start]) + document
    block = int(snapshot.find_blocks("rows_before", entry.blocks, row)[0])
    piece = int((row - snapshot.running("rows_before", [block]))[0])
    piece += bool(snapshot.blocks(np.array([block]))["flags"][0] & STARTS_MID_DOCUMENT)
    decoded = store.read([block])[0] if read is None else read(block)
    return block, int(decoded.offsets[piece])


class SplitBlocks:
    """The blocks of a split as orders see them: numbered from 0, clipped at the split's boundaries.

    Args:
        parts: PART_DTYPE [], or [num_ranges] where the split has several ranges of the source's documents, in their order.
    """

    def __init__(self, snapshot: Snapshot, parts: npt.NDArray[np.void], *, eod: bool) -> None:
        self.snapshot = snapshot
        self.eod = eod
        self.parts = parts = np.atleast_1d(parts)
        self.first_block = int(parts["first_block"][0])
        self._offsets = np.concatenate([[0], np.cumsum(parts["stop_block"] - parts["first_block"])])
        self._tokens_before = np.concatenate([[0], np.cumsum(parts["tokens"])])
        self.num_blocks, self.num_tokens = int(self._offsets[-1]), int(self._tokens_before[-1])

    def before(self, blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Tokens of the local blocks before each of `blocks` int64 [n], which are from 0 to num_blocks: int64 [n]."""
        firsts = self.parts["first_block"].astype(np.int64)
        which = self._ranges_of(blocks)
        ids = firsts[which] + blocks - self._offsets[which]
        counts = self.snapshot.count_tokens_before(np.append(ids, firsts), eod=self.eod)
        inside = counts[: len(blocks)] - (counts[len(blocks) :] + self.parts["skip"])[which]
        tokens = self._tokens_before[which] + np.where(blocks > self._offsets[which], inside, 0)
        return np.where(blocks < self.num_blocks, tokens, self.num_tokens)

    def group_totals(self, num_groups: int, run: int) -> npt.NDArray[np.int64]:
        """Tokens of each group, [num_groups]; block b is of group b // run % num_groups. Loaded from the cache if stored."""
        kept = load_group_totals(self.snapshot.cache, self._named(num_groups, run), num_groups)
        return count(self.before, self.num_blocks, num_groups, run) if kept is None else kept

    def keep_group_totals(self, num_groups: int, run: int) -> None:
        """Store the result of `group_totals` in the cache. Raises CacheError."""
        named = self._named(num_groups, run)
        if load_group_totals(self.snapshot.cache, named, num_groups) is None:
            save_group_totals(self.snapshot.cache, named, count(self.before, self.num_blocks, num_groups, run))

    @property
    def documents(self) -> PartDocuments:
        """The split's documents. Raises: CacheError if the index has no document table."""
        source = int(self.snapshot.file_columns[self.snapshot.file_of([self.first_block])[0]])
        ranges = [
            range(int(part["first_document"]), int(part["first_document"] + part["documents"])) for part in self.parts
        ]
        return PartDocuments(open_table(self.snapshot, source), ranges, eod=self.eod)

    def index_blocks(self, blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Block numbers of the snapshot of local blocks, from 0 to num_blocks - 1: int64 [n]."""
        which = self._ranges_of(blocks)
        numbers: npt.NDArray[np.int64] = self.parts["first_block"][which] + blocks - self._offsets[which]
        return numbers

    def local_blocks(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The local blocks of block numbers of the snapshot that the split has: int64 [n]; of others, the next one after them."""
        which = np.maximum(np.searchsorted(self.parts["first_block"], numbers, side="right") - 1, 0)
        inside = np.maximum(numbers - self.parts["first_block"][which], 0)
        local: npt.NDArray[np.int64] = np.minimum(self._offsets[which] + inside, self._offsets[which + 1])
        return local

    def stored_position(self, block: int, token: int) -> int:
        """The position of a token of an index block among the split's stored tokens, clipped to the split's range."""
        local = self.local_blocks(np.array([block]))
        before = int(self.before(local)[0])
        if int(local[0]) == self.num_blocks or int(self.index_blocks(local)[0]) != block:
            return before
        return before + max(0, token - int(self.clips(local)[0]))

    def clips(self, blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Stored tokens of local blocks before their first token of this split: int64 [n]."""
        which = self._ranges_of(blocks)
        return np.where(blocks == self._offsets[which], self.parts["skip"][which], 0)

    def _ranges_of(self, blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The range that has each local block; the last one for num_blocks: int64 [n]."""
        if len(self.parts) == 1:
            return np.zeros(len(blocks), np.int64)
        which: npt.NDArray[np.int64] = np.searchsorted(self._offsets, blocks, side="right") - 1
        return np.minimum(which, len(self.parts) - 1)

    def _named(self, num_groups: int, run: int) -> list[object]:
        ranges = [[int(part[field]) for field in _RANGE] for part in self.parts]
        return [self.snapshot.digest, *ranges, self.eod, num_groups, run]
