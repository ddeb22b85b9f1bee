"""Slow twins of the kernels: lists, fractions and dictionaries in place of closed forms."""

from __future__ import annotations

from collections.abc import Sequence

from megablend.kernels.blend.keyed_hash import bounded_hash, hash_combine


def shuffled(n: int, key: int, epoch: int, group: int) -> list[int]:
    """Fisher-Yates by taking entries out of a list."""
    chosen = hash_combine(hash_combine(key, epoch), group)
    left = list(range(n))
    taken = []
    for last in range(n - 1, 0, -1):
        other = bounded_hash(chosen, last, last + 1)
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
    documents: Sequence[int],
    blocks: Sequence[int],
    key: int,
    num_epochs: int,
    *,
    threshold: int,
    group: int,
) -> list[tuple[int, int, int]]:
    """(epoch, block, token) of all tokens of the first epochs in the row order, of documents that lie across blocks."""
    places = [(block, token) for block, size in enumerate(blocks) for token in range(size)]
    ends = [sum(documents[: i + 1]) for i in range(len(documents))]
    groups = -(-len(documents) // group)
    laid = page_tokens(
        documents, key, num_epochs, threshold=threshold, groups=groups, runs=len(documents)
    )
    return [
        (epoch, *places[ends[document] - documents[document] + token])
        for epoch, document, token in laid
    ]
