"""Blocks on their way from their files: what is to be fetched, file by file, and what it is decoded to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megablend.blocks.extra_columns import ExtraColumn
from megablend.blocks.open_files import OpenedReader
from megablend.formats.decoded import DecodedBlocks
from megablend.formats.fetch import FileRead
from megablend.storage.base import Int64s


@dataclass(frozen=True, slots=True, eq=False)
class FilePart:
    """Those blocks of a read that are in one file."""

    places: Int64s
    """int64 [n], which of the blocks asked for they are."""
    ids: Int64s
    """int64 [n], numbers in the index."""
    opened: OpenedReader
    columns: tuple[ExtraColumn, ...] | None
    """To be read along with the tokens; None for none."""
    file: FileRead


@dataclass(frozen=True, slots=True, eq=False)
class BlockRead:
    """Blocks whose files are open. When all that `files` ask for was fetched (see `formats.fetch`), they can be decoded."""

    parts: Sequence[FilePart]
    finish: Callable[[FilePart], DecodedBlocks]
    """Decodes a part, and adds what belongs to its blocks."""

    @property
    def files(self) -> list[FileRead]:
        """What is to be fetched."""
        return [part.file for part in self.parts]

    @property
    def reads_more(self) -> bool:
        """Whether `decode` reads by itself: extra columns, of which it finds out by decoding which blocks it needs."""
        return any(part.columns is not None for part in self.parts)

    def decode(self) -> DecodedBlocks:
        """The blocks, in the order in which they were asked for. Raises as BlockStore.read does."""
        found = DecodedBlocks.joined([self.finish(part) for part in self.parts])
        if len(self.parts) < 2:
            return found
        return found.taken(np.argsort(np.concatenate([part.places for part in self.parts])))
