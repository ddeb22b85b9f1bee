"""Blocks that are being read: the bytes to fetch, file by file, and decoding them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megablend.arrays import Int64s
from megablend.blocks.extra_columns import ExtraColumn
from megablend.blocks.open_files import OpenedReader
from megablend.formats.decoded import DecodedBlocks
from megablend.formats.fetch import FileRead


@dataclass(frozen=True, slots=True, eq=False)
class FilePart:
    """The blocks of a read that are in one file."""

    places: Int64s
    """int64 [n], their positions among the requested blocks."""
    ids: Int64s
    """int64 [n], block numbers in the index."""
    opened: OpenedReader
    columns: tuple[ExtraColumn, ...] | None
    """Extra columns to read with the tokens; None if there are none."""
    file: FileRead


@dataclass(frozen=True, slots=True, eq=False)
class BlockRead:
    """Blocks whose files are open. When everything that `files` need was fetched (see `formats.fetch`), they can be decoded."""

    parts: Sequence[FilePart]
    finish: Callable[[FilePart], DecodedBlocks]
    """Decodes a part, and adds end-of-document tokens and extra columns."""

    @property
    def files(self) -> list[FileRead]:
        """The reads to fetch."""
        return [part.file for part in self.parts]

    @property
    def reads_more(self) -> bool:
        """Whether `decode` itself reads: extra columns, whose blocks are only known after decoding the tokens."""
        return any(part.columns is not None for part in self.parts)

    def decode(self) -> DecodedBlocks:
        """Decode the blocks, in the requested order. Raises as BlockStore.read does."""
        found = DecodedBlocks.joined([self.finish(part) for part in self.parts])
        if len(self.parts) < 2:
            return found
        return found.taken(np.argsort(np.concatenate([part.places for part in self.parts])))
