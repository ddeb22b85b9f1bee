"""Where in a run each source begins, ends and repeats, and how evenly it is spread: from the plan, without walking the run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megablend.plan.interleavings.base import Int32s, Int64s
from megablend.plan.stages_plan import StagesPlan

SCANNED = 1 << 16
"""Samples at each end of a run that are located one by one; sources that do not occur there are located by ordinal."""
_ORDINALS = 1 << 12
"""First or last ordinals of a source among which its first or last sample is sought."""
NONE = -1
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Presence:
    """Where each source occurs in a range of samples, [num_sources] each."""

    counts: Int64s
    """Samples of the source."""
    first: Int64s
    """Number of its first sample; NONE where it has none."""
    last: Int64s
    worst_error: Floats
    """Largest distance, in samples, between what the source has given and its share, over the prefixes that were looked at."""


def find_presence(plan: StagesPlan, start: int, stop: int, *, scanned: int = SCANNED) -> Presence:
    """Where each source occurs in samples [start, stop), which should be one stage, or of one blend.

    Args:
        scanned: samples at each end that are located; prefix errors are those of the first ones.
    """
    before, after = plan.counts(start), plan.counts(stop)
    counts = after - before
    head = plan.locate_many(np.arange(start, min(stop, start + scanned)))[0]
    low = max(start, stop - scanned)
    tail = plan.locate_many(np.arange(low, stop))[0]
    first, last = np.full(plan.num_sources, NONE), np.full(plan.num_sources, NONE)
    first[head[::-1]] = start + np.arange(len(head))[::-1]
    last[tail] = low + np.arange(len(tail))
    for source in np.flatnonzero((counts > 0) & (first == NONE)).tolist():
        first[source] = _samples_of(plan, source, before[source], min(after[source], before[source] + _ORDINALS)).min()
    for source in np.flatnonzero((counts > 0) & (last == NONE)).tolist():
        last[source] = _samples_of(plan, source, max(before[source], after[source] - _ORDINALS), after[source]).max()
    return Presence(counts, first, last, _worst_errors(head, counts / (stop - start)))


def find_epoch_ends(plan: StagesPlan, source: int, epoch_tokens: int, *, limit: int) -> list[int]:
    """Samples that read the last token of the source's epochs, the first `limit` of them at most.

    With several lanes, some samples of the next epoch come a little before, and some of this one a little after.
    """
    total = int(plan.counts(plan.num_samples)[source])
    if not total or not epoch_tokens:
        return []
    low, stop = np.zeros(limit, np.int64), np.full(limit, total)
    ends = epoch_tokens * np.arange(1, limit + 1) - 1
    of_source = np.full(limit, source, np.int32)
    while (stop - low > 1).any():  # the last ordinal that begins at or before the epoch's last token
        middle = (low + stop) // 2
        begins_before = plan.token_starts(of_source, middle) <= ends
        low, stop = np.where(begins_before, middle, low), np.where(begins_before, stop, middle)
    samples: list[int] = plan.samples_of(of_source, low)[ends < _tokens_read(plan, source, total)].tolist()
    return samples


def _tokens_read(plan: StagesPlan, source: int, total: int) -> int:
    """Tokens of a source before the start of a sample after its last one."""
    starts = plan.token_starts(np.full(2, source, np.int32), np.array([max(0, total - 2), total - 1]))
    length = int(starts[1] - starts[0])
    return int(starts[1]) + length


def _samples_of(plan: StagesPlan, source: int, start: int, stop: int) -> Int64s:
    ordinals = np.arange(start, stop)
    return plan.samples_of(np.full(len(ordinals), source, np.int32), ordinals)


def _worst_errors(sources: Int32s, shares: Floats) -> Floats:
    """The largest |count - share * n| of each source over all prefixes n of these samples: [num_sources]."""
    places = np.argsort(sources, kind="stable")
    owners = sources[places]
    totals = np.bincount(sources, minlength=len(shares))
    ranks = np.arange(len(sources)) - (np.cumsum(totals) - totals)[owners]
    worst = np.abs(totals - shares * len(sources))
    np.maximum.at(worst, owners, np.abs(ranks - shares[owners] * places))
    np.maximum.at(worst, owners, np.abs(ranks + 1 - shares[owners] * (places + 1)))
    return worst
