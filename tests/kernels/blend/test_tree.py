from fractions import Fraction
from itertools import pairwise
from math import floor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablend.blend.interleavings.lanes import Tree, build_tree
from megablend.kernels.blend.tree import (
    call_least_multiple,
    heavy_child_count,
    leaf_at,
    leaf_counts,
)
from tests import oracle
from tests.examples import examples

TOTALS = st.lists(st.integers(1, 12), min_size=1, max_size=12)
HUGE = 2**50 - 1


def arrays(totals: list[int]) -> Tree:
    return build_tree(np.array(totals, np.int64))


def depth(tree: Tree, rank: int) -> int:
    node = 0
    size = len(tree.sources)
    first = 0
    steps = 0
    while size > 1:
        width = int(tree.left_leaves[node])
        if rank < first + width:
            node = node + 1
            size = width
        else:
            node = node + width
            size = size - width
            first = first + width
        steps += 1
    return steps


@examples(300)
@given(st.integers(1, HUGE), st.data())
def test_handed_is_exact(whole: int, data: st.DataObject) -> None:
    part = data.draw(st.integers(0, whole))
    n = data.draw(st.integers(0, whole))
    assert heavy_child_count(n, part, whole) == floor(Fraction(n * part, whole) + Fraction(1, 2))


@pytest.mark.parametrize("whole", [1, 2, 3, 2**31, 2**49 + 1, HUGE - 1, HUGE])
def test_handed_is_exact_at_edges(whole: int) -> None:
    numbers = {0, 1, 2, whole // 3, whole // 2, whole // 2 + 1, whole - 2, whole - 1, whole}
    for n in numbers & set(range(whole + 1)) if whole < 9 else numbers:
        for part in numbers & set(range(whole + 1)) if whole < 9 else numbers:
            assert heavy_child_count(n, part, whole) == floor(
                Fraction(n * part, whole) + Fraction(1, 2)
            ), (n, part)


@examples(60)
@given(TOTALS)
def test_counts_equal_the_twin_at_every_prefix(totals: list[int]) -> None:
    tree = arrays(totals)
    twin = oracle.huffman(totals)
    assert tree.sources.tolist() == twin.sources
    for n in range(sum(totals) + 1):
        counts = tree.counts(n).tolist()
        assert dict(zip(twin.sources, counts, strict=True)) == oracle.prefix(twin, n)
        size = len(counts)
        for rank in range(size):
            found = leaf_counts(tree.left_leaves, tree.left_samples, sum(totals), n, rank)
            assert found == (sum(counts[:rank]), counts[rank])


@examples(40)
@given(TOTALS, st.data())
def test_leaf_at_lays_samples_out_by_leaf(totals: list[int], data: st.DataObject) -> None:
    tree = arrays(totals)
    total = sum(totals)
    start = data.draw(st.integers(0, total - 1))
    stop = data.draw(st.integers(start + 1, total))
    layout = np.repeat(np.arange(len(tree.sources)), tree.counts(stop) - tree.counts(start))
    for position, rank in enumerate(layout):
        assert leaf_at(tree.left_leaves, tree.left_samples, total, start, stop, position) == rank


@examples(40)
@given(TOTALS, st.integers(1, 9), st.data())
def test_first_multiple_is_the_least(totals: list[int], step: int, data: st.DataObject) -> None:
    tree = arrays(totals)
    total = sum(totals)
    rank = data.draw(st.integers(0, len(totals) - 1))
    count = data.draw(st.integers(1, int(tree.samples[rank])))
    found = call_least_multiple(
        tree.left_leaves, tree.left_samples, total, int(tree.samples[rank]), rank, count, step
    )
    assert tree.counts(min(found * step, total))[rank] >= count
    assert tree.counts((found - 1) * step)[rank] < count


def test_heavier_children_that_are_nodes_hold_two_thirds_at_most() -> None:
    def check(node: oracle.Node) -> None:
        if node.children is not None:
            for child in node.children:
                assert child.children is None or 3 * child.samples <= 2 * node.samples
                check(child)

    for totals in (
        [1, 14, 10, 11, 28, 50, 65, 111, 107, 251, 381],
        [1] * 100,
        [2**i for i in range(30)],
    ):
        check(oracle.huffman(totals))


def test_depth_of_the_steepest_tree() -> None:
    fibonacci = [1, 1]
    while sum(fibonacci) + fibonacci[-1] + fibonacci[-2] <= HUGE:
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    tree = arrays(fibonacci)
    assert max(depth(tree, rank) for rank in range(len(fibonacci))) == len(fibonacci) - 1 < 73
    assert tree.counts(HUGE // 3).sum() == HUGE // 3


def test_large_stages_are_exact() -> None:
    rng = np.random.default_rng(0)
    totals = [int(total) for total in rng.pareto(0.8, 2000) * 1e8 + 1]
    tree = arrays(totals)
    twin = oracle.huffman(totals)
    for n in rng.integers(0, sum(totals), 3).tolist():
        assert dict(zip(twin.sources, tree.counts(n).tolist(), strict=True)) == oracle.prefix(
            twin, n
        )


def test_sources_without_samples_are_left_out() -> None:
    tree = arrays([0, 5, 0, 7])
    assert sorted(tree.sources.tolist()) == [1, 3]
    assert tree.counts(12).sum() == 12


def test_counts_are_monotone() -> None:
    tree = arrays([1, 14, 10, 11, 28, 50, 65, 111, 107, 251, 381])
    prefixes = [tree.counts(n) for n in range(int(tree.samples.sum()) + 1)]
    assert all((after >= before).all() for before, after in pairwise(prefixes))
    assert (prefixes[-1] == tree.samples).all()
