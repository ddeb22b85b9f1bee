"""What a run should have read: from the tokens of its samples alone, sample by sample, and not by how the plan is made."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

import megablend
from tests.behaviour.histories.files import Files
from tests.runs import read_samples

EOD = 0
TokensOf = Callable[[int], frozenset[int]]
"""The tokens of a source by the number of the snapshot."""


class Change(NamedTuple):
    """A stage that reads other files, as a source meets it."""

    snapshot: int
    begun: int
    """Position to which samples before it have read."""
    period: int
    """Tokens after it which lanes may have begun as well."""


class SourceSample(NamedTuple):
    """A sample of a source."""

    k: int
    """Its number in the run."""
    position: int
    """Of its first token, counted over all epochs."""
    tokens: list[int]
    """Without the extra one."""
    extra: int | None
    """The first token of the source's next sample, where samples have it."""


def make_fields(
    settings: Mapping[str, Any], tokens: Sequence[int], begins: Sequence[bool], source: int
) -> dict[str, Any]:
    """All that training gets of a sample, as lists.

    Args:
        settings: of its stage.
        tokens: with the extra one, if the run has it.
        begins: whether the token before is not of the same document, or not the one before in it.
    """
    length = settings["sequence_length"]
    by_document = settings.get("inter_document_masking")
    after_eod = _last_of([i > 0 and tokens[i - 1] == EOD for i in range(length)])
    documents = _last_of(begins[:length])
    whole = [0] * length
    first = documents if by_document else after_eod if settings.get("reset_position_ids") else whole
    masks_eod = settings.get("eod_mask_loss")
    fields: dict[str, Any] = {
        "tokens": list(tokens[:length]),
        "labels": [*tokens[1:], 0][:length],
        "loss_mask": [
            float(i + 1 < len(tokens) and not (masks_eod and tokens[i] == EOD))
            for i in range(length)
        ],
        "position_ids": [i - begin for i, begin in enumerate(first)],
        "dataset_id": source,
    }
    if settings.get("create_attention_mask"):
        seen = after_eod if settings.get("reset_attention_mask") else whole
        rows = [
            [not seen[row] <= column <= row for column in range(length)] for row in range(length)
        ]
        fields["attention_mask"] = [rows]
    if by_document:
        ends = [*sorted(set(documents)), length]
        fields["cu_seqlens"] = ends + [length] * (length + 1 - len(ends))
        fields["max_seqlen"] = max(b - a for a, b in itertools.pairwise(ends))
    return fields


def _last_of(marks: Sequence[bool]) -> list[int]:
    """For each place the last one up to it that is marked; the first one is."""
    return list(itertools.accumulate((i if mark else 0 for i, mark in enumerate(marks)), max))


def list_samples(
    dataset: megablend.Dataset, source: int, lengths: Sequence[int]
) -> list[SourceSample]:
    """The samples of a source by their positions; `lengths` of all samples of the run, without extra tokens."""
    sources, ordinals = dataset.run.plan.locate_many(range(len(dataset)))
    positions = dataset.run.plan.token_ranges(sources, ordinals)[0].tolist()
    ks = np.flatnonzero(sources == source).tolist()
    found = []
    for k, sample in zip(ks, read_samples(dataset, ks), strict=True):
        tokens = sample.tokens.tolist()
        own = tokens[: lengths[k]]
        extra = tokens[lengths[k] :]
        assert len(own) == lengths[k]
        assert len(extra) == dataset.run.extra_token
        found.append(SourceSample(k, positions[k], own, extra[0] if extra else None))
    return sorted(found, key=lambda sample: sample.position)


def join_tokens(samples: Sequence[SourceSample], *, changes: int) -> list[int | None]:
    """The tokens of a source by position; None where no sample has read them. An added token after a document is that of its end.

    Raises: AssertionError where samples overlap, or more than `changes` of them end in other tokens than the next ones begin
        with.
    """
    found = list[int | None]()
    breaks = 0
    for before, sample in itertools.zip_longest([None, *samples], samples):
        if sample is None:
            break
        assert sample.position >= len(found), "samples overlap"
        if before is not None and sample.position == len(found):
            breaks += before.extra not in (None, sample.tokens[0])
        found += [None] * (sample.position - len(found))
        found += sample.tokens
    assert breaks <= changes, "samples are not neighbours"
    for i, token in enumerate(found):
        if token == EOD:
            last = found[i - 1] if i else None
            found[i] = None if last is None else -last
    return found


def divide_epochs(
    tokens: Sequence[int | None], changes: Sequence[Change], tokens_of: TokensOf
) -> list[int] | None:
    """Where the epochs of a source begin, if its tokens are epochs of its snapshots, one after another, of each token once.

    Returns: None where they are not.
    """
    # a position, and the snapshot of the epoch before it
    tried = set[tuple[int, int]]()
    todo = [(0, 0, list[int]())]
    while todo:
        place, snapshot, before = todo.pop()
        if place >= len(tokens):
            return before
        if (place, snapshot) in tried:
            continue
        tried.add((place, snapshot))
        later = [each for each in changes if each.snapshot > snapshot and each.begun <= place]
        must = max(
            (each.snapshot for each in later if each.begun + each.period + 1 < place),
            default=snapshot,
        )
        # The last one is tried first
        for now in sorted({snapshot, *(each.snapshot for each in later)}):
            expected: frozenset[int] | set[int] = tokens_of(now)
            for each in changes:
                if each.snapshot > now and place < each.begun <= place + len(expected):
                    early = {token for token in tokens[place : each.begun] if token is not None}
                    expected = early & expected | expected & tokens_of(each.snapshot)
            epoch = [token for token in tokens[place : place + len(expected)] if token is not None]
            is_epoch = len(set(epoch)) == len(epoch) and set(epoch) <= expected
            if now >= must and is_epoch and expected:
                todo.append((place + len(expected), now, [*before, place]))
    return None


def check_shares(
    counts: Sequence[int],
    weights: Sequence[Fraction],
    *,
    is_cut: bool,
    caps: Sequence[int | None] | None = None,
) -> None:
    """Samples of a stage are divided by weight: to one sample, and within two where the stage was cut.

    Args:
        caps: samples left of each source, where what exceeds them is given to the others: then sources below their caps have
            equally many samples by weight, and those at their caps not more.
    """
    length = sum(counts)
    total = sum(weights)
    within = 2 if is_cut else 1
    if caps is None:
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - length * weight / total) <= within
        return
    listed = [each for each in zip(counts, weights, caps, strict=True) if each[1] > 0]
    assert all(cap is None or count <= cap for count, _, cap in listed)
    if is_cut:
        return
    free = [(count, weight) for count, weight, cap in listed if cap is None or count < cap]
    if free:
        most = min((count + 1) / weight for count, weight in free)
        assert all((count - 1) / weight <= most for count, weight, _ in listed)


def check_steps(
    steps: Sequence[Sequence[int]],
    number: int,
    start: Sequence[Fraction],
    stop: Sequence[Fraction],
    *,
    is_cosine: bool,
) -> None:
    """The steps of a schedule go from one stage's weights to another's, and their rounding does not add up.

    Args:
        steps: samples of each source in each step, [steps][num_sources], of those that were read.
        number: of all steps.
    """
    due = [0.0] * len(start)
    given = [0] * len(start)
    for i, counts in enumerate(steps):
        way = (i + 0.5) / number
        way = (1 - math.cos(math.pi * way)) / 2 if is_cosine else way
        for d, count in enumerate(counts):
            begin = float(start[d] / sum(start))
            end = float(stop[d] / sum(stop))
            due[d] += (begin + (end - begin) * way) * sum(counts)
            given[d] += count
            assert abs(given[d] - due[d]) <= 1 + 1e-6


def count_reads(samples: Sequence[SourceSample], stop: int) -> int:
    """How often the samples before `stop` have read the token that they read most often."""
    reads = Counter(
        token for sample in samples if sample.k < stop for token in sample.tokens if token != EOD
    )
    return max(reads.values(), default=0)


def tokens_of_source(files: Files, source: int, split: str = "train") -> TokensOf:
    """The tokens of a source by snapshot."""
    known = dict[int, frozenset[int]]()

    def tokens(snapshot: int) -> frozenset[int]:
        if snapshot not in known:
            known[snapshot] = files.tokens(snapshot, source, split)
        return known[snapshot]

    return tokens
