"""The positions at which the epochs of sources begin. Epochs of a source may have different lengths
if a run's stages read several snapshots of the index.

The position of a token of a source is the number of the source's tokens before it, over all epochs.
When a stage changes the snapshot or the order, a source finishes the epoch that it has begun, and
begins the next epoch in the new snapshot or order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
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
    """Position of the segment's first token."""
    epoch: int
    """Number of the segment's first epoch."""
    snapshot: str
    """Digest of the snapshot."""
    order: str
    """A name of `ORDERS`."""
    tokens: int
    """Number of tokens of an epoch; 0 if the snapshot does not have the source."""
    offset: int = 0
    """Number of tokens of the first epoch that earlier segments have read, as this segment counts
    them."""
    withdrawn: tuple[str, ...] = ()
    """Digests of later snapshots. Files that are missing in one of these snapshots are left out of
    the epochs."""

    @property
    def epochs_before(self) -> Fraction:
        """Number of epochs before the segment's position, as this segment counts them."""
        return self.epoch + (Fraction(self.offset, self.tokens) if self.tokens else Fraction(0))

    def own_position(self, position: int) -> int:
        """Return the position that a token would have if all epochs were like those of the
        segment."""
        return position - self.position + self.offset + self.epoch * self.tokens


@dataclass(frozen=True, slots=True)
class Epochs:
    """The epochs of a split's sources."""

    segments: tuple[tuple[Segment, ...], ...]
    """The segments of each source, [num_sources], in the order of their positions; a source has at
    least one."""

    def start(self, source: int, epoch: int) -> int:
        """Return the position at which an epoch begins."""
        segments = self.segments[source]
        segment = segments[0]
        for candidate in segments[1:]:
            # A segment with the rest of an epoch, without withdrawn files, does not begin the epoch
            if candidate.epoch < epoch or (candidate.epoch == epoch and not candidate.withdrawn):
                segment = candidate
        return segment.position - segment.offset + (epoch - segment.epoch) * segment.tokens

    def count(self, source: int, tokens: int) -> Fraction:
        """Return the number of epochs in the first `tokens` tokens of a source; 0 if the source has
        no tokens."""
        segment = _find_segment(self.segments[source], tokens)
        return (
            Fraction(segment.own_position(tokens), segment.tokens)
            if segment.tokens
            else Fraction(segment.epoch)
        )

    def find_position(self, source: int, epochs: Fraction, *, before: int | None = None) -> int:
        """Return the position up to which a source's tokens make at most `epochs` epochs: the
        inverse of `count`.

        Args:
            before: leave out segments that begin at this position or later. The epochs are then
                those that were planned when the source had been read up to this position.
        """
        segments = self.segments[source]
        if before is not None:
            segments = (
                tuple(candidate for candidate in segments if candidate.position < before)
                or segments[:1]
            )
        number = max(
            0, bisect_right([candidate.epochs_before for candidate in segments], epochs) - 1
        )
        segment = segments[number]
        tokens_since = int((epochs - segment.epoch) * segment.tokens)
        position = segment.position - segment.offset + tokens_since
        if number + 1 < len(segments):
            return min(position, segments[number + 1].position)
        return position

    def count_withdrawn(self, source: int) -> int:
        """Return the number of tokens of begun epochs that are not read because their files were
        withdrawn."""
        return sum(
            _count_withdrawn(*pair)
            for pair in pairwise(self.segments[source])
            if not _breaks_off(*pair)
        )

    def list_unread(self, source: int) -> list[tuple[Segment, int]]:
        """Return the segments that begin before the previous segment has read its last epoch to the
        end. With each segment, return the number of tokens of that epoch that are not read although
        their files exist; see `Stage.whole_epochs`."""
        pairs = pairwise(self.segments[source])
        return [
            (segment, _count_left(before, segment))
            for before, segment in pairs
            if _breaks_off(before, segment)
        ]


def _find_segment(segments: Sequence[Segment], position: int) -> Segment:
    """Return the segment that contains a position."""
    if len(segments) == 1:
        return segments[0]
    return segments[bisect_right([segment.position for segment in segments], position) - 1]


def _count_withdrawn(before: Segment, segment: Segment) -> int:
    """Return the number of tokens of the last epoch before a segment that are not read because
    their files were withdrawn."""
    if before.tokens == 0 or segment.position == 0:
        return 0
    left = _count_left(before, segment)
    if left and segment.withdrawn:  # the segment reads the tokens whose files are still there
        left -= segment.tokens - segment.offset
    return left


def _count_left(before: Segment, segment: Segment) -> int:
    """Return the number of tokens of the last epoch of segment `before` that come after the start
    of the next segment, and so are not read by `before`. Epochs of `before` must have tokens."""
    if before.withdrawn:
        return max(0, before.position + before.tokens - before.offset - segment.position)
    return -before.own_position(segment.position) % before.tokens


def _breaks_off(before: Segment, segment: Segment) -> bool:
    """Return whether a segment begins an epoch before segment `before` has read its epoch of the
    same number to the end, although no file of that epoch is withdrawn."""
    if before.tokens == 0 or segment.withdrawn:
        return False
    return before.own_position(segment.position) > segment.epoch * before.tokens


class Withdrawals(Protocol):
    """The tokens that a source loses if a snapshot lacks some of its files."""

    def loses_files(self, segment: Segment, index: str) -> bool:
        """Return whether a snapshot has the source, but not all files that the segment's epochs
        read."""
        ...

    def count_left(self, segment: Segment, index: str, epoch: int, token: int) -> tuple[int, int]:
        """Count the tokens of an epoch of a segment, without those of files that a snapshot lacks.
        Return their number, and the number of them before token number `token` of the epoch, where
        `token` is counted over all files."""
        ...


class ReadBefore(NamedTuple):
    """The tokens that a run has read of its sources before a stage, and what follows from them."""

    tokens: list[int]
    """The number of tokens that were read of each source, [num_sources]."""
    epochs: Epochs
    """The sources' epochs, including those of the stage."""
    first_sample: int
    """The stage's first sample. If the stage begins with a drain, it is the first one after the
    drain; see `plan_stages`."""
    drain: int | None = None
    """The stage's `Stage.drain`."""
    whole_epochs: bool = False
    """The stage's `Stage.whole_epochs`."""


class EpochsBuilder:
    """A builder of the epochs of a run's sources, used while the stages are planned one after
    another.

    Args:
        tokens: number of tokens of an epoch of each source, [num_sources], by the digest of the
            snapshot; 0 if the snapshot does not have the source.
        index: digest of the first stage's snapshot.
        order: order of the first stage.
        extra: number of tokens that a sample shares with the next sample of its source.
        withdrawals: for each source, what it loses if a snapshot lacks some of its files; empty if
            the run withdraws nothing.
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
        self._segments = [
            [Segment(0, 0, index, order, int(epoch_tokens))] for epoch_tokens in tokens[index]
        ]
        self._index = index
        self._order = order
        self._shift = np.zeros(len(self._segments), np.int64)
        """The number that `place` adds to the positions of each source, int64 [num_sources]."""
        self._epoch_tokens = np.array(tokens[index], np.int64)
        """Number of tokens of an epoch of each source in the current snapshot, int64
        [num_sources]."""

    def current_epoch_loses_files(
        self, index: str, cursor: Int64s, *, begun: bool = True, rests: bool = False
    ) -> npt.NDArray[np.bool_]:
        """Return whether a snapshot lacks files of the epoch that each source is in at position
        `cursor`, int64 [num_sources]: bool [num_sources].

        Args:
            begun: count only epochs of which something was read.
            rests: also count an epoch that withdrawn files have made shorter, even if nothing was
                read of the files that are still there.
        """

        def list_current(source: int) -> list[Segment]:
            position = int(cursor[source])
            segment = _find_segment(self._segments[source], position)
            is_begun = (
                position > 0
                and segment.tokens > 0
                and (
                    segment.own_position(position) % segment.tokens or (rests and segment.withdrawn)
                )
            )
            return [segment] if is_begun or not begun else []

        return self._lose_files(index, list_current)

    def begun_epochs_lose_files(
        self, index: str, cursor: Int64s, begun: Int64s
    ) -> npt.NDArray[np.bool_]:
        """Return whether a snapshot lacks files of an epoch that has tokens of each source at
        positions [cursor, begun), arrays of int64 [num_sources]: bool [num_sources]."""

        def list_begun(source: int) -> list[Segment]:
            segments = self._segments[source]
            stops = [*(after.position for after in segments[1:]), int(begun[source])]
            return [
                segment
                for segment, stop in zip(segments, stops, strict=True)
                if max(segment.position, cursor[source]) < min(stop, begun[source])
            ]

        return self._lose_files(index, list_begun)

    def next_epochs_lose_files(self, index: str, begun: Int64s) -> npt.NDArray[np.bool_]:
        """Return whether a snapshot lacks files of an epoch that a source would read at its
        position `begun`, int64 [num_sources], or later: bool [num_sources]."""

        def list_next(source: int) -> list[Segment]:
            segments = self._segments[source]
            return segments[segments.index(_find_segment(segments, int(begun[source]))) :]

        return self._lose_files(index, list_next)

    def _lose_files(
        self, index: str, list_needed: Callable[[int], list[Segment]]
    ) -> npt.NDArray[np.bool_]:
        """Return whether a snapshot lacks files of the segments that `list_needed` returns for each
        source, given its number: bool [num_sources]."""
        lost = np.zeros(len(self._segments), bool)
        if index != self._index:
            for source, withdrawals in enumerate(self._withdrawals):
                needed = list_needed(source)
                lost[source] = any(withdrawals.loses_files(segment, index) for segment in needed)
        return lost

    def start_depends_on_whole(self, index: str, order: str, begun: Int64s, cursor: Int64s) -> bool:
        """Return whether the argument `whole` of `enter` makes a difference to where the next epoch
        of a source begins."""
        if (index, order) == (self._index, self._order):
            return False
        lost = self.current_epoch_loses_files(index, cursor)
        if (lost != self.current_epoch_loses_files(index, cursor, rests=True)).any():
            return True
        for source in np.flatnonzero(~lost).tolist():
            begins = int(begun[source])
            usual = self._find_next_epoch(source, begins, index, whole=False)
            whole = self._find_next_epoch(source, begins, index, whole=True)
            if (usual.position, usual.epoch) != (whole.position, whole.epoch):
                return True
        return False

    def _find_next_epoch(self, source: int, begun: int, index: str, *, whole: bool) -> Segment:
        """Return the first epoch of a source that is not begun when the tokens before position
        `begun` have been read, as a segment that begins with this epoch.

        The extra token of the last sample before `begun` may belong to an epoch of files that are
        gone; that alone is no reason to read the whole epoch.
        """
        segments = self._segments[source]
        extra = self._extra
        if whole and index != self._index and self._withdrawals:
            next_segment = _find_segment(segments, begun)
            extra = 0 if self._withdrawals[source].loses_files(next_segment, index) else extra
        return _end_of_epoch(segments, begun, extra, whole=whole)

    def enter(self, index: str, order: str, begun: Int64s, cursor: Int64s, *, whole: bool) -> None:
        """Begin a stage: each source continues in its snapshot and order from the next epoch on.

        Args:
            begun: int64 [num_sources], the ends of the samples that earlier stages have begun to
                read from each source; equal to `cursor` for sources that lose files.
            cursor: int64 [num_sources], positions of the sources.
            whole: see `Stage.whole_epochs`.
        """
        if (index, order) == (self._index, self._order):
            return
        lost = self.current_epoch_loses_files(index, cursor, rests=whole)
        is_other_index = index != self._index
        for source, segments in enumerate(self._segments):
            added = list[Segment]()
            if lost[source]:
                added, start = self._leave_out(source, int(cursor[source]), index)
            else:
                start = self._find_next_epoch(source, int(begun[source]), index, whole=whole)
            begin = (added[0] if added else start).position
            begins_here = [
                segment for segment in segments if segment.position == begin and segment.tokens
            ]
            while segments and segments[-1].position >= begin:
                segments.pop()
            # The first segment that begins here stays, even if no sample begins in it: the sample
            # that ends here may have its extra token in it
            if self._extra and 0 < begin == begun[source]:
                segments += begins_here[:1]
            tokens = int(self._tokens[index][source])
            segments += [
                *added,
                start._replace(snapshot=index, order=order, tokens=tokens, offset=0, withdrawn=()),
            ]
        self._index = index
        self._order = order
        if is_other_index:
            self._epoch_tokens = np.array(self._tokens[index], np.int64)
            self._shift = np.array([last.own_position(0) for *_, last in self._segments], np.int64)

    def _leave_out(self, source: int, position: int, index: str) -> tuple[list[Segment], Segment]:
        """Return the rest of the current epoch without the files that a snapshot lacks, as one
        segment, or none if there is no rest; and the next epoch, as a segment that begins with
        it."""
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
        next_epoch = left._replace(position=position + tokens - read, epoch=epoch + 1)
        return [left] if tokens > read else [], next_epoch

    def place(self, cursor: Int64s) -> tuple[Int64s, Int64s]:
        """Return the positions of the sources and the tokens of their epochs for an interleaving,
        arrays of int64 [num_sources].

        An interleaving assumes that all epochs of a source are equally long, so the positions are
        shifted such that epochs end in the right places from the last change of the snapshot on.
        """
        positions = cursor + self._shift
        tokens = np.maximum(1, self._epoch_tokens)
        return np.where(positions < 0, positions % tokens, positions), self._epoch_tokens

    def finish(self) -> Epochs:
        """Return the epochs of the stages so far."""
        return Epochs(tuple(map(tuple, self._segments)))


def _end_of_epoch(segments: Sequence[Segment], begun: int, extra: int, *, whole: bool) -> Segment:
    """Return the first epoch that is not begun when the tokens before position `begun` + `extra`
    have been read, as a segment that begins with this epoch.

    Args:
        whole: whether an epoch at `begun` that withdrawn files have made shorter ends at its new
            end; see `Stage.whole_epochs`.
    """
    if begun == 0:
        return segments[0]
    segment = _find_segment(segments, begun if whole else begun + extra - 1)
    if segment.tokens == 0:
        return segment
    if segment.withdrawn:  # it has one epoch, without the files that are gone
        end = segment.position + segment.tokens - segment.offset
        return segment._replace(position=end, epoch=segment.epoch + 1)
    epoch = -(-segment.own_position(begun + extra) // segment.tokens)
    start = segment.position - segment.offset + (epoch - segment.epoch) * segment.tokens
    return segment._replace(position=start, epoch=epoch)
