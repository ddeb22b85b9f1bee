"""Where in a run each source begins, ends and repeats, and how evenly it is spread: from the plan,
without walking the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megablend.arrays import Float64s, Int32s, Int64s
from megablend.blend.plan import StagesPlan

SCANNED = 1 << 16
"""Samples at each end of a run that are located one by one; sources that do not occur there are
located by ordinal."""
_ORDINALS = 1 << 12
"""First or last ordinals of a source among which its first or last sample is sought."""
NONE = -1


@dataclass(frozen=True, slots=True)
class Presence:
    """Where each source occurs in a range of samples, [num_sources] each."""

    counts: Int64s
    """Samples of the source."""
    first: Int64s
    """Number of its first sample; NONE where it has none."""
    last: Int64s
    worst_error: Float64s
    """Largest distance, in samples, between what the source has given and its share, over the
    prefixes that were looked at."""


def find_presence(plan: StagesPlan, start: int, stop: int, *, scanned: int = SCANNED) -> Presence:
    """Where each source occurs in samples [start, stop), which should
    belong to one stage or one blend.

    Args:
        scanned: samples at each end that are located; prefix errors are those of the first ones.
    """
    before = plan.counts(start)
    after = plan.counts(stop)
    counts = after - before
    head = plan.locate_many(np.arange(start, min(stop, start + scanned)))[0]
    low = max(start, stop - scanned)
    tail = plan.locate_many(np.arange(low, stop))[0]
    first = np.full(plan.num_sources, NONE)
    last = np.full(plan.num_sources, NONE)
    first[head[::-1]] = start + np.arange(len(head))[::-1]
    last[tail] = low + np.arange(len(tail))
    for source in np.flatnonzero((counts > 0) & (first == NONE)).tolist():
        ordinals = range(before[source], min(after[source], before[source] + _ORDINALS))
        found = _samples_within(plan, source, ordinals, start, stop)
        first[source] = (
            min(found) if found else _seek(plan, source, int(before[source]) + 1, start, stop)
        )
    for source in np.flatnonzero((counts > 0) & (last == NONE)).tolist():
        ordinals = range(max(before[source], after[source] - _ORDINALS), after[source])
        found = _samples_within(plan, source, ordinals, start, stop)
        last[source] = max(found) if found else _seek(plan, source, int(after[source]), start, stop)
    return Presence(counts, first, last, _worst_errors(head, counts / (stop - start)))


def find_epoch_ends(plan: StagesPlan, *, limit: int) -> list[list[int]]:
    """For each source, the samples with which it has given an epoch's worth of samples, the first
    `limit` of them at most.

    That is within the cycle in which the last samples of the epoch are read,
    and the first ones of the next.
    """
    return [
        [
            sample
            for ordinal in _last_ordinals(plan, source, limit).tolist()
            if (sample := plan.sample_of_count(source, ordinal)) is not None
        ]
        for source in range(plan.num_sources)
    ]


def _last_ordinals(plan: StagesPlan, source: int, limit: int) -> Int64s:
    """Ordinals int64 [n] that have the last tokens of a source's first `limit` epochs."""
    ends = np.array([plan.epochs.start(source, epoch) for epoch in range(1, limit + 1)]) - 1
    found = [np.zeros(0, np.int64)]
    for each in plan.list_tokens(source):
        inside = (each.token <= ends) & (ends < each.token + (each.stop - each.first) * each.step)
        found.append(each.first + (ends[inside] - each.token) // each.step)
    return np.concatenate(found)


def find_first_from(plan: StagesPlan, ordinals: Int64s) -> tuple[int, int] | None:
    """The first sample whose ordinal is at or above the limit of its source, and that source;
    None if there is none.

    Args:
        ordinals: int64 [num_sources], the limits.
    """
    # The first sample is no later than the first of these.
    known = plan.find_samples(np.arange(plan.num_sources, dtype=np.int32), ordinals)
    first = None
    for source in np.argsort(np.where(known < 0, plan.num_samples, known), kind="stable").tolist():
        before = None if first is None else first[0]
        sample = plan.first_sample_from(source, int(ordinals[source]), before=before)
        if sample is not None:
            first = sample, source
    return first


def _samples_within(
    plan: StagesPlan, source: int, ordinals: range, start: int, stop: int
) -> list[int]:
    """The samples in [start, stop) of ordinals; none after an amendment, where a stage first gives
    what the one before left."""
    return [k for k in _samples_of(plan, source, ordinals) if start <= k < stop]


def _samples_of(plan: StagesPlan, source: int, ordinals: Sequence[int]) -> list[int]:
    """The samples of a source's ordinals, without those that an amendment left unread."""
    ks = plan.find_samples(np.full(len(ordinals), source, np.int32), np.array(ordinals, np.int64))
    samples: list[int] = ks[ks >= 0].tolist()
    return samples


def _seek(plan: StagesPlan, source: int, count: int, start: int, stop: int) -> int:
    """The sample in [start, stop) with which the source has given `count` samples."""
    low = start
    high = stop - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (
            (low, middle) if int(plan.counts(middle + 1)[source]) >= count else (middle + 1, high)
        )
    return low


def _worst_errors(sources: Int32s, shares: Float64s) -> Float64s:
    """The largest |count - share * n| of each source over all prefixes n of these samples:
    [num_sources]."""
    places = np.argsort(sources, kind="stable")
    owners = sources[places]
    totals = np.bincount(sources, minlength=len(shares))
    ranks = np.arange(len(sources)) - (np.cumsum(totals) - totals)[owners]
    worst = np.abs(totals - shares * len(sources))
    np.maximum.at(worst, owners, np.abs(ranks - shares[owners] * places))
    np.maximum.at(worst, owners, np.abs(ranks + 1 - shares[owners] * (places + 1)))
    return worst
