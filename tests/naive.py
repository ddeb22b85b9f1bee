"""Slow twins of the kernels: lists, fractions and dictionaries in place of closed forms."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from math import floor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megablend.kernels.bijection import permuted
from megablend.kernels.mixing import draw, fold
from megablend.plan.weave import weave


class Node(NamedTuple):
    samples: int
    sources: list[int]
    """In leaf order."""
    children: tuple[Node, Node] | None
    """Heavier, lighter."""


def huffman(totals: Sequence[int]) -> Node:
    """By a heap; among equals leaves come before nodes, then whatever is older."""
    order = sorted((total, source) for source, total in enumerate(totals) if total > 0)
    heap = [(total, 0, age, Node(total, [source], None)) for age, (total, source) in enumerate(order)]
    age = 0
    while len(heap) > 1:
        light, heavy = heapq.heappop(heap)[3], heapq.heappop(heap)[3]
        node = Node(light.samples + heavy.samples, heavy.sources + light.sources, (heavy, light))
        heapq.heappush(heap, (node.samples, 1, age, node))
        age += 1
    return heap[0][3]


def prefix(node: Node, n: int) -> dict[int, int]:
    """How many of the first n samples each source has."""
    counts, todo = {}, [(node, n)]
    while todo:
        node, seen = todo.pop()
        if node.children is None:
            counts[node.sources[0]] = seen
        else:
            heavy, light = node.children
            handed = floor(Fraction(seen * heavy.samples, node.samples) + Fraction(1, 2))
            todo += [(heavy, handed), (light, seen - handed)]
    return counts


def stage(
    totals: Sequence[int], lanes: int, slots: int, spans: Sequence[int], seed: int, start: int
) -> list[tuple[int, int]]:
    """(source, ordinal within the stage) of every sample of a stage that starts at sample `start`.

    Cycles are laid out and dealt as lists. The pattern of a cycle and the keyed numbers are the package's.
    """
    tree, total = huffman(totals), sum(totals)
    dealt = total // lanes * lanes
    edges = [*range(0, dealt, lanes * slots), dealt] if dealt else []
    found: list[tuple[int, int]] = [(-1, -1)] * total
    runs: dict[tuple[int, int, int], dict[int, list[list[tuple[int, int]]]]] = defaultdict(lambda: defaultdict(list))
    for cycle, (low, high) in enumerate(pairwise(edges)):
        full = high - low == lanes * slots
        first, last = prefix(tree, low), prefix(tree, high)
        layout = [source for source in tree.sources for _ in range(last[source] - first[source])]
        turns = (high - low) // lanes
        pattern, key = weave(lanes, turns), fold(fold(seed, start), cycle)
        shift = draw(key, 0, turns)
        parts: dict[tuple[int, int, int], list[tuple[int, int]]] = defaultdict(list)  # (position, sample)
        for j in range(low, high):
            slot, lane = divmod(j - low, lanes)
            position = (int(pattern.firsts[lane]) + lanes * ((pattern.stride * slot + shift) % turns)) % len(layout)
            parts[layout[position], position % lanes, lane].append((position, j))
        for (source, residue, lane), part in parts.items():
            part.sort()
            chosen = fold(fold(key, source), lane)
            walked = [(permuted(rank, len(part), chosen), j) for rank, (_, j) in enumerate(part)]
            period = cycle // spans[source] if full else -1
            runs[source, period, cycle if not full else 0][residue].append(sorted(walked))
    given = dict.fromkeys(tree.sources, 0)
    for (source, _, _), by_residue in sorted(runs.items(), key=lambda item: (item[0][1] < 0, item[0][1])):
        for residue in sorted(by_residue):
            for part in by_residue[residue]:
                for _, j in part:
                    found[j] = source, given[source]
                    given[source] += 1
    for j in range(dealt, total):
        now, after = prefix(tree, j), prefix(tree, j + 1)
        source = next(source for source in now if after[source] > now[source])
        found[j] = source, now[source]
    return found


def plan(
    totals: Sequence[Sequence[int]], *, lanes: int, slots: int, spans: Sequence[int], seed: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Sources [n] and ordinals [n] of all samples of all stages."""
    given, found = [0] * len(spans), []
    for number, each in enumerate(totals):
        start = sum(map(sum, totals[:number]))
        found += [
            (source, given[source] + ordinal) for source, ordinal in stage(each, lanes, slots, spans, seed, start)
        ]
        given = [had + more for had, more in zip(given, each, strict=True)]
    sources, ordinals = np.array(found).T
    return sources, ordinals


def shuffled(n: int, key: int, epoch: int, group: int) -> list[int]:
    """Fisher-Yates by taking entries out of a list."""
    chosen = fold(fold(key, epoch), group)
    left, taken = list(range(n)), []
    for last in range(n - 1, 0, -1):
        other = draw(chosen, last, last + 1)
        taken.append(left[other])
        left[other] = left[last]
        left.pop()
    return [*left, *reversed(taken)]


def page_tokens(
    sizes: Sequence[int], key: int, num_epochs: int, *, threshold: int, groups: int, runs: int
) -> list[tuple[int, int, int]]:
    """(epoch, block, token) of all tokens of the first epochs in the page order."""
    num_groups = groups if len(sizes) > threshold else 1
    run = max(1, len(sizes) // (groups * runs))
    tokens = []
    for epoch in range(num_epochs):
        for group in shuffled(num_groups, key, epoch, 0):
            members = [block for block in range(len(sizes)) if block // run % num_groups == group]
            for place in shuffled(len(members), key, epoch, group + 1):
                tokens += [(epoch, members[place], token) for token in range(sizes[members[place]])]
    return tokens


def row_tokens(
    documents: Sequence[int], blocks: Sequence[int], key: int, num_epochs: int, *, threshold: int, group: int
) -> list[tuple[int, int, int]]:
    """(epoch, block, token) of all tokens of the first epochs in the row order, of documents that lie across blocks."""
    places = [(block, token) for block, size in enumerate(blocks) for token in range(size)]
    ends = [sum(documents[: i + 1]) for i in range(len(documents))]
    groups = -(-len(documents) // group)
    laid = page_tokens(documents, key, num_epochs, threshold=threshold, groups=groups, runs=len(documents))
    return [(epoch, *places[ends[document] - documents[document] + token]) for epoch, document, token in laid]
