"""Find the samples at which each source of a run begins, ends and repeats, and how evenly its
samples are spread. Everything is computed from the plan, without locating all samples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megablend.arrays import Float64s, Int32s, Int64s
from megablend.blend.plan import StagesPlan

SCANNED = 1 << 16
"""Number of samples at each end of a run that are located one by one; sources that do not occur
there are located by their number of samples."""
NONE = -1
"""The value used as the first and last sample of a source without samples."""


@dataclass(frozen=True, slots=True)
class Presence:
    """The presence of each source in a range of samples: arrays of [num_sources]."""

    counts: Int64s
    """Number of samples of each source."""
    first: Int64s
    """The first sample of each source; NONE if the source has no samples."""
    last: Int64s
    """The last sample of each source; NONE if the source has no samples."""
    worst_error: Float64s
    """Largest difference, in samples, between each source's samples and its share, over the
    prefixes that were examined."""


def find_presence(plan: StagesPlan, start: int, stop: int, *, scanned: int = SCANNED) -> Presence:
    """Find where each source occurs in samples [start, stop), which should belong to one stage or
    one blend.

    Args:
        scanned: number of samples at each end that are located one by one; `worst_error` covers the
            prefixes of the samples at the start.
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
        first[source] = plan.nth_sample(source, int(before[source]) + 1)
    for source in np.flatnonzero((counts > 0) & (last == NONE)).tolist():
        last[source] = plan.nth_sample(source, int(after[source]))
    return Presence(counts, first, last, _worst_errors(head, counts / (stop - start)))


def find_epoch_ends(plan: StagesPlan, *, limit: int) -> list[list[int]]:
    """Return the samples at which the first `limit` epochs of each source end. At such a sample,
    the source has had as many samples as there are up to the end of the epoch.

    The sample is in the cycle that reads the last samples of the epoch and the first samples of the
    next one.
    """
    ends = list[list[int]]()
    for source in range(plan.num_sources):
        ordinals = _last_ordinals(plan, source, limit).tolist()
        samples = [plan.sample_of_count(source, ordinal) for ordinal in ordinals]
        ends.append([sample for sample in samples if sample is not None])
    return ends


def _last_ordinals(plan: StagesPlan, source: int, limit: int) -> Int64s:
    """Return the ordinals, int64 [n], of the samples with the last token of each of a source's
    first `limit` epochs."""
    last_tokens = np.array([plan.epochs.start(source, epoch) for epoch in range(1, limit + 1)]) - 1
    ordinals = [np.zeros(0, np.int64)]
    for covered in plan.list_tokens(source):
        stop = covered.token + (covered.stop - covered.first) * covered.step
        inside = last_tokens[(covered.token <= last_tokens) & (last_tokens < stop)]
        ordinals.append(covered.first + (inside - covered.token) // covered.step)
    return np.concatenate(ordinals)


def _worst_errors(sources: Int32s, shares: Float64s) -> Float64s:
    """Return the largest difference |count - share * n| of each source, [num_sources], over all
    prefixes of the samples. The prefix has n samples, of which the source has `count`."""
    numbers = np.argsort(sources, kind="stable")
    owners = sources[numbers]
    totals = np.bincount(sources, minlength=len(shares))
    ranks = np.arange(len(sources)) - (np.cumsum(totals) - totals)[owners]
    worst = np.abs(totals - shares * len(sources))
    np.maximum.at(worst, owners, np.abs(ranks - shares[owners] * numbers))
    np.maximum.at(worst, owners, np.abs(ranks + 1 - shares[owners] * (numbers + 1)))
    return worst
