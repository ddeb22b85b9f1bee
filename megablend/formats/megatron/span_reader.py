"""Spans of whole sequences of a `.bin` as blocks; the lengths of their sequences come from the
`.idx`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.errors import CHANGED_REMEDY, CorruptFileError
from megablend.formats.base import Array, DecodedBlock
from megablend.formats.megatron.lengths import LengthReader
from megablend.storage.base import Bytes
from megablend.storage.ranges import FetchedRanges, FileRanges

_EMPTY = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronReader:
    """Decodes blocks of one `.bin`."""

    data_path: str
    bin_bytes: int
    """Size of the `.bin`."""
    idx_path: str
    token_dtype: str
    lengths: LengthReader

    def byte_ranges(
        self,
        blocks: Array,
        chunks: Array,
        fetched: Sequence[FetchedRanges] = (),
        *,
        tokens: bool = True,
    ) -> list[FileRanges]:
        """Lengths in the `.idx`, and spans of the `.bin`; see BlockReader.byte_ranges."""
        if fetched or not len(blocks):
            return []
        self._check_rows(blocks)
        firsts = blocks["first_row"].astype(np.int64)
        counts = blocks["rows"].astype(np.int64)
        wanted = blocks["tokens"] > 0  # in the others all lengths are 0
        found = [
            FileRanges(self.idx_path, *self.lengths.byte_ranges(firsts[wanted], counts[wanted]))
        ]
        if tokens:
            offsets = blocks["offset"][wanted].astype(np.int64)
            sizes = blocks["tokens"][wanted] * np.dtype(self.token_dtype).itemsize
            self._check_span(offsets, sizes)
            found.append(FileRanges(self.data_path, offsets, sizes, np.arange(len(offsets))))
        return found if wanted.any() else []

    def decode(
        self, blocks: Array, chunks: Array, fetched: Sequence[FetchedRanges], *, pieces: bool = True
    ) -> list[DecodedBlock]:
        """See BlockReader.decode."""
        offsets, _ = self.find_pieces(blocks, chunks, fetched)
        dtype = np.dtype(self.token_dtype).newbyteorder("<")
        found = []
        place = 0
        for num_tokens, places in zip(blocks["tokens"].tolist(), offsets, strict=True):
            data: Bytes = _EMPTY
            if num_tokens:
                data = fetched[1][place]
                place += 1
            data.setflags(write=False)
            found.append(DecodedBlock(data.view(dtype), places))
        return found

    def find_pieces(
        self, blocks: Array, chunks: Array, fetched: Sequence[FetchedRanges]
    ) -> tuple[list[npt.NDArray[np.int64]], int]:
        """See BlockReader.find_pieces; reads the `.idx` only."""
        found = []
        place = 0
        columns = (blocks[name].tolist() for name in ("first_row", "rows", "tokens"))
        for block, first, count, num_tokens in zip(blocks, *columns, strict=True):
            offsets = np.zeros(count + 1, np.int64)
            if num_tokens:
                begin = int(fetched[0].ranges.offsets[place])
                data = fetched[0][place]
                self.lengths.decode(begin, data, first, count).cumsum(out=offsets[1:])
                self._check_tokens(block, int(offsets[-1]))
                place += 1
            found.append(offsets)
        return found, 0

    def _check_rows(self, blocks: Array) -> None:
        """Check that the `.idx` contains the blocks' sequences. Raises: CorruptFileError."""
        first = blocks["first_row"]
        rows = blocks["rows"]
        there = self.lengths.num_sequences
        for i in np.flatnonzero(
            (blocks["tokens"] > 0) & ((first < 0) | (rows < 0) | (first + rows > there))
        ):
            raise CorruptFileError(
                self.data_path,
                f"block of {rows[i]} sequences from {first[i]} on, but {self.idx_path} has {there} in total; "
                f"{CHANGED_REMEDY}",
                offset=int(blocks["offset"][i]),
            )

    def _check_span(self, offsets: Int64s, sizes: Int64s) -> None:
        """Check that the blocks are within the `.bin` as it was indexed. Raises:
        CorruptFileError."""
        for i in np.flatnonzero((offsets < 0) | (offsets + sizes > self.bin_bytes)):
            raise CorruptFileError(
                self.data_path,
                f"block of {sizes[i]} bytes ends after the end of the file ({self.bin_bytes} bytes); {CHANGED_REMEDY}",
                offset=int(offsets[i]),
            )

    def _check_tokens(self, block: np.void, found: int) -> None:
        if found != block["tokens"]:
            raise CorruptFileError(
                self.data_path,
                f"block of {block['rows']} sequences and {block['tokens']} tokens, but by {self.idx_path} these sequences have "
                f"{found}; {CHANGED_REMEDY}",
                offset=int(block["offset"]),
            )
