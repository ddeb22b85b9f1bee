"""A tree that counts how many of the first n samples of a stage belong to each source: exactly, for
any n, in O(depth).

The sources' totals are put in a Huffman tree. A node divides its first n samples between its two
children: the heavier child gets floor(n * N_heavy / N_node + 1/2) of them, the lighter child the
rest. Counts are monotone in n, sum to n, are exact at the end, and stay within 2 of n * N_d / N,
because a heavier child that is itself a node holds at most 2/3 of its parent, so that errors fade
on the way down.

A tree of `size` leaves is two arrays, its inner nodes in preorder, heavier child first:
`left_leaves` (leaves below the heavier child) and `left_samples` (samples there). The heavier child
of node i is i + 1 and the lighter i + left_leaves[i]; leaves are numbered from left to right, their
*rank*. Totals stay below 2^50.
"""

from __future__ import annotations

import numpy as np

from megablend.arrays import Int32s, Int64s
from megablend.jit import device, kernel


@kernel
def huffman(totals: Int64s, left_leaves: Int32s, left_samples: Int64s, leaves: Int32s) -> None:
    """Build the tree of `totals`: int64 [size >= 1], positive, ascending, sum below 2^50.

    Fills left_leaves int32 [size] and left_samples int64 [size] (last entries unused), and leaves
    int32 [size]: the index in `totals` of the leaf of each rank. Two queues (van Leeuwen 1976):
    ascending leaves, and nodes in order of creation, which ascend too.
    """
    size = len(totals)
    num_nodes = 2 * size - 1  # leaves first, then inner nodes in order of creation
    weight = np.empty(num_nodes, np.int64)
    width = np.ones(num_nodes, np.int64)
    children = np.empty((num_nodes, 2), np.int64)  # heavier, lighter
    weight[:size] = totals
    leaf = 0
    inner = size
    for node in range(size, num_nodes):
        for side in (1, 0):
            if leaf < size and (inner == node or weight[leaf] <= weight[inner]):
                children[node, side] = leaf
                leaf += 1
            else:
                children[node, side] = inner
                inner += 1
        heavy, light = children[node]
        weight[node] = weight[heavy] + weight[light]
        width[node] = width[heavy] + width[light]

    row = np.zeros(num_nodes, np.int64)
    rank = np.zeros(num_nodes, np.int64)
    for node in range(num_nodes - 1, size - 1, -1):  # parents before children
        heavy, light = children[node]
        left_leaves[row[node]] = width[heavy]
        left_samples[row[node]] = weight[heavy]
        row[heavy] = row[node] + 1
        rank[heavy] = rank[node]
        row[light] = row[node] + width[heavy]
        rank[light] = rank[node] + width[heavy]
    for node in range(size):
        leaves[rank[node]] = node


@device
def heavy_child_count(n: int, part: int, whole: int) -> int:
    """Return floor(n * part / whole + 1/2), exactly, for 0 <= n, part <= whole < 2^50.

    The quotient in doubles is off by less than 1 (three roundings of 2^-53 of at most 2^50); the
    remainder, which is small, is correct although the products wrap in 64 bits (unsigned: numba
    assumes that signed ones do not overflow).
    """
    quotient = int(float(n) * float(part) / float(whole) + 0.5)
    rest = int(np.int64(np.uint64(n) * np.uint64(part) - np.uint64(quotient) * np.uint64(whole)))
    # The quotient is floor(x + 1/2) if the remainder is in [-whole / 2, whole / 2). To avoid
    # halves, test whether 2 * remainder + whole is in [0, 2 * whole)
    rest = 2 * rest + int(whole)
    whole = int(whole)
    return quotient - (rest < 0) + (rest >= 2 * whole)


@device
def leaf_counts(
    left_leaves: Int32s, left_samples: Int64s, total: int, n: int, rank: int
) -> tuple[int, int]:
    """Count the first n samples: return the number of samples of the leaves before `rank`, and of
    leaf `rank`."""
    node = 0
    before = 0
    passed = 0
    size = len(left_leaves)
    n = int(n)
    total = int(total)
    while size > 1:
        width = int(left_leaves[node])
        part = int(left_samples[node])
        heavy = heavy_child_count(n, part, total)
        if rank < passed + width:
            node = node + 1
            size = width
            total = part
            n = heavy
        else:
            before = before + heavy
            passed = passed + width
            node = node + width
            size = size - width
            total = total - part
            n = n - heavy
    return before, n


@kernel
def call_leaf_counts(
    left_leaves: Int32s, left_samples: Int64s, total: int, n: int, rank: int
) -> tuple[int, int]:
    """Call `leaf_counts` from outside of kernels."""
    return leaf_counts(left_leaves, left_samples, total, n, rank)


@device
def leaf_at(
    left_leaves: Int32s, left_samples: Int64s, total: int, start: int, stop: int, position: int
) -> int:
    """Return the rank of the leaf at `position` when samples [start, stop) are laid out leaf by
    leaf; 0 <= position < stop - start."""
    node = 0
    rank = 0
    size = len(left_leaves)
    start = int(start)
    stop = int(stop)
    total = int(total)
    while size > 1:
        width = int(left_leaves[node])
        part = int(left_samples[node])
        heavy_start = heavy_child_count(start, part, total)
        heavy_stop = heavy_child_count(stop, part, total)
        if position < heavy_stop - heavy_start:
            node = node + 1
            size = width
            total = part
            start = heavy_start
            stop = heavy_stop
        else:
            position = position - (heavy_stop - heavy_start)
            rank = rank + width
            node = node + width
            size = size - width
            total = total - part
            start = start - heavy_start
            stop = stop - heavy_stop
    return rank


@kernel
def all_counts(
    left_leaves: Int32s, left_samples: Int64s, total: int, n: int, counts: Int64s
) -> None:
    """Fill counts, int64 [size], with the number of samples that each leaf has among the first n,
    in order of rank."""
    for rank in range(len(counts)):
        _, counts[rank] = leaf_counts(left_leaves, left_samples, total, n, rank)


@kernel
def call_least_multiple(
    left_leaves: Int32s,
    left_samples: Int64s,
    total: int,
    leaf_total: int,
    rank: int,
    count: int,
    step: int,
) -> int:
    """Call `least_multiple` from outside of kernels."""
    return least_multiple(left_leaves, left_samples, total, leaf_total, rank, count, step)


@device
def least_multiple(
    left_leaves: Int32s,
    left_samples: Int64s,
    total: int,
    leaf_total: int,
    rank: int,
    count: int,
    step: int,
) -> int:
    """Return the least m such that leaf `rank` has `count` samples, 1 to leaf_total, among the
    first min(m * step, total).

    The leaf's count is within 2 of its share (3 with the rounding of doubles), so m is one of about
    1 + 6 * total / leaf_total / step numbers, among which it is found by bisection.
    """
    pace = float(total) / float(leaf_total) / float(step)
    low = max(0, int(float(count - 3) * pace))
    high = min((int(total) + int(step) - 1) // int(step), int(float(count + 3) * pace) + 1)
    while low < high:
        middle = (low + high) // 2
        _, have = leaf_counts(
            left_leaves, left_samples, total, min(middle * int(step), int(total)), rank
        )
        if have >= count:
            high = middle
        else:
            low = middle + 1
    return low
