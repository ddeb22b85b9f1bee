"""Splits by document: each split of a source is a range of blocks whose first and last are clipped at a document's end.

The boundaries are the same as Megatron's: of n documents, a split has round(lo * n) to round(hi * n) of the running shares.
Counting the tokens before a boundary document requires decoding its block, so splits are computed once, at build.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from megablend.blocks.block_store import BlockStore
from megablend.formats.base import STARTS_MID_DOCUMENT
from megablend.fs.atomic_write import replace_file, translate_os_errors
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


def parts_of(store: BlockStore, shares: Sequence[Fraction], *, keep: bool = False) -> npt.NDArray[np.void]:
    """The splits of all sources of an index, from `splits/` in the cache if a build stored them, otherwise computed.

    Args:
        keep: store them in the cache.

    Returns: PART_DTYPE [num_sources, len(shares)].
    Raises: as `cut` does; CacheError if they cannot be written.
    """
    generation = store.generation
    asked = json.dumps([VERSION, generation.digest, [str(share) for share in shares], store.column_eods])
    key = hashlib.blake2b(asked.encode(), digest_size=16).digest()
    path = splits(generation.cache) / f"{generation.digest}-{key.hex()}"
    shape = (len(generation.columns), len(shares))  # extra columns have rows of zeros
    with contextlib.suppress(OSError):
        data, checksum = (whole := path.read_bytes())[:-16], whole[-16:]
        if len(data) == shape[0] * shape[1] * PART_DTYPE.itemsize and _checksum(key, data) == checksum:
            return np.frombuffer(data, PART_DTYPE).reshape(shape)
    parts = np.zeros(shape, PART_DTYPE)
    for number in range(len(generation.sources)):
        parts[number] = compute_split_ranges(store, number, shares)
    if keep:
        with translate_os_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, parts.tobytes() + _checksum(key, parts.tobytes()))
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
    entry = store.generation.sources[source]
    eod = store.eods[source] is not None
    running = [sum(shares[:i], Fraction(0)) for i in range(len(shares) + 1)]
    documents = [round(share * entry.rows) for share in running]
    borders = [find_document(store, source, document) for document in documents]
    before = store.generation.count_tokens_before([block for block, _ in borders], eod=eod).tolist()
    parts = np.zeros(len(shares), PART_DTYPE)
    for i, ((block, skip), (stop, keep)) in enumerate(pairwise(borders)):
        tokens = before[i + 1] + keep - before[i] - skip
        if documents[i] == documents[i + 1]:
            continue  # no documents: an empty range
        if block == stop and keep == 0:  # documents without tokens have no block
            parts[i] = (block, stop, 0, 0, documents[i + 1] - documents[i], 0, documents[i])
            continue
        if keep == 0:
            if stop > block:  # otherwise its documents have no tokens, and so no blocks
                keep = before[i + 1] - int(store.generation.count_tokens_before([stop - 1], eod=eod)[0])
            stop -= 1
        parts[i] = (block, stop + 1, skip, keep, documents[i + 1] - documents[i], tokens, documents[i])
    return parts


def find_document(store: BlockStore, source: int, document: int) -> tuple[int, int]:
    """The block in which a document of the source begins, and the tokens in that block before it."""
    generation, entry = store.generation, store.generation.sources[source]
    if document == 0:
        return entry.blocks.start, 0
    if document == entry.rows:
        return entry.blocks.stop, 0
    row = generation.running("rows_before", [entry.blocks.start]) + document
    block = int(generation.find_blocks("rows_before", entry.blocks, row)[0])
    piece = int((row - generation.running("rows_before", [block]))[0])
    piece += bool(generation.blocks(np.array([block]))["flags"][0] & STARTS_MID_DOCUMENT)
    return block, int(store.read([block])[0].offsets[piece])


class SplitBlocks:
    """The blocks of a split as orders see them: numbered from 0, clipped at the split's boundaries."""

    def __init__(self, generation: Snapshot, part: npt.NDArray[np.void], *, eod: bool) -> None:
        self.generation = generation
        self.eod = eod
        self.first_block, self._stop, self._skip, self._keep = (int(part[f]) for f in PART_DTYPE.names[:4])  # type: ignore[index]
        self.num_blocks = self._stop - self.first_block
        self.num_tokens = int(part["tokens"])
        self._documents = range(int(part["first_document"]), int(part["first_document"] + part["documents"]))

    def before(self, blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Tokens of the local blocks before each of `blocks` int64 [n], which are from 0 to num_blocks: int64 [n]."""
        counts = self.generation.count_tokens_before(np.append(blocks, 0) + self.first_block, eod=self.eod)
        tokens = np.where(blocks < self.num_blocks, counts[:-1] - counts[-1] - self._skip, self.num_tokens)
        return np.where(blocks > 0, tokens, 0)

    def group_totals(self, num_groups: int, run: int) -> npt.NDArray[np.int64]:
        """Tokens of each group, [num_groups]; block b is of group b // run % num_groups. Loaded from the cache if stored."""
        kept = load_group_totals(self.generation.cache, self._named(num_groups, run), num_groups)
        return count(self.before, self.num_blocks, num_groups, run) if kept is None else kept

    def keep_group_totals(self, num_groups: int, run: int) -> None:
        """Store the result of `group_totals` in the cache. Raises CacheError."""
        named = self._named(num_groups, run)
        if load_group_totals(self.generation.cache, named, num_groups) is None:
            save_group_totals(self.generation.cache, named, count(self.before, self.num_blocks, num_groups, run))

    @property
    def documents(self) -> PartDocuments:
        """The split's documents. Raises: CacheError if the index has no document table."""
        source = int(self.generation.file_columns[self.generation.file_of([self.first_block])[0]])
        return PartDocuments(open_table(self.generation, source), self._documents, eod=self.eod)

    def stored_position(self, block: int, token: int) -> int:
        """The position of a token of an index block among the split's stored tokens, clipped to the split's range."""
        local = min(max(block - self.first_block, 0), self.num_blocks)
        if local != block - self.first_block or local == self.num_blocks:
            return int(self.before(np.array([local]))[0])
        return int(self.before(np.array([local]))[0]) + token - (self._skip if local == 0 else 0)

    def clips(self, blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Stored tokens of local blocks before their first token of this split: int64 [n]."""
        return np.where(blocks == 0, self._skip, 0)

    def _named(self, num_groups: int, run: int) -> list[object]:
        part = [self.first_block, self._stop, self._skip, self._keep]
        return [self.generation.digest, part, self.eod, num_groups, run]
