"""Which nodes keep a piece of a file: rendezvous hashing.

Each pair of a piece and a node has a number that looks random. The homes of a piece are the nodes
with the smallest numbers, the first home is the smallest. Nobody is asked, nothing is stored: every
node computes the same. If a node leaves, only its own pieces move, each to the next of its order;
if one comes, it takes an equal share of pieces from all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np

from megablend.arrays import Int64s, Uint32s, Uint64s
from megablend.mirror.disk.pages import PIECE_BLOCKS

MAX_NODES = 1 << 16
_PLACE = np.uint64(MAX_NODES - 1)
"""The lowest bits of a number are the node's place in the list, so that no two are equal."""
_TAKEN = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
_STEP = np.uint64(0x9E3779B97F4A7C15)
"""2**64 divided by the golden ratio, as in splitmix64: neighbouring pieces are far apart."""
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_SHIFTED = np.uint64(0x94D049BB133111EB << 16 & 0xFFFF_FFFF_FFFF_FFFF)
"""As _SECOND, but leaves the bits of the place zero."""
_MAX_PAIRS = 1 << 15
"""Pairs of a piece and a node that are computed at a time: their 512 KiB stay in a core's cache,
which makes it twice as fast as 8 MiB at a time."""
_FEW = 32
"""So many times the smallest is looked for; for more of them all are sorted."""


def list_id(nodes: Iterable[str]) -> str:
    """Of a list of names, in whatever order: nodes with the same one have the same list."""
    return _hash_text("\n".join(sorted(nodes))).hex()


def _hash_text(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=8).digest()


def _mix(values: Uint64s) -> Uint64s:
    """The last step of splitmix64: each bit depends on all bits."""
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    mixed: Uint64s = values ^ (values >> np.uint64(31))
    return mixed


class Homes:
    """The order of nodes for each piece.

    Args:
        nodes: names, sorted, 1 to MAX_NODES.
    """

    def __init__(self, nodes: Sequence[str]) -> None:
        self._names = nodes
        self._nodes = np.frombuffer(b"".join(map(_hash_text, nodes)), "<u8").astype(np.uint64)
        self._places = np.arange(len(nodes), dtype=np.uint64)

    def order_names(self, digest: str, piece: int, count: int) -> list[str]:
        """As `order`, the names for one piece."""
        places = self.order(digest, np.array([piece]), count)[0]
        return [self._names[place] for place in places.tolist()]

    def order(self, digest: str, pieces: Int64s, count: int) -> Int64s:
        """The first nodes of the order of some pieces of a file.

        Args:
            digest: of the file, hexadecimal.
            pieces: int64 [n].
            count: of nodes for each piece; fewer if there are fewer nodes.
        Returns: places in the list of nodes, int64 [n, count]; the first home is first.
        """
        order = np.empty((len(pieces), min(count, len(self._nodes))), np.int64)
        file = np.array([int(digest[:16], 16)], np.uint64)
        keys = _mix(file + (np.asarray(pieces).astype(np.uint64) + np.uint64(1)) * _STEP)
        portion = max(1, _MAX_PAIRS // len(self._nodes))
        buffer = np.empty((2, min(portion, len(pieces)), len(self._nodes)), np.uint64)
        for begin in range(0, len(pieces), portion):
            part = order[begin : begin + portion]
            numbers, shifted = buffer[:, : len(part)]
            # Keys and nodes are well mixed by themselves: half of what `_mix` does is enough.
            np.bitwise_xor(keys[begin : begin + portion, None], self._nodes, out=numbers)
            np.multiply(numbers, _FIRST, out=numbers)
            np.right_shift(numbers, np.uint64(32), out=shifted)
            np.bitwise_xor(numbers, shifted, out=numbers)
            np.multiply(numbers, _SHIFTED, out=numbers)
            np.bitwise_or(numbers, self._places, out=numbers)
            _find_smallest(numbers, part)
        return order

    def order_blocks(self, digest: str, blocks: Uint32s, count: int) -> Int64s:
        """As `order`, for the pieces that blocks of a file are in: int64 [blocks, count]."""
        pieces, which = np.unique(blocks // PIECE_BLOCKS, return_inverse=True)
        return self.order(digest, pieces.astype(np.int64), count)[which]


def _find_smallest(numbers: Uint64s, out: Int64s) -> None:
    """The places of the smallest numbers of each row, in ascending order.

    Args:
        numbers: uint64 [n, nodes]; not kept.
        out: int64 [n, count].
    """
    if out.shape[1] > _FEW:
        numbers.sort(axis=1)
        np.bitwise_and(numbers[:, : out.shape[1]], _PLACE, out=out, casting="unsafe")
        return
    rows = np.arange(len(out))
    # Of 1,000 nodes a minimum takes 0.2 us, a partition 8.
    for places in out.T:
        np.bitwise_and(numbers.min(axis=1), _PLACE, out=places, casting="unsafe")
        numbers[rows, places] = _TAKEN
