"""Decoded blocks under one roof: samples are gathered from them by kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from megablend.formats.decoded import DTYPES, DecodedBlocks, address_of
from megablend.kernels.reader.gather import gather_tokens, mark_documents
from megablend.order.base import Spans

Int64s = npt.NDArray[np.int64]

_LIKE = [np.empty(0, dtype) for dtype in DTYPES]


class BlockTable:
    """Places for blocks, which come and go.

    Args:
        ids: int64 [num_blocks], their numbers in the index, ascending.
    """

    def __init__(self, ids: Int64s) -> None:
        self.ids = ids
        self._owners: list[Any] = [None] * len(ids)
        self._offsets: list[Int64s | None] = [None] * len(ids)
        self._extra: list[BlockTable] = []  # the bits of each extra column's numbers, as if they were tokens
        self._kinds = np.zeros(len(ids), np.int8)
        self._sizes = np.full(len(ids), -1)  # a block that is not here has no token, not even token 0
        self._tokens, self._pieces, self._counts, self._bytes = (np.zeros(len(ids), np.int64) for _ in range(4))
        self._kinds_seen: set[int] = set()

    def put(self, places: Int64s, blocks: DecodedBlocks, sizes: Int64s) -> None:
        """Take blocks in.

        Args:
            places: int64 [n], where.
            sizes: int64 [n], bytes that they count as.
        """
        for place, owner in zip(places.tolist(), blocks.owners, strict=True):
            self._owners[place] = owner
        self._kinds_seen.update(set(blocks.kinds.tolist()))
        self._kinds[places], self._sizes[places], self._tokens[places] = blocks.kinds, blocks.sizes, blocks.tokens
        self._bytes[places] = sizes
        if blocks.offsets is not None:
            for place, offsets in zip(places.tolist(), blocks.offsets, strict=True):
                self._offsets[place] = offsets
            self._pieces[places] = [address_of(offsets) for offsets in blocks.offsets]
            self._counts[places] = [len(offsets) for offsets in blocks.offsets]
        for column, numbers in enumerate(blocks.extra):
            if column == len(self._extra):
                self._extra.append(BlockTable(self.ids))
            self._extra[column].put(places, numbers, np.zeros(len(places), np.int64))

    def drop(self, places: Int64s) -> int:
        """Let blocks go, which are here; returns the bytes that they counted as."""
        for place in places.tolist():
            self._owners[place] = self._offsets[place] = None
        for table in self._extra:
            table.drop(places)
        self._sizes[places] = -1
        self._counts[places] = 0
        return int(self._bytes[places].sum())

    def held(self) -> Int64s:
        """Places of the blocks that are here: int64 [...]."""
        return np.flatnonzero(self._sizes >= 0)

    def moved(self, ids: Int64s) -> BlockTable:
        """The blocks that are here, in a table of blocks `ids` int64 [...], ascending, which has them all."""
        table, held = BlockTable(ids), self.held()
        places = np.searchsorted(ids, self.ids[held])
        for old, new in zip(held.tolist(), places.tolist(), strict=True):
            table._owners[new], table._offsets[new] = self._owners[old], self._offsets[old]
        for name in ("_kinds", "_sizes", "_tokens", "_pieces", "_counts", "_bytes"):
            getattr(table, name)[places] = getattr(self, name)[held]
        table._kinds_seen = self._kinds_seen
        table._extra = [column.moved(ids) for column in self._extra]
        return table

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
