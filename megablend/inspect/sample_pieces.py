"""Find the samples of a run that have a source's stored tokens, epoch by epoch.

An epoch reads a range of stored tokens in one or more pieces, each at its position in the source's
endless concatenation of epochs (`Placed`). The samples of the source are at regular distances along
these positions (`TokenRange`), so a division finds the samples that overlap a piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from megablend.arrays import Int64s
from megablend.blend.plan import TokenRange
from megablend.operations.results import Record
from megablend.order.base import Placed
from megablend.run.locator import Reading
from megablend.run.run import Run


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class FoundPiece(Record):
    """A piece of a sample: tokens that are stored consecutively in one file. They are tokens
    [first_token, stop_token) of the sample, counting appended tokens."""

    first_token: int
    stop_token: int
    """The position after the piece's last token in the sample."""
    offset: int
    """Number of the piece's first token among the tokens that the file (or row) has in this
    split."""


class SamplePieces(NamedTuple):
    """Pieces of the samples of one epoch as columns: the fields of `FoundPiece`, and the sample.
    Each column is int64 [n]."""

    samples: Int64s
    first_tokens: Int64s
    stop_tokens: Int64s
    offsets: Int64s


def iterate_samples(
    run: Run, source: int, ranges: Sequence[range | None]
) -> Iterator[tuple[int, int, tuple[FoundPiece, ...]]]:
    """Find the samples that have stored tokens of a source, epoch by epoch, and within an epoch in
    the order of their numbers. An epoch is examined when its first sample is needed.

    Args:
        ranges: for each of the source's readings, the requested stored tokens; None if no tokens
            are requested.

    Yields: a sample, the epoch in which it reads requested tokens, and the pieces of the sample
        with these tokens.
    """
    end = _find_end(run, source)
    for reading, stored in zip(run.locator.readings(source), ranges, strict=True):
        if stored is None:
            continue
        remaining = range(*reading.count_remaining(stored.start, stored.stop))
        if not remaining:
            continue
        for epoch in reading.list_epochs(end):
            found_pieces = _find_pieces(run, source, reading, epoch, remaining)
            rows = zip(*(column.tolist() for column in found_pieces), strict=True)
            for sample, of_sample in groupby(rows, key=lambda row: int(row[0])):
                pieces = tuple(
                    FoundPiece(first_token=first, stop_token=stop, offset=offset)
                    for _, first, stop, offset in of_sample
                )
                yield sample, epoch, pieces


def _find_end(run: Run, source: int) -> int:
    """Return the position at which the source's last sample ends; 0 if the source has no
    samples."""
    ranges = run.plan.list_tokens(source)
    if not ranges:
        return 0
    last = ranges[-1]
    return last.token + (last.stop - last.first) * last.step + run.extra_token


def _find_pieces(
    run: Run, source: int, reading: Reading, epoch: int, stored: range
) -> SamplePieces:
    """Return the pieces of the run's samples that have a range of stored tokens in one epoch of a
    reading, sorted by sample and by position in the sample."""
    placed = reading.find_tokens(epoch, stored.start, stored.stop)
    parts = [
        _cut_into_samples(run, source, reading, placed, token_range)
        for token_range in run.plan.list_tokens(source)
    ]
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    pieces = SamplePieces(*columns)
    order = np.lexsort((pieces.first_tokens, pieces.samples))
    pieces = SamplePieces(*(column[order] for column in pieces))
    return pieces._replace(offsets=pieces.offsets - stored.start)


def _cut_into_samples(
    run: Run, source: int, reading: Reading, placed: Placed, token_range: TokenRange
) -> SamplePieces:
    """Cut placed tokens into pieces, one for each sample of `token_range` that has some of them.
    The column `offset` is still counted as `placed.stored` is.

    Sample j of the range has tokens [j * step, (j + 1) * step + extra), counted from the first
    token of sample 0: its extra tokens are also the first ones of the next sample.
    """
    extra = run.extra_token
    step = token_range.step
    num_samples = token_range.stop - token_range.first
    range_starts = placed.starts - token_range.token
    range_stops = placed.stops - token_range.token

    # For each placed range: the first sample that ends after its start, and how many samples from
    # there on begin before its end
    first = np.maximum((range_starts - step - extra) // step + 1, 0)
    stop = np.minimum((range_stops - 1) // step + 1, num_samples)
    counts = np.maximum(stop - first, 0)

    # From here on, there is one row for each pair of a range and a sample that has some of it
    rows = np.repeat(np.arange(len(counts)), counts)
    rows_before = np.cumsum(counts) - counts
    samples = first[rows] + np.arange(len(rows)) - rows_before[rows]
    # The plan finds samples fastest if their ordinals ascend
    order = np.argsort(samples, kind="stable")
    rows = rows[order]
    samples = samples[order]

    begins = samples * step
    starts = np.maximum(range_starts[rows], begins)
    stops = np.minimum(range_stops[rows], begins + step + extra)
    ordinals = token_range.first + samples
    numbers = run.plan.find_samples(np.full(len(ordinals), source, np.int32), ordinals)
    pieces = SamplePieces(
        samples=numbers,
        first_tokens=starts - begins,
        stop_tokens=stops - begins,
        offsets=placed.stored[rows] + starts - range_starts[rows],
    )

    # The plan may lack the ordinal; and the extra token of the sample that ends where the files
    # change is read by only one of the two readings
    positions = token_range.token + begins
    is_read = (numbers >= 0) & (positions < reading.stop)
    if reading.extra_before:
        is_read &= positions >= reading.position
    return SamplePieces(*(column[is_read] for column in pieces))
