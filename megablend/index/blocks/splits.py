"""Divide the documents of sources among splits, such as train and validation. Each split of a
source is a range of blocks whose first and last blocks are clipped at document boundaries.

The boundaries are the same as Megatron's: of n documents, a split has documents round(lo * n) to
round(hi * n) - 1, where `lo` and `hi` are the cumulative shares before and after the split. The
tokens before a boundary document can be counted only by decoding its block, so splits are computed
once, by the build.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.formats.base import STARTS_MID_DOCUMENT, DecodedBlock
from megablend.index.blocks.block_store import BlockStore
from megablend.index.read.document_table import PartDocuments, open_table
from megablend.index.read.snapshot import Snapshot
from megablend.index.tables.ranged_blocks import RangedBlocks, store_totals
from megablend.index.tables.sealed_numbers import ComputedNumbers

VERSION = 2
PART_DTYPE = np.dtype(
    [
        ("first_block", "<i8"),  # block numbers of the index
        ("stop_block", "<i8"),
        ("skip", "<i8"),  # tokens at the first block's start that belong to the previous split
        # tokens of the last block, counted from its start, that belong to this split
        ("keep", "<i8"),
        ("documents", "<i8"),  # number of documents
        ("tokens", "<i8"),  # number of tokens, end-of-document tokens included
        ("first_document", "<i8"),  # number of the first document in the source
    ]
)
"""A range of a source's documents that belongs to a split."""
_RANGE = ("first_block", "stop_block", "skip", "keep")
Border = tuple[int, int]
"""The position at which a document begins: the number of its block, and the number of tokens in
that block before the document."""


def parts_of(
    store: BlockStore, shares: Sequence[Fraction], *, keep: bool = False
) -> npt.NDArray[np.void]:
    """Return the splits of all sources of an index. They are read from the cache if a build stored
    them there, and computed otherwise.

    Args:
        keep: whether to store computed splits in the cache.

    Returns: PART_DTYPE [num_columns, len(shares)]; rows of extra columns are zeros.
    Raises: the same errors as `compute_split_ranges`; CacheError if the splits cannot be written.
    """
    snapshot = store.snapshot
    request = [VERSION, snapshot.digest, list(map(str, shares)), store.append_eod]
    stored = ComputedNumbers(snapshot.store.folder, snapshot.digest, request)
    shape = (len(snapshot.columns), len(shares))
    parts = stored.find(PART_DTYPE, shape[0] * shape[1])
    if parts is not None:
        return parts.reshape(shape)
    parts = np.zeros(shape, PART_DTYPE)
    for number in range(len(snapshot.sources)):
        parts[number] = compute_split_ranges(store, number, shares)
    if keep:
        stored.keep(parts)
    return parts


def compute_split_ranges(
    store: BlockStore, source: int, shares: Sequence[Fraction]
) -> npt.NDArray[np.void]:
    """Compute the splits of one source.

    Args:
        store: reads tokens with end-of-document tokens inserted.
        source: number of the source in the index.
        shares: share of each split; they sum to 1.

    Returns: PART_DTYPE [len(shares)].
    Raises: the same errors as BlockStore.read, for the boundary blocks.
    """
    entry = store.snapshot.sources[source]
    running = accumulate(shares, initial=Fraction(0))
    documents = [round(share * entry.rows) for share in running]
    borders = [find_document(store, source, document) for document in documents]
    return cut_documents(store, source, list(pairwise(documents)), list(pairwise(borders)))


def cut_documents(
    store: BlockStore,
    source: int,
    ranges: Sequence[tuple[int, int]],
    borders: Sequence[tuple[Border, Border]],
) -> npt.NDArray[np.void]:
    """Find the blocks that contain ranges of a source's documents.

    Args:
        ranges: the first document of each range, and the document after its last one.
        borders: the positions at which these two documents begin.

    Returns: PART_DTYPE [n].
    Raises: CacheError if the index is damaged.
    """
    has_eod = store.append_eod[source] is not None
    edges = [block for pair in borders for block, _ in pair]
    before = store.snapshot.count_tokens_before(edges, has_eod=has_eod).reshape(-1, 2).tolist()
    parts = np.zeros(len(ranges), PART_DTYPE)
    for i, (first, last) in enumerate(ranges):
        (block, skip), (stop, keep) = borders[i]
        before_first, before_stop = before[i]
        tokens = before_stop + keep - before_first - skip
        # A range without documents remains zeros
        if first == last:
            continue
        # Documents without tokens have no block
        if block == stop and keep == 0:
            parts[i] = (block, stop, 0, 0, last - first, 0, first)
            continue
        # The next range starts with a whole block, so this range ends with the whole previous block
        if keep == 0:
            if stop > block:
                before_last = store.snapshot.count_tokens_before([stop - 1], has_eod=has_eod)
                keep = before_stop - int(before_last[0])
            stop -= 1
        parts[i] = (block, stop + 1, skip, keep, last - first, tokens, first)
    return parts


def find_document(
    store: BlockStore, source: int, document: int, read: Callable[[int], DecodedBlock] | None = None
) -> Border:
    """Find the block in which a document of a source begins, and the number of tokens in that block
    before the document.

    Args:
        document: number of the document in the source, or the total number of documents to find the
            end of the source.
        read: a function that reads and decodes a block whose file may have moved; `store.read` by
            default.
    """
    snapshot = store.snapshot
    entry = store.snapshot.sources[source]
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


class SplitBlocks(RangedBlocks):
    """The blocks of a split of a source, as orders see them: numbered from 0, and clipped at the
    split's boundaries.

    Args:
        parts: PART_DTYPE [] for a single range of the source's documents, or [num_ranges] for
            several ranges, in order.
        has_eod: whether each document with tokens also has an end-of-document token.
    """

    def __init__(self, snapshot: Snapshot, parts: npt.NDArray[np.void], *, has_eod: bool) -> None:
        self.snapshot = snapshot
        self.has_eod = has_eod
        self.parts = np.atleast_1d(parts)
        firsts = self.parts["first_block"]
        super().__init__(
            firsts.astype(np.int64), self.parts["stop_block"] - firsts, self.parts["tokens"]
        )
        self.first_block = int(firsts[0])
        self._is_clipped = bool(self.parts["skip"].any())

    def before(self, blocks: Int64s) -> Int64s:
        """See RangedBlocks.before."""
        ranges = self._find_ranges(blocks)
        ids = self._firsts[ranges] + blocks - self._offsets[ranges]
        counts = self.snapshot.count_tokens_before(
            np.append(ids, self._firsts), has_eod=self.has_eod
        )
        # Number of tokens in the index before the first token of each range
        before_ranges = counts[len(blocks) :] + self.parts["skip"]
        in_range = counts[: len(blocks)] - before_ranges[ranges]
        is_first = blocks == self._offsets[ranges]
        tokens = self._tokens_before[ranges] + np.where(is_first, 0, in_range)
        return np.where(blocks < self.num_blocks, tokens, self.num_tokens)

    @property
    def documents(self) -> PartDocuments:
        """The split's documents. Raises: CacheError if the index has no document table."""
        source = int(self.snapshot.files.columns[self.snapshot.file_of([self.first_block])[0]])
        firsts = self.parts["first_document"].tolist()
        counts = self.parts["documents"].tolist()
        ranges = [range(first, first + count) for first, count in zip(firsts, counts, strict=True)]
        return PartDocuments(open_table(self.snapshot, source), ranges, has_eod=self.has_eod)

    def stored_position(self, block: int, token: int) -> int:
        """Return the position of a token among the split's stored tokens, given its block in the
        index and its position in that block. If the token comes before the split's first token in
        that block, return the position of that first token."""
        local = self.local_blocks(np.array([block]))
        before = int(self.before(local)[0])
        if int(local[0]) == self.num_blocks or int(self.index_blocks(local)[0]) != block:
            return before
        return before + max(0, token - int(self.clips(local)[0]))

    def clips(self, blocks: Int64s) -> Int64s:
        """Return how many stored tokens of each block precede the block's first token in this split
        (int64 [n]). Blocks are given by their local numbers (int64 [n])."""
        if not self._is_clipped:
            return np.zeros(len(blocks), np.int64)
        ranges = self._find_ranges(blocks)
        return np.where(blocks == self._offsets[ranges], self.parts["skip"][ranges], 0)

    def _stored_totals(self, num_groups: int, run: int) -> ComputedNumbers:
        ranges = self.parts[list(_RANGE)].tolist()
        parts = [*map(list, ranges), self.has_eod, num_groups, run]
        return store_totals(self.snapshot.store.folder, self.snapshot.digest, parts)
