"""Decode blocks of raw files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.errors import CHANGED_REMEDY, CorruptFileError
from megablend.formats.base import NO_OFFSETS, Array, DecodedBlock
from megablend.formats.raw.boundaries import Separator, find_offsets
from megablend.storage.ranges import FetchedRanges, FileRanges


@dataclass(frozen=True, slots=True, kw_only=True)
class RawReader:
    """A reader that decodes blocks of one raw file."""

    path: str
    size: int
    """Size of the file in bytes."""
    header_bytes: int
    dtype: str
    separator: Separator | None
    """The token that separates documents; None if the file is one document."""

    def byte_ranges(
        self,
        blocks: Array,
        chunks: Array,
        fetched: Sequence[FetchedRanges] = (),
        *,
        tokens: bool = True,
    ) -> list[FileRanges]:
        """Return the ranges of the blocks' tokens, or none if only documents are needed and the
        file is one document. See BlockReader.byte_ranges."""
        offsets, sizes = self._ranges(blocks)
        if fetched or not len(blocks) or not (tokens or self.separator is not None):
            return []
        return [FileRanges(self.path, offsets, sizes, np.arange(len(blocks)))]

    def decode(
        self, blocks: Array, chunks: Array, fetched: Sequence[FetchedRanges], *, pieces: bool = True
    ) -> list[DecodedBlock]:
        """See BlockReader.decode."""
        decoded = []
        for i, block in enumerate(blocks):
            tokens = self._tokens(fetched[0][i])
            offsets = NO_OFFSETS
            if pieces:
                offsets = find_offsets(self.path, block, self.separator, tokens)
            decoded.append(DecodedBlock(tokens, offsets))
        return decoded

    def find_pieces(
        self, blocks: Array, chunks: Array, fetched: Sequence[FetchedRanges]
    ) -> tuple[list[npt.NDArray[np.int64]], int]:
        """See BlockReader.find_pieces; tokens are needed if one of them separates documents."""
        if self.separator is None:
            return [find_offsets(self.path, block, self.separator, None) for block in blocks], 0
        offsets = [block.offsets for block in self.decode(blocks, chunks, fetched)]
        return offsets, int(blocks["stored_bytes"].sum())

    def _ranges(self, blocks: Array) -> tuple[Int64s, Int64s]:
        """Return the offsets and sizes of blocks in bytes: arrays of int64 [n]. Raises:
        CorruptFileError if a block is not within the file."""
        offsets = blocks["offset"].astype(np.int64)
        sizes = blocks["tokens"].astype(np.int64) * np.dtype(self.dtype).itemsize
        wrong = (
            (sizes != blocks["stored_bytes"])
            | (offsets < self.header_bytes)
            | (offsets + sizes > self.size)
        )
        if wrong.any():
            i = int(np.argmax(wrong))
            raise CorruptFileError(
                self.path,
                f"a block of {blocks['tokens'][i]} tokens ({blocks['stored_bytes'][i]} bytes) is outside the file, "
                f"which has {self.size} bytes; {CHANGED_REMEDY}",
                offset=int(offsets[i]),
            )
        return offsets, sizes

    def _tokens(self, data: Array) -> Array:
        """Convert bytes, uint8 [stored_bytes], to tokens [num_tokens], read-only. The bytes are
        copied if they are not aligned as tokens must be."""
        tokens: Array = np.require(
            data.view(np.dtype(self.dtype).newbyteorder("<")), requirements="A"
        )
        tokens.flags.writeable = False
        return tokens
