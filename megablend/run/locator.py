"""Find the blocks in which the tokens of samples are stored, given the samples' positions in their
sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.blend.epochs import Segment
from megablend.blend.plan import StagesPlan
from megablend.index.blocks.splits import SplitBlocks
from megablend.index.blocks.withdrawn_blocks import RemainingBlocks
from megablend.order.base import Order, Placed, Spans, by_value, join_spans
from megablend.order.listed import ListedOrder, ListedSource, locate_ranges
from megablend.order.registry import find_order
from megablend.run.source_blocks import SourceBlocks

_FOREVER = 1 << 62
"""The `stop` of a source's last reading."""


class Reading(NamedTuple):
    """Consecutive epochs of a source that are read from one snapshot in one order."""

    position: int
    """Position of the source (see `Epochs`) at which the reading begins, perhaps inside an
    epoch."""
    stop: int
    """Position at which the reading ends."""
    shift: int
    """The number to add to a position of the source to get the position that `order` uses: `order`
    counts as if all earlier epochs were as long as those of this reading."""
    blocks: SplitBlocks
    """The blocks of the source in the snapshot."""
    view: SplitBlocks | RemainingBlocks
    """The blocks as `order` counts them: `blocks` without the blocks of withdrawn files."""
    order: Order
    """The order of the blocks, whose positions and blocks are local to this reading."""
    first_block: int
    """See SplitData."""
    extra: int = 0
    """Number of tokens after `stop` that this reading also reads: the extra token of the sample
    that ends at `stop`, if that sample comes before the stage in which the files changed."""
    extra_before: int = 0
    """`extra` of the previous reading, which therefore reads this many tokens from `position`
    on."""
    listed: ListedSource | None = None
    """The argument for `locate_ranges`; None unless this is the source's only reading and reads one
    range of blocks, in an order that lists them."""

    def index_blocks(self, blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Convert numbers of local blocks to numbers among the blocks of all snapshots of the run:
        int64 [n]."""
        return self.blocks.index_blocks(blocks) + self.first_block

    def count_remaining(self, start: int, stop: int) -> tuple[int, int]:
        """Convert a range of stored tokens of `blocks` to the range as `order` counts it, without
        withdrawn files. The result is empty if all tokens of the range were withdrawn."""
        if isinstance(self.view, SplitBlocks):
            return start, stop
        return self.view.remaining_before(start), self.view.remaining_before(stop)

    def list_epochs(self, stop: int) -> range:
        """List the epochs that have tokens of this reading before position `stop`."""
        first = self.position + self.shift
        stop = min(stop, self.stop + self.extra) + self.shift
        tokens = self.view.num_tokens
        if tokens == 0 or first >= stop:
            return range(0)
        return range(first // tokens, -(-stop // tokens))

    def find_tokens(self, epoch: int, start: int, stop: int) -> Placed:
        """Return the positions at which an epoch reads the stored tokens [start, stop), which are
        counted as `order` counts them. Positions are those of the source, over all readings."""
        placed = self.order.find_tokens(epoch, np.array([start]), np.array([stop]))
        starts = np.maximum(placed.starts - self.shift, self.position)
        stops = np.minimum(placed.stops - self.shift, self.stop + self.extra)
        stored = placed.stored + starts - (placed.starts - self.shift)
        is_read = starts < stops
        return Placed(placed.rows[is_read], stored[is_read], starts[is_read], stops[is_read])


class Locator:
    """Locates the samples of one split's sources in blocks. The order of each source is created on
    first use.

    Args:
        sources: [num_sources].
        plan: the plan of the split.
        first_samples: the first sample of the stage that introduced each snapshot, by digest.
        extra: tokens that a sample shares with the next sample of its source.
    """

    def __init__(
        self,
        sources: Sequence[SourceBlocks],
        plan: StagesPlan,
        first_samples: Mapping[str, int],
        extra: int,
    ) -> None:
        self._sources = sources
        self._plan = plan
        self._first_samples = first_samples
        self._extra = extra
        self._readings: dict[int, tuple[Reading, ...]] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Another process makes the readings that it needs; here, other threads add some meanwhile
        return {**self.__dict__, "_readings": {}}

    def readings(self, source: int) -> tuple[Reading, ...]:
        """Return the readings of a source, in order; none if no snapshot of this split has the
        source."""
        made = self._readings.get(source)
        if made is not None:
            return made
        # A reading for each segment. Snapshots that lack the source are not read
        readings = list[Reading]()
        blocks = self._sources[source]
        snapshots = blocks.snapshots
        for segment in self._plan.epochs.segments[source]:
            if segment.snapshot not in snapshots or (segment.tokens == 0 and readings):
                continue
            stored = blocks.blocks(segment.snapshot)
            view = blocks.view(segment) if segment.withdrawn else stored
            readings.append(
                Reading(
                    position=segment.position,
                    stop=_FOREVER,
                    shift=segment.own_position(0),
                    blocks=stored,
                    view=view,
                    order=find_order(segment.order).make(view, blocks.key),
                    first_block=snapshots[segment.snapshot].first_block,
                )
            )
            if len(readings) > 1:
                # The previous reading ends here; a sample that was promised before keeps its extra
                # token
                kept = self._extra if self._is_promised(source, segment) else 0
                readings[-2] = readings[-2]._replace(stop=segment.position, extra=kept)
                readings[-1] = readings[-1]._replace(extra_before=kept)
        if len(readings) == 1:
            readings[0] = readings[0]._replace(listed=_list_source(readings[0]))
        self._readings[source] = tuple(readings)
        return self._readings[source]

    def _is_promised(self, source: int, segment: Segment) -> bool:
        """Find the sample of a source that ends where a segment begins, and return whether it comes
        before the stage that introduced the segment's files."""
        ordinal = self._plan.ordinal_ending_at(source, segment.position)
        if ordinal is None:
            return False
        # The snapshot with which the segment came
        index = segment.withdrawn[-1] if segment.withdrawn else segment.snapshot
        sample = self._plan.find_samples(np.array([source], np.int32), np.array([ordinal]))[0]
        return 0 <= int(sample) < self._first_samples[index]

    def locate_tokens(
        self,
        sources: npt.NDArray[np.int32],
        starts: npt.NDArray[np.int64],
        lengths: int | npt.NDArray[np.int64],
    ) -> Spans:
        """Locate the stored tokens of samples, including the extra one.

        Args:
            sources: int32 [n], the samples' sources.
            starts: int64 [n], position of the first token of each sample.
            lengths: tokens per sample, including the extra one: one number, or int64 [n].

        Returns: spans of rows 0 to n - 1; `blocks` are block numbers of the index; `starts` and
            `stops` are positions in a block's tokens as the store returns them.
        """
        if len(sources) and (sources == sources[0]).all():  # a fast path
            listed = self.readings(int(sources[0]))[0].listed
            if listed is not None:
                first_of_all = np.zeros(len(starts), np.int64)
                return locate_ranges([listed], first_of_all, starts, starts + lengths)
        distinct, numbers = np.unique(sources, return_inverse=True)
        listed_of = [self.readings(source)[0].listed for source in distinct.tolist()]
        is_listed = np.array([listed is not None for listed in listed_of], np.bool_)
        parts = list[Spans]()
        rows = np.flatnonzero(is_listed[numbers])
        if len(rows):
            listed_sources = [listed for listed in listed_of if listed is not None]
            numbers_among_listed = (np.cumsum(is_listed) - 1)[numbers[rows]]
            stops = starts + lengths
            spans = locate_ranges(listed_sources, numbers_among_listed, starts[rows], stops[rows])
            parts.append(spans._replace(rows=rows[spans.rows]))
        others = np.flatnonzero(~is_listed[numbers])
        for source, indices in by_value(sources[others]):
            rows = others[indices]
            counts = lengths if isinstance(lengths, int) else lengths[rows]
            parts += _locate_in_readings(self.readings(source), rows, starts[rows], counts)
        return join_spans(parts)


def _list_source(reading: Reading) -> ListedSource | None:
    """Return the value of `Reading.listed` for a reading."""
    parts = reading.blocks.parts
    order = reading.order
    if len(parts) > 1 or not isinstance(order, ListedOrder) or not order.has_stretches:
        return None
    first_block = reading.first_block + reading.blocks.first_block
    return ListedSource(order, reading.shift, first_block, int(parts["skip"][0]))


def _locate_in_readings(
    readings: Sequence[Reading], rows: Int64s, starts: Int64s, lengths: int | Int64s
) -> list[Spans]:
    """Locate the tokens of samples of one source.

    Args:
        rows: int64 [n], rows of the result.
        starts: int64 [n], position of the first token of each sample.
        lengths: tokens per sample: one number, or int64 [n].
    """
    if len(readings) == 1:
        return [_locate(readings[0], rows, starts, lengths)]
    parts = list[Spans]()
    stops = starts + lengths
    # A reading reads the part of a sample from the end of the previous reading to its own end
    begins = np.maximum(starts, readings[0].position)
    for reading in readings:
        ends = np.full(len(rows), reading.stop)
        if reading.extra:
            # The extra token of the sample that ends at the reading's end is also read here
            ends_here = (starts < reading.stop) & (stops == reading.stop + reading.extra)
            ends += reading.extra * ends_here
        inside = np.flatnonzero(begins < np.minimum(stops, ends))
        if len(inside):
            counts = np.minimum(stops, ends) - begins
            parts.append(_locate(reading, rows[inside], begins[inside], counts[inside]))
        begins = np.maximum(starts, ends)
    return parts


def _locate(reading: Reading, rows: Int64s, starts: Int64s, lengths: int | Int64s) -> Spans:
    """Locate tokens that one reading reads; see `_locate_in_readings` for the arguments."""
    spans = reading.order.spans(starts + reading.shift, lengths)
    clips = reading.blocks.clips(spans.blocks)
    return Spans(
        rows[spans.rows],
        spans.epochs,
        reading.index_blocks(spans.blocks),
        spans.starts + clips,
        spans.stops + clips,
    )
