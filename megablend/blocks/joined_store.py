"""Blocks of several snapshots of a run, numbered as in their JoinedSnapshot."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from megablend.blocks.block_store import BlockStore
from megablend.blocks.extra_columns import ExtraColumn
from megablend.index.joined_snapshot import JoinedSnapshot
from megablend.index.source_entry import SourceEntry
from megablend.storage.base import Storage


class JoinedStore(BlockStore):
    """Reads blocks of all snapshots of a run; `stores` are those of each."""

    def __init__(
        self,
        stores: Sequence[BlockStore],
        extra: Mapping[str, tuple[ExtraColumn, ...]],
        roots: Mapping[str, str],
        *,
        storage: Storage,
    ) -> None:
        """Args: extra, roots: by the names that the sources have in the JoinedSnapshot; columns as `stores` have them."""
        self._stores = tuple(stores)
        snapshot = JoinedSnapshot([store.snapshot for store in stores])
        eods = [eod for store in stores for eod in store.eods]
        moved = {
            source.name: tuple(_move(column, source) for column in extra[source.name])
            for source in snapshot.sources
            if source.name in extra
        }
        super().__init__(snapshot, eods, roots, moved, stores[-1].extra_bytes, storage=storage)

    @property
    def stores(self) -> tuple[BlockStore, ...]:
        """The blocks of each snapshot."""
        return self._stores

    @property
    def first_blocks(self) -> tuple[int, ...]:
        """Numbers here of the first block of each of `stores`."""
        assert isinstance(self.snapshot, JoinedSnapshot)
        return tuple(self.snapshot.first_blocks[:-1].tolist())

    def __getstate__(self) -> dict[str, Any]:
        return {"stores": self._stores, "extra": self.extra, "roots": self.roots, "storage": self.storage}


def _move(column: ExtraColumn, source: SourceEntry) -> ExtraColumn:
    """An extra column as the JoinedSnapshot has it."""
    entry = source.find_extra(column.column)
    assert entry is not None, column.column
    return dataclasses.replace(column, entry=entry)
