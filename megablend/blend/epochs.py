"""Where the epochs of sources begin: not at equal distances,
if a run's stages read several snapshots of the index.

The position of a token of a source counts the tokens of all its epochs before it. When a stage
changes snapshot or order, a source finishes the epoch that it has begun, and begins the next one in
the new snapshot or order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s


class Segment(NamedTuple):
    """Consecutive epochs of a source that are read from one snapshot in one order."""

    position: int
    """Where it begins."""
    epoch: int
    """The number of its first epoch."""
    snapshot: str
    """Digest of the snapshot."""
    order: str
    """A name of `ORDERS`."""
    tokens: int
    """Of an epoch; 0 where the snapshot does not have the source."""
    offset: int = 0
    """Tokens of the first epoch, as this segment counts them, that the segment before has read."""
    withdrawn: tuple[str, ...] = ()
    """Digests of snapshots: files that one of them lacks are not read."""

    @property
    def epochs_before(self) -> Fraction:
        """Epochs before its position, as this segment counts them."""
        return self.epoch + (Fraction(self.offset, self.tokens) if self.tokens else Fraction(0))

    def own_position(self, position: int) -> int:
        """A position as it would be if all epochs were like those of the segment."""
        return position - self.position + self.offset + self.epoch * self.tokens


@dataclass(frozen=True, slots=True)
class Epochs:
    """The epochs of a split's sources."""

    segments: tuple[tuple[Segment, ...], ...]
    """[num_sources], at least one each, which follow each other."""

    def start(self, source: int, epoch: int) -> int:
        """The position at which an epoch begins."""
        segments = self.segments[source]
        segment = segments[0]
        for each in segments[1:]:
            if each.epoch < epoch or (each.epoch == epoch and not each.withdrawn):
                segment = each
        return segment.position - segment.offset + (epoch - segment.epoch) * segment.tokens

    def count(self, source: int, tokens: int) -> Fraction:
        """How many epochs the first tokens of a source make; 0 for a source without tokens."""
        segment = _find_segment(self.segments[source], tokens)
        return (
            Fraction(segment.own_position(tokens), segment.tokens)
            if segment.tokens
            else Fraction(segment.epoch)
        )

    def find_position(self, source: int, epochs: Fraction, *, before: int | None = None) -> int:
        """The position up to which a source's tokens make at most this many epochs:
        the inverse of `count`.

        Args:
            before: epochs are those that were planned when the source was read to this position,
                whatever changed there.
        """
        segments = self.segments[source]
        if before is not None:
            segments = tuple(each for each in segments if each.position < before) or segments[:1]
        number = max(0, bisect_right([each.epochs_before for each in segments], epochs) - 1)
        segment = segments[number]
        after = segments[number + 1 : number + 2]
        position = (
            segment.position - segment.offset + int((epochs - segment.epoch) * segment.tokens)
        )
        return min([position, *(each.position for each in after)])

    def count_withdrawn(self, source: int) -> int:
        """Tokens of epochs that were begun but are not read to their end,
        since their files were withdrawn."""
        return sum(
            _count_withdrawn(*pair)
            for pair in pairwise(self.segments[source])
            if not _breaks_off(*pair)
        )

    def list_unread(self, source: int) -> list[tuple[Segment, int]]:
        """Segments before whose start an epoch is broken off, and how many tokens of
        that epoch are not read although their files exist: see `Stage.whole_epochs`."""
        pairs = pairwise(self.segments[source])
        return [
            (segment, _count_left(before, segment))
            for before, segment in pairs
            if _breaks_off(before, segment)
        ]


def _find_segment(segments: Sequence[Segment], position: int) -> Segment:
    """The segment that has a position."""
    if len(segments) == 1:
        return segments[0]
    return segments[bisect_right([each.position for each in segments], position) - 1]


def _count_withdrawn(before: Segment, segment: Segment) -> int:
    """How many tokens of a segment's last epoch are not read because they were withdrawn."""
    if before.tokens == 0 or segment.position == 0:
        return 0
    left = _count_left(before, segment)
    return left - (segment.tokens - segment.offset if segment.withdrawn else 0) if left else 0


def _count_left(before: Segment, segment: Segment) -> int:
    """Tokens of the epoch in which a segment ends, which must have tokens, that come after its
    end."""
    if before.withdrawn:
        return max(0, before.position + before.tokens - before.offset - segment.position)
    return -before.own_position(segment.position) % before.tokens


def _breaks_off(before: Segment, segment: Segment) -> bool:
    """Whether an epoch is begun while another one of the same number is not over,
    of which no file is withdrawn."""
    if before.tokens == 0 or segment.withdrawn:
        return False
    return before.own_position(segment.position) > segment.epoch * before.tokens


class Withdrawals(Protocol):
    """What a source loses if a snapshot lacks files that it had."""

    def loses_files(self, segment: Segment, index: str) -> bool:
        """Whether a snapshot has the source, but not all files that the segment's epochs read."""
        ...

    def count_left(self, segment: Segment, index: str, epoch: int, token: int) -> tuple[int, int]:
        """Tokens of a segment's epochs without the files that a snapshot lacks;
        and how many of these come before a given token of an epoch, counted over all files."""
        ...


class ReadBefore(NamedTuple):
    """What a run has read of its sources before a stage, [num_sources] each."""

    tokens: list[int]
    epochs: Epochs
    """Where the sources' epochs begin, the stage's as well."""
    first_sample: int
    """The stage's first sample: after its start where a drain comes first; see `plan_stages`."""
    drain: int | None = None
    """See `Stage.drain`."""
    whole_epochs: bool = False
    """See `Stage.whole_epochs`."""


class EpochsBuilder:
    """The epochs of a run's sources, made while its stages are planned one after another.

    Args:
        tokens: of an epoch of each source, [num_sources], by the snapshot's digest; 0 if it does
            not have the source.
        extra: tokens that a sample has in addition to those by which the next one is further.
    """

    def __init__(
        self,
        tokens: Mapping[str, Sequence[int]],
        index: str,
        order: str,
        extra: int,
        withdrawals: Sequence[Withdrawals] = (),
    ) -> None:
        self._tokens = tokens
        self._extra = extra
        self._withdrawals = withdrawals
        self._segments = [[Segment(0, 0, index, order, int(each))] for each in tokens[index]]
        self._now = index, order
        self._shift = np.zeros(len(self._segments), np.int64)
        self._epoch_tokens = np.array(tokens[index], np.int64)

    def loses_files(
        self, index: str, cursor: Int64s, *, begun: bool = True, rests: bool = False
    ) -> npt.NDArray[np.bool_]:
        """Whether each source has begun an epoch, by position `cursor` int64 [num_sources],
        some of whose files a snapshot lacks: bool [num_sources].

        Args:
            begun: leave out sources of whose epoch nothing was read yet.
            rests: what files that are gone have left of an epoch is begun, even if of the files
                that are still there nothing was read yet.
        """
        lost = np.zeros(len(cursor), bool)
        if index == self._now[0]:
            return lost
        for source, each in enumerate(self._withdrawals):
            position = int(cursor[source])
            segment = _find_segment(self._segments[source], position)
            is_begun = (
                position > 0
                and segment.tokens > 0
                and (
                    segment.own_position(position) % segment.tokens or (rests and segment.withdrawn)
                )
            )
            lost[source] = bool(is_begun or not begun) and each.loses_files(segment, index)
        return lost

    def begun_loses_files(self, index: str, cursor: Int64s, begun: Int64s) -> npt.NDArray[np.bool_]:
        """Whether a snapshot lacks files of an epoch that each source reads from position `cursor`
        to before `begun`, int64 [num_sources]: bool [num_sources]."""
        lost = np.zeros(len(cursor), bool)
        for source, each in enumerate(self._withdrawals if index != self._now[0] else ()):
            segments = self._segments[source]
            stops = [*(after.position for after in segments[1:]), int(begun[source])]
            lost[source] = any(
                segment.position < begun[source]
                and cursor[source] < stop
                and cursor[source] < begun[source]
                and each.loses_files(segment, index)
                for segment, stop in zip(segments, stops, strict=True)
            )
        return lost

    def coming_loses_files(self, index: str, begun: Int64s) -> npt.NDArray[np.bool_]:
        """Whether a snapshot lacks files of an epoch that each source would read from position
        `begun` int64 [num_sources] on: bool [num_sources]."""
        lost = np.zeros(len(begun), bool)
        for source, each in enumerate(self._withdrawals if index != self._now[0] else ()):
            segments = self._segments[source]
            first = segments.index(_find_segment(segments, int(begun[source])))
            lost[source] = any(each.loses_files(segment, index) for segment in segments[first:])
        return lost

    def leaves_rest(self, index: str, order: str, begun: Int64s, cursor: Int64s) -> bool:
        """Whether `enter` would begin the next epoch of a source at another position
        if it were not told to read epochs `whole`."""
        if (index, order) == self._now:
            return False
        lost = self.loses_files(index, cursor)
        if (lost != self.loses_files(index, cursor, rests=True)).any():
            return True
        for source in np.flatnonzero(~lost).tolist():
            begins = int(begun[source])
            old, new = (
                self._find_next_epoch(source, begins, index, whole=whole) for whole in (False, True)
            )
            if (old.position, old.epoch) != (new.position, new.epoch):
                return True
        return False

    def _find_next_epoch(self, source: int, begun: int, index: str, *, whole: bool) -> Segment:
        """Where a source begins the first epoch of which nothing was read,
        if tokens before position `begun` were.

        The extra token of the sample before it is no reason to read a whole epoch
        of files that are gone.
        """
        segments = self._segments[source]
        extra = self._extra
        if whole and index != self._now[0] and self._withdrawals:
            coming = _find_segment(segments, begun)
            extra = 0 if self._withdrawals[source].loses_files(coming, index) else extra
        return _end_of_epoch(segments, begun, extra, whole=whole)

    def enter(self, index: str, order: str, begun: Int64s, cursor: Int64s, *, whole: bool) -> None:
        """Begin a stage, with the sources at positions `cursor` int64 [num_sources]. Stages
        before it may have read tokens up to positions `begun` int64 [num_sources], the same
        for sources that lose files.

        Args:
            whole: see `Stage.whole_epochs`.
        """
        if (index, order) == self._now:
            return
        lost = self.loses_files(index, cursor, rests=whole)
        is_other_index = index != self._now[0]
        for source, segments in enumerate(self._segments):
            added = list[Segment]()
            if lost[source]:
                added, start = self._leave_out(source, int(cursor[source]), index)
            else:
                start = self._find_next_epoch(source, int(begun[source]), index, whole=whole)
            begin = (added[0] if added else start).position
            # A sample that ends here may have its extra token of a rest that is read no more
            is_rest = bool(lost[source] and _find_segment(segments, begin).withdrawn)
            while segments and segments[-1].position >= begin + is_rest:
                segments.pop()
            tokens = int(self._tokens[index][source])
            segments += [
                *added,
                start._replace(snapshot=index, order=order, tokens=tokens, offset=0, withdrawn=()),
            ]
        self._now = index, order
        if is_other_index:
            self._epoch_tokens = np.array(self._tokens[index], np.int64)
            self._shift = np.array([last.own_position(0) for *_, last in self._segments], np.int64)

    def _leave_out(self, source: int, position: int, index: str) -> tuple[list[Segment], Segment]:
        """What is left of an epoch without the files that a snapshot lacks, if anything; and where
        the next epoch begins."""
        segment = _find_segment(self._segments[source], position)
        epoch, token = divmod(segment.own_position(position), segment.tokens)
        tokens, read = self._withdrawals[source].count_left(segment, index, epoch, token)
        left = segment._replace(
            position=position,
            epoch=epoch,
            tokens=tokens,
            offset=read,
            withdrawn=(*segment.withdrawn, index),
        )
        return [left] if tokens > read else [], left._replace(
            position=position + tokens - read, epoch=epoch + 1
        )

    def place(self, cursor: Int64s) -> tuple[Int64s, Int64s]:
        """Positions and tokens of an epoch for an interleaving,
        which takes all epochs to be equally long: int64 [num_sources] each.

        Positions are shifted so that epochs end where they do
        from the last change of the snapshot on.
        """
        places = cursor + self._shift
        tokens = np.maximum(1, self._epoch_tokens)
        return np.where(places < 0, places % tokens, places), self._epoch_tokens

    def finish(self) -> Epochs:
        """The epochs of the stages so far."""
        return Epochs(tuple(map(tuple, self._segments)))


def _end_of_epoch(segments: Sequence[Segment], begun: int, extra: int, *, whole: bool) -> Segment:
    """Where the first epoch begins of which nothing was read, if tokens before position `begun`,
    and `extra` ones, were.

    Args:
        whole: of an epoch that files which are gone have made shorter from `begun` on, the end that
            it has now.
    """
    if begun == 0:
        return segments[0]
    segment = _find_segment(segments, begun if whole else begun + extra - 1)
    if segment.tokens == 0:
        return segment
    # What is left of one epoch, perhaps all of its files that are still there
    if segment.withdrawn:
        end = segment.position + segment.tokens - segment.offset
        return segment._replace(position=end, epoch=segment.epoch + 1)
    epoch = -(-segment.own_position(begun + extra) // segment.tokens)
    start = segment.position - segment.offset + (epoch - segment.epoch) * segment.tokens
    return segment._replace(position=start, epoch=epoch)
