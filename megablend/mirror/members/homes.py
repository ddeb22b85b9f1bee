"""Finds the nodes that keep a piece of a file, by rendezvous hashing.

Each pair of a piece and a node has a number that looks random. The nodes with the smallest numbers
are the homes of a piece, beginning with the smallest. Nothing is requested or stored: every node
computes the same numbers. If a node leaves, only the pieces that it kept move to other nodes, each
to the next node in the piece's order. If a node joins, it takes an equal share of pieces from all
other nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np

from megablend.arrays import Bools, Int64s, Uint32s, Uint64s
from megablend.mirror.disk.pages import PIECE_BLOCKS

MAX_NODES = 1 << 16
_PLACE_BITS = np.uint64(MAX_NODES - 1)
"""A mask of the lowest bits of a number. They contain the node's place in the list of nodes, so
that no two numbers of a piece are equal."""
_TAKEN = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
"""The value that replaces a number that has been found, so that it is not found again."""
_STEP = np.uint64(0x9E3779B97F4A7C15)
"""2**64 divided by the golden ratio, as in splitmix64: it keeps neighbouring pieces far apart."""
_MIX_FACTOR_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_FACTOR_2 = np.uint64(0x94D049BB133111EB)
_MIX_FACTOR_2_HIGH = np.uint64(0x94D049BB133111EB << 16 & 0xFFFF_FFFF_FFFF_FFFF)
"""_MIX_FACTOR_2 shifted by 16 bits, so that products have zeros in the bits of the place."""
_MAX_PAIRS = 1 << 15
"""The number of pairs of a piece and a node that are computed at a time. They take 512 KiB, which
fits into a core's cache. This is twice as fast as 8 MiB at a time."""
_PIECES_AT_A_TIME = 1 << 20
_MAX_MINIMUMS = 32
"""The maximum number of nodes per piece that are found by repeated searches for the minimum. More
are found by sorting."""


def list_id(nodes: Iterable[str]) -> str:
    """Return a digest of a list of nodes as a hex string, which does not depend on their order."""
    return _hash_text("\n".join(sorted(nodes))).hex()


def _hash_text(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=8).digest()


def _mix(values: Uint64s) -> Uint64s:
    """Apply the last step of splitmix64, after which each bit depends on all bits."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_FACTOR_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_FACTOR_2
    mixed: Uint64s = values ^ (values >> np.uint64(31))
    return mixed


class Homes:
    """The order of all nodes for each piece. The first nodes of the order keep the piece.

    Args:
        nodes: the sorted names of all nodes, 1 to MAX_NODES.
    """

    def __init__(self, nodes: Sequence[str]) -> None:
        self._names = nodes
        self._nodes = np.frombuffer(b"".join(map(_hash_text, nodes)), "<u8").astype(np.uint64)
        self._places = np.arange(len(nodes), dtype=np.uint64)

    def order_names(self, digest: str, piece: int, count: int) -> list[str]:
        """Return the names of the first `count` nodes in the order of a piece: see `order`."""
        indices = self.order(digest, np.array([piece]), count)[0]
        return [self._names[index] for index in indices.tolist()]

    def order(self, digest: str, pieces: Int64s | Uint32s, count: int) -> Int64s:
        """Return the nodes that are to hold each of the given pieces of a file.

        Args:
            digest: the digest of the file, a hex string.
            pieces: the numbers of the pieces (integers [n]).
            count: the number of nodes to return for each piece, or all nodes if there are fewer.

        Returns: indices into the list of nodes, in order of preference, so that the first of each
            piece is its home (int64 [n, count]).
        """
        ids = np.full(len(pieces), int(digest[:16], 16), np.uint64)
        return self._order(ids, pieces, count)

    def order_blocks(self, digest: str, blocks: Uint32s, count: int) -> Int64s:
        """Return the first nodes in the order of each block's piece: see `order`. This is fastest
        if the blocks of a piece follow one another. Returns: int64 [blocks, count]."""
        pieces = blocks // PIECE_BLOCKS
        is_first = np.ones(len(blocks), np.bool_)
        is_first[1:] = pieces[1:] != pieces[:-1]
        order = self.order(digest, pieces[is_first], count)
        repeated: Int64s = order[np.cumsum(is_first) - 1]
        return repeated

    def find_own(self, node: str, ids: Uint64s, pieces: Uint32s, count: int) -> Bools:
        """Return whether a node is one of the first `count` nodes in the order of each piece.

        Args:
            node: the name of the node.
            ids: the first eight bytes of the digest of each piece's file, as a number (uint64 [n]).
            pieces: the numbers of the pieces (uint32 [n]).

        Returns: bool [n].
        """
        index = self._names.index(node)
        is_own = np.empty(len(pieces), np.bool_)
        for begin in range(0, len(pieces), _PIECES_AT_A_TIME):
            some = slice(begin, begin + _PIECES_AT_A_TIME)
            is_own[some] = (self._order(ids[some], pieces[some], count) == index).any(axis=1)
        return is_own

    def _order(self, ids: Uint64s, pieces: Int64s | Uint32s, count: int) -> Int64s:
        """Return the same nodes as `order`, for pieces of several files. `find_own` describes
        `ids`."""
        order = np.empty((len(pieces), min(count, len(self._nodes))), np.int64)
        keys = _mix(ids + (pieces.astype(np.uint64) + np.uint64(1)) * _STEP)
        portion = max(1, _MAX_PAIRS // len(self._nodes))
        buffer = np.empty((2, min(portion, len(pieces)), len(self._nodes)), np.uint64)
        for begin in range(0, len(pieces), portion):
            part = order[begin : begin + portion]
            numbers, shifted = buffer[:, : len(part)]
            # Keys and hashes of nodes are random numbers already, so half of `_mix` is enough
            np.bitwise_xor(keys[begin : begin + portion, None], self._nodes, out=numbers)
            np.multiply(numbers, _MIX_FACTOR_1, out=numbers)
            np.right_shift(numbers, np.uint64(32), out=shifted)
            np.bitwise_xor(numbers, shifted, out=numbers)
            np.multiply(numbers, _MIX_FACTOR_2_HIGH, out=numbers)
            np.bitwise_or(numbers, self._places, out=numbers)
            _find_smallest(numbers, part)
        return order


def _find_smallest(numbers: Uint64s, out: Int64s) -> None:
    """Find the indices of the smallest numbers in each row, in ascending order of the numbers.

    Args:
        numbers: a row for each piece (uint64 [n, nodes]). It is overwritten.
        out: receives the indices (int64 [n, count]).
    """
    if out.shape[1] > _MAX_MINIMUMS:
        numbers.sort(axis=1)
        np.bitwise_and(numbers[:, : out.shape[1]], _PLACE_BITS, out=out, casting="unsafe")
        return
    rows = np.arange(len(out))
    # For 1,000 nodes a minimum takes 0.2 us, a partition 8 us
    for column in out.T:
        np.bitwise_and(numbers.min(axis=1), _PLACE_BITS, out=column, casting="unsafe")
        numbers[rows, column] = _TAKEN
