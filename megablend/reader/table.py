"""Decoded blocks under one roof: samples are gathered from them by kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megablend.formats.base import NO_PIECES, DecodedBlock
from megablend.kernels.gather import gather_tokens, mark_documents
from megablend.order.base import Spans

Int64s = npt.NDArray[np.int64]

_LIKE = [np.empty(0, name) for name in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64")]
_KINDS = {like.dtype: kind for kind, like in enumerate(_LIKE)}


class Entries(NamedTuple):
    """Blocks, and what kernels need to know of each: [n]."""

    blocks: list[DecodedBlock]
    kinds: npt.NDArray[np.int8]
    """Numbers of their types."""
    sizes: Int64s
    """Tokens."""
    tokens: Int64s
    """Addresses of their tokens."""
    pieces: Int64s
    """Addresses of their offsets."""
    counts: Int64s
    """How many offsets."""
    extra: tuple[Entries, ...] = ()
    """The bits of each extra column's numbers, as if they were tokens."""


def entries(blocks: list[DecodedBlock]) -> Entries:
    """What a table takes in; the blocks' arrays are contiguous."""
    columns = zip(*(block.extra for block in blocks), strict=True)
    return Entries(
        blocks,
        np.array([_KINDS[block.tokens.dtype] for block in blocks], np.int8),
        np.array([len(block.tokens) for block in blocks], np.int64),
        np.array([_address(block.tokens) for block in blocks], np.int64),
        np.array([_address(block.offsets) for block in blocks], np.int64),
        np.array([len(block.offsets) for block in blocks], np.int64),
        tuple(
            entries([DecodedBlock(each.view(f"i{each.itemsize}"), NO_PIECES) for each in column]) for column in columns
        ),
    )


class BlockTable:
    """Places for blocks, which come and go.

    Args:
        ids: int64 [num_blocks], their numbers in the index.
    """

    def __init__(self, ids: Int64s) -> None:
        self.ids = ids
        self._blocks: list[DecodedBlock | None] = [None] * len(ids)
        self._extra: list[BlockTable] = []  # the bits of each extra column's numbers, as if they were tokens
        self._kinds = np.zeros(len(ids), np.int8)
        self._sizes = np.full(len(ids), -1)  # a block that is not here has no token, not even token 0
        self._tokens, self._pieces, self._counts = (np.zeros(len(ids), np.int64) for _ in range(3))
        self._kinds_seen: set[int] = set()

    def put(self, places: Sequence[int], entries: Entries) -> None:
        """Take blocks in."""
        for place, block in zip(places, entries.blocks, strict=True):
            self._blocks[place] = block
        where = np.array(places, np.int64)
        self._kinds_seen.update(np.unique(entries.kinds).tolist())
        self._kinds[where], self._sizes[where], self._tokens[where] = entries.kinds, entries.sizes, entries.tokens
        self._pieces[where], self._counts[where] = entries.pieces, entries.counts
        for column, numbers in enumerate(entries.extra):
            if column == len(self._extra):
                self._extra.append(BlockTable(self.ids))
            self._extra[column].put(places, numbers)

    def drop(self, places: Sequence[int]) -> None:
        """Let blocks go."""
        for place in places:
            self._blocks[place] = None
        for table in self._extra:
            table.drop(places)
        self._sizes[places] = -1
        self._counts[places] = 0

    def gather(self, places: Int64s, spans: Spans, width: int, tokens: Int64s, labels: Int64s) -> None:
        """Tokens of samples.

        Args:
            places: int64 [m], in which place of the table each stretch lies.
            spans: the samples' stretches [m].
            width: tokens of a sample.
            tokens, labels: int64 [n, length], filled as far as samples go: their tokens, and those from the second on.
        """
        for kind in self._kinds_seen:
            columns = self._kinds, self._tokens, self._sizes, places, spans.starts, spans.stops
            wrong = gather_tokens(_LIKE[kind], kind, *columns, width, tokens, labels)
            assert wrong < 0, f"stretch {wrong} of {len(places)} is outside of its block or sample"

    def gather_extra(
        self, column: int, dtype: np.dtype[Any], places: Int64s, spans: Spans, shape: tuple[int, int]
    ) -> npt.NDArray[Any]:
        """An extra column's numbers of samples: [n, tokens of a sample], of `dtype`.

        Args:
            column: which of them.
            places, spans: as of `gather`.
            shape: samples, tokens of a sample.
        """
        bits, beside = np.zeros(shape, np.int64), np.empty(shape, np.int64)
        self._extra[column].gather(places, spans, shape[1], bits, beside)
        return bits.astype(f"i{dtype.itemsize}").view(dtype)

    def begins(
        self, places: Int64s, spans: Spans, num_tokens: int, width: int, continues: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.bool_]:
        """Whether a document, or a sample, begins at each token.

        Args:
            places, spans: as of `gather`.
            width: tokens of a sample.
            continues: bool [num_blocks], whether a block's first piece goes on with the document of the block before.

        Returns: bool [num_tokens].
        """
        out = np.zeros(num_tokens, np.bool_)
        blocks = self.ids, continues, self._pieces, self._counts
        wrong = mark_documents(*blocks, places, spans.epochs, spans.starts, spans.stops, width, out)
        assert wrong < 0, f"stretch {wrong} of {len(places)} is outside of its block"
        return out


def _address(array: npt.NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
