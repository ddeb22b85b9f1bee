"""Where the epochs of sources begin: not after equally many tokens, where a run's stages stand on several snapshots of the index.

The position of a token of a source counts the tokens of all its epochs before it. Where a stage changes snapshot or order, a
source finishes the epoch that it has begun, and begins the next one in the new snapshot or order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


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


@dataclass(frozen=True, slots=True)
class Epochs:
    """The epochs of a split's sources."""

    segments: tuple[tuple[Segment, ...], ...]
    """[num_sources], at least one each, which follow each other."""

    @classmethod
    def of_one(cls, index: str, order: str, tokens: Sequence[int]) -> Epochs:
        """Epochs that do not change, of `tokens` [num_sources]."""
        return cls(tuple((Segment(0, 0, index, order, int(each)),) for each in tokens))

    def start(self, source: int, epoch: int) -> int:
        """The position at which an epoch begins."""
        segment = _last(self.segments[source], epoch, "epoch")
        return segment.position + (epoch - segment.epoch) * segment.tokens

    def position(self, source: int, epochs: Fraction) -> Fraction:
        """The position after so many epochs."""
        whole = int(epochs)
        first = self.start(source, whole)
        return first + (epochs - whole) * (self.start(source, whole + 1) - first)

    def count(self, source: int, tokens: int) -> Fraction:
        """How many epochs the first tokens of a source are; 0 for a source without tokens."""
        segment = _last(self.segments[source], tokens, "position")
        if segment.tokens == 0:
            return Fraction(segment.epoch)
        return segment.epoch + Fraction(tokens - segment.position, segment.tokens)


def _last(segments: Sequence[Segment], value: int, field: str) -> Segment:
    """The last segment whose field is at most `value`."""
    if len(segments) == 1:
        return segments[0]
    return segments[bisect_right([getattr(each, field) for each in segments], value) - 1]


class ReadBefore(NamedTuple):
    """What a run has read of its sources before a stage, [num_sources] each."""

    tokens: list[int]
    places: list[int]
    """As `tokens`, had all epochs before been like those of the stage's snapshot."""
    first_sample: int
    """The stage's first sample: after its start where a drain comes first; see `plan_stages`."""


class EpochsBuilder:
    """The epochs of a run's sources, made while its stages are planned one after another.

    Args:
        tokens: of an epoch of each source, [num_sources], by the snapshot's digest; 0 where it does not have the source.
        extra: tokens that a sample has in addition to those by which the next one is further.
    """

    def __init__(self, tokens: Mapping[str, Sequence[int]], index: str, order: str, extra: int) -> None:
        self._tokens, self._extra = tokens, extra
        self._segments = [list(each) for each in Epochs.of_one(index, order, tokens[index]).segments]
        self._now = index, order
        self._shift = np.zeros(len(self._segments), np.int64)
        self._epoch_tokens = np.array(tokens[index], np.int64)

    def enter(self, index: str, order: str, begun: Int64s) -> None:
        """A stage begins; before it, tokens of each source up to positions `begun` int64 [num_sources] may have been read."""
        if (index, order) == self._now:
            return
        is_other_index = index != self._now[0]
        self._now = index, order
        for source, (segments, position) in enumerate(zip(self._segments, begun.tolist(), strict=True)):
            start = _end_of_epoch(segments, position, self._extra)
            while segments and segments[-1].position >= start.position:
                segments.pop()
            segments.append(start._replace(snapshot=index, order=order, tokens=int(self._tokens[index][source])))
        if is_other_index:
            self._epoch_tokens = np.array(self._tokens[index], np.int64)
            self._shift = np.array([last.epoch * last.tokens - last.position for *_, last in self._segments], np.int64)

    def place(self, cursor: Int64s) -> tuple[Int64s, Int64s]:
        """Positions, and tokens of an epoch, for an interleaving, to which all epochs are equally long: int64 [num_sources] each.

        Positions are shifted so that epochs end where they do from the last change of the snapshot on.
        """
        places, tokens = cursor + self._shift, np.maximum(1, self._epoch_tokens)
        return np.where(places < 0, places % tokens, places), self._epoch_tokens

    def finish(self) -> Epochs:
        """The epochs of the stages so far."""
        return Epochs(tuple(map(tuple, self._segments)))


def _end_of_epoch(segments: Sequence[Segment], begun: int, extra: int) -> Segment:
    """Where the first epoch begins of which nothing was read, if tokens before position `begun`, and `extra` ones, were."""
    if begun == 0:
        return segments[0]
    segment = _last(segments, begun + extra - 1, "position")
    if segment.tokens == 0:
        return segment
    epochs = -(-(begun + extra - segment.position) // segment.tokens)
    return segment._replace(position=segment.position + epochs * segment.tokens, epoch=segment.epoch + epochs)
