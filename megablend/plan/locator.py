"""Where the tokens of samples are: from (source, position) to ranges of tokens of blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megablend.blocks.growing_splits import Ranges
from megablend.blocks.splits import SplitBlocks
from megablend.index.snapshot import Snapshot
from megablend.order.base import Order, Spans, by_value, join_spans
from megablend.order.changing import ChangingOrder
from megablend.order.registry import find_order
from megablend.plan.epochs import Segment

_FOREVER = 1 << 62


class SourceRanges(NamedTuple):
    """A source of a split in one snapshot of the index."""

    snapshot: Snapshot
    ranges: Ranges
    """Its documents that belong to the split."""
    first_block: int
    """Number that the snapshot's first block has among those of all snapshots of the run."""


class Reading(NamedTuple):
    """Consecutive epochs of a source that are read from one snapshot."""

    position: int
    """Where they begin, see `Epochs`."""
    epoch: int
    """The first of them."""
    shift: int
    """What is added to positions for those of `order`, to which all epochs before are like these."""
    blocks: SplitBlocks
    order: Order
    first_block: int
    """See SourceRanges."""

    def index_blocks(self, blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Numbers of local blocks among those of all snapshots of the run: int64 [n]."""
        return self.blocks.index_blocks(blocks) + self.first_block

    def find_local(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The local blocks of such numbers, or the next ones after them: int64 [n]."""
        return self.blocks.local_blocks(numbers - self.first_block)


@dataclass(frozen=True, kw_only=True)
class LocatedSource:
    """What a locator knows of a source."""

    ranges: Mapping[str, SourceRanges]
    """By the digest of a snapshot."""
    segments: tuple[Segment, ...]
    """Its epochs."""
    appends_eod: bool
    """Whether an end-of-document token follows each document."""
    key: int
    """Random key of its orders."""


class Locator:
    """The orders of one split's sources, each created on first use."""

    def __init__(self, sources: Sequence[LocatedSource]) -> None:
        self._sources = tuple(sources)
        self._readings: dict[int, tuple[Reading, ...]] = {}

    def readings(self, source: int) -> tuple[Reading, ...]:
        """What the epochs of a source read, in order: at least one."""
        if source not in self._readings:
            self._readings[source] = tuple(_make_readings(self._sources[source]))
        return self._readings[source]

    def blocks(self, source: int) -> SplitBlocks:
        """The source's blocks in this split, in the last snapshot that the run reads of it."""
        return self.readings(source)[-1].blocks

    def order(self, source: int) -> Order:
        """How the source's samples are arranged over these blocks."""
        return self.readings(source)[-1].order

    def locate_tokens(
        self, sources: npt.NDArray[np.int32], starts: npt.NDArray[np.int64], lengths: int | npt.NDArray[np.int64]
    ) -> Spans:
        """Where the tokens of samples are stored, including the extra one.

        Args:
            sources: int32 [n].
            starts: int64 [n], position of the first token of each sample.
            lengths: tokens of a sample, including the extra one: one number, or int64 [n].

        Returns: spans of rows 0 to n - 1; `blocks` are block numbers of the index; `starts` and `stops` are positions in a
            block's tokens as the store returns them.
        """
        parts = list[Spans]()
        for source, rows in by_value(sources):
            readings, counts = self.readings(source), lengths if isinstance(lengths, int) else lengths[rows]
            if len(readings) == 1:
                parts.append(_locate(readings[0], rows, starts[rows], counts))
                continue
            first, stop = starts[rows], starts[rows] + counts
            edges = [*(reading.position for reading in readings), _FOREVER]
            for reading, (low, high) in zip(readings, pairwise(edges), strict=True):
                begins, ends = np.maximum(first, low), np.minimum(stop, high)
                inside = np.flatnonzero(begins < ends)
                if len(inside):
                    parts.append(_locate(reading, rows[inside], begins[inside], (ends - begins)[inside]))
        return join_spans(parts)


def _locate(
    reading: Reading,
    rows: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    lengths: int | npt.NDArray[np.int64],
) -> Spans:
    spans = reading.order.spans(starts + reading.shift, lengths)
    clips = reading.blocks.clips(spans.blocks)
    columns = reading.index_blocks(spans.blocks), spans.starts + clips, spans.stops + clips
    return Spans(rows[spans.rows], spans.epochs, *columns)


def _make_readings(source: LocatedSource) -> list[Reading]:
    """A reading for each run of segments of one snapshot; snapshots without the source are not read."""
    readings = list[Reading]()
    for index, segments in groupby(source.segments, lambda segment: segment.snapshot):
        first, *others = segments
        if first.tokens == 0 and (readings or index not in source.ranges):
            continue
        ranges = source.ranges[index]
        blocks = SplitBlocks(ranges.snapshot, ranges.ranges, eod=source.appends_eod)
        orders = [(0, find_order(first.order).make(blocks, source.key))]
        orders += [(other.epoch, find_order(other.order).make(blocks, source.key)) for other in others]
        order = orders[0][1] if len(orders) == 1 else ChangingOrder(blocks, orders)
        shift = first.epoch * first.tokens - first.position
        readings.append(Reading(first.position, first.epoch, shift, blocks, order, ranges.first_block))
    return readings
