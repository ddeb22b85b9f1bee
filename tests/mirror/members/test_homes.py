"""Homes: the same everywhere, balanced, and moving no more than they must."""

import hashlib

import numpy as np
import pytest

from megablend.mirror.members.homes import Homes, list_id

DIGEST = "0123456789abcdef0123456789abcdef"
M = 1 << 64


def naive_order(nodes: list[str], digest: str, piece: int) -> list[int]:
    """One pair at a time, in Python's integers."""
    key = (int(digest[:16], 16) + (piece + 1) * 0x9E3779B97F4A7C15) % M
    key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 % M
    key = (key ^ key >> 27) * 0x94D049BB133111EB % M
    key ^= key >> 31
    numbers = []
    for place, name in enumerate(nodes):
        node = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
        number = (key ^ node) * 0xBF58476D1CE4E5B9 % M
        number = (number ^ number >> 32) * 0x94D049BB133111EB % 2**48
        numbers.append((number, place))
    return [place for _, place in sorted(numbers)]


@pytest.mark.parametrize("size", [1, 2, 7, 64])
@pytest.mark.parametrize("count", [1, 3, 33, 100])
def test_the_order_is_that_of_the_naive_twin(size: int, count: int) -> None:
    nodes = sorted(f"node{i}:7171" for i in range(size))
    pieces = np.array([0, 1, 2, 77, 2**31, 2**40])
    order = Homes(nodes).order(DIGEST, pieces, count)
    assert order.shape == (len(pieces), min(count, size))
    for row, piece in zip(order, pieces.tolist(), strict=True):
        assert row.tolist() == naive_order(nodes, DIGEST, piece)[:count]


def test_the_order_never_changes() -> None:
    """Nodes of different releases must agree."""
    nodes = [f"n{i}:7171" for i in range(5)]
    assert Homes(nodes).order(DIGEST, np.arange(4), 5).tolist() == [
        naive_order(nodes, DIGEST, piece) for piece in range(4)
    ]
    text = Homes(nodes).order(DIGEST, np.arange(1000), 5).astype("<u1").tobytes()
    assert hashlib.sha256(text).hexdigest()[:16] == GOLDEN


GOLDEN = "39de5cfb3cf18d84"


def test_many_pieces_are_computed_in_portions() -> None:
    nodes = sorted(f"node{i}:7171" for i in range(1000))
    homes = Homes(nodes)
    pieces = np.arange(3000)
    whole = homes.order(DIGEST, pieces, 3)
    again = np.concatenate([homes.order(DIGEST, part, 3) for part in np.split(pieces, 30)])
    assert np.array_equal(whole, again)


def test_a_thousand_nodes_have_equal_shares() -> None:
    """The most loaded of 1,000 has no more than chance gives: 200 pieces on average, and six
    standard deviations more are not reached once in a million such tests."""
    homes = Homes(sorted(f"node{i}:7171" for i in range(1000)))
    order = homes.order(DIGEST, np.arange(200_000), 2)
    for rank in range(2):
        counts = np.bincount(order[:, rank], minlength=1000)
        assert abs(counts - 200).max() < 6 * 200**0.5
    # Second homes of one node's pieces are spread over all others
    seconds = np.bincount(order[order[:, 0] == order[0, 0], 1], minlength=1000)
    assert seconds.max() <= 5


def test_a_death_moves_only_the_dead_nodes_pieces() -> None:
    nodes = np.array(sorted(f"node{i}:7171" for i in range(1000)))
    pieces = np.arange(20_000)
    before = nodes[Homes(nodes.tolist()).order(DIGEST, pieces, 3)]
    dead = before[0, 0]
    left = nodes[nodes != dead]
    after = left[Homes(left.tolist()).order(DIGEST, pieces, 2)]
    for row, others in zip(before, after, strict=True):
        assert others.tolist() == [name for name in row if name != dead][:2]


def test_files_are_spread_apart() -> None:
    """First pieces of small files do not all have one home."""
    homes = Homes([f"n{i}:1" for i in range(8)])
    digests = [hashlib.sha256(bytes([i])).hexdigest()[:32] for i in range(200)]
    firsts = [int(homes.order(digest, np.zeros(1, np.int64), 1)[0, 0]) for digest in digests]
    assert np.bincount(firsts, minlength=8).min() >= 8


def test_nodes_with_the_same_list_have_the_same_id() -> None:
    names = ["b:1", "a:1", "c:1"]
    text = hashlib.blake2b(b"a:1\nb:1\nc:1", digest_size=8).hexdigest()
    assert list_id(names) == list_id(reversed(names)) == text
    others = [names[:2], [*names, "d:1"], ["b:1", "a:1", "c:2"]]
    assert len({list_id(each) for each in [names, *others]}) == 4
