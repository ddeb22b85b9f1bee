"""Assigns pieces of files to the nodes of a view that must hold them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from megablend.mirror.disk.folder import FileKey
from megablend.mirror.disk.room import Need
from megablend.mirror.members.homes import Homes

_MAX_ORDERS = 4096
"""The maximum number of pieces whose order of nodes is cached. A piece is requested in many parts,
and each request needs its order."""


class Placement:
    """The assignment of pieces to the nodes of a view, as used by one of these nodes.

    Args:
        names: the names of all nodes, sorted.
        own: this node's name.
        copies: the number of nodes that must hold each page.
    """

    def __init__(self, names: Sequence[str], own: str, copies: int) -> None:
        self._names = names
        self.own = own
        self.copies = min(copies, len(names))
        self._homes = Homes(names)
        self._ordered = lru_cache(_MAX_ORDERS)(self._homes.order_names)

    def order(self, key: FileKey, piece: int, count: int) -> list[str]:
        """Return the first `count` nodes in the order of a piece (see Homes). The first one is its
        home."""
        return self._ordered(key.digest, piece, count)

    def divide(
        self, needs: Iterable[Need], names: Iterable[str], count: int
    ) -> dict[str, list[Need]]:
        """Divide the pages of needs by node. A node gets the pages of a piece if it is among the
        first `count` nodes in the order of the piece.

        Returns: the pages of each node in `names`, by name.
        """
        parts: dict[str, list[Need]] = {name: [] for name in names}
        for need in needs:
            # order: (blocks of the need, nodes), as indices into the names
            order = self._homes.order_blocks(need.key.digest, need.pages.blocks, count)
            for index in np.unique(order).tolist():
                name = self._names[index]
                if name in parts:
                    parts[name].append(need.at((order == index).any(axis=1)))
        return parts

    def select_own(self, needs: Iterable[Need]) -> list[Need]:
        """Return the pages of needs that this node must hold."""
        return self.divide(needs, [self.own], self.copies)[self.own]
