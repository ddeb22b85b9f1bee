"""The plan of a run: the plans of its stages, one after another. The plan of a stage is made when
it is first needed.

When an amendment cuts a stage, the ordinals of later stages are *next* ordinals; `Tails` says which
ordinals they stand for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int32s, Int64s
from megablend.blend.epochs import Epochs
from megablend.blend.interleavings.base import (
    MAX_SAMPLES,
    LocatesMany,
    Plan,
    StageRequest,
    prefix_length,
    sample_numbers,
)
from megablend.blend.interleavings.registry import find_interleaving
from megablend.blend.interleavings.tails import Tails
from megablend.errors import PlanError
from megablend.lazy import cached_property


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """The input of the plan of a stage, or of a drain, and the plan's place in the run."""

    request: StageRequest
    """The request; its `first_sample` continues from the stages before."""
    cursor: Int64s
    """The position (see `Epochs`) at which each source's first sample of the stage begins, int64
    [num_sources]."""
    interleaving: str
    """A name of `INTERLEAVINGS`."""
    number: int
    """Number of the stage in the ledger. A schedule divides a stage into several planned stages
    with the same number. A drain has the number of the stage that it continues."""
    length: int
    """Number of samples of the stage: fewer than in the request if the stage was cut."""
    plan: Plan | None = None
    """The plan, if it has been made."""
    cut_edges: Int64s | None = None
    """`Tails.first`, `read` and `stop` of a stage that was cut, int64 [3, num_sources]; None for
    other stages."""
    dropped: Int64s | None = None
    """The end of the ordinals that earlier stages have begun, for each source that is no longer
    read; 0 for other sources: int64 [num_sources]. None if all sources are read."""

    @property
    def start(self) -> int:
        """Number of the first sample."""
        return self.request.first_sample

    @property
    def stop(self) -> int:
        """Number of the sample after the last one."""
        return self.request.first_sample + self.length

    @property
    def read(self) -> Int64s:
        """Number of samples of each source that the stage reads: int64 [num_sources]."""
        return self.request.totals if self.cut_edges is None else self.cut_edges[1]


class TokenRange(NamedTuple):
    """Consecutive samples of a source that begin `step` tokens apart."""

    first: int
    stop: int
    """The samples have the ordinals [first, stop)."""
    token: int
    """First token of the first sample, counted over all epochs."""
    step: int
    """Number of tokens from the start of one sample to the start of the next."""


class StagesPlan(LocatesMany):
    """A plan of several stages; a source's ordinals continue from stage to stage.

    Args:
        stages: the stages, in order.
        epochs: the sources' epochs, or a function that returns them; needed only to convert
            positions to epochs.

    Raises: PlanError if there are no stages, or too many samples.
    """

    def __init__(
        self, stages: Sequence[PlannedStage], epochs: Epochs | Callable[[], Epochs] | None = None
    ) -> None:
        if not stages:
            raise PlanError("a plan needs at least one stage")
        self.stages = tuple(stages)
        """The stages in order: contiguous ranges of the run's samples with one request each."""
        self._epochs = epochs
        self._plans = dict[int, Plan]()
        self.num_sources = len(stages[0].request.totals)
        self.num_samples = stages[-1].stop
        if self.num_samples > MAX_SAMPLES:
            raise PlanError(
                f"{self.num_samples} samples requested; a plan can have at most {MAX_SAMPLES}: request fewer"
            )
        self._tails = dict[int, Tails]()

    def __getstate__(self) -> dict[str, Any]:
        # Other threads may add plans and cached properties while these are pickled
        copies = {"_plans": dict(self._plans), "_tails": dict(self._tails)}
        return {**self.__dict__, **copies}

    @property
    def epochs(self) -> Epochs:
        """The epochs of the sources."""
        if callable(self._epochs):
            self._epochs = self._epochs()
        assert self._epochs is not None
        return self._epochs

    @cached_property
    def _starts(self) -> list[int]:
        """The first sample of each stage."""
        return [stage.start for stage in self.stages]

    @cached_property
    def _samples_before(self) -> Int64s:
        """Number of samples of each source before each stage, and in all stages: int64 [num_stages
        + 1, num_sources]."""
        before = np.zeros((len(self.stages) + 1, self.num_sources), np.int64)
        np.cumsum(np.stack([stage.read for stage in self.stages]), axis=0, out=before[1:])
        return before

    @cached_property
    def _first_ordinals(self) -> Int64s:
        """The first ordinal of each source that belongs to each stage, int64 [num_stages + 1,
        num_sources]. Like `_samples_before`, but the ordinals of a dropped source that earlier
        stages have begun belong to these earlier stages, even if they are not read."""
        first = self._samples_before
        for number, stage in enumerate(self.stages):
            if stage.dropped is not None:
                if first is self._samples_before:
                    first = first.copy()
                np.maximum(first[number:], stage.dropped, out=first[number:])
        return first

    @cached_property
    def _tail_stops(self) -> dict[int, Int64s]:
        """The end of each source's tails (ordinals of begun periods that later stages read), int64
        [num_sources], by the number of each stage that was cut and has tails."""
        stops = dict[int, Int64s]()
        for number, stage in enumerate(self.stages):
            edges = stage.cut_edges
            if edges is not None and (edges[2] > edges[1]).any():
                stops[number] = self._samples_before[number] + edges[2]
        return stops

    @cached_property
    def _stop_ordinals(self) -> Int64s:
        """The end of each source's ordinals, int64 [num_sources]; after a cut, some ordinals below
        it may not be read."""
        stops: Int64s = np.max([self._samples_before[-1], *self._tail_stops.values()], axis=0)
        return stops

    @cached_property
    def _first_tokens(self) -> Int64s:
        """The position at which each source's first sample of each stage begins, int64 [num_stages,
        num_sources]."""
        return np.stack([stage.cursor for stage in self.stages])

    @cached_property
    def _sample_tokens(self) -> Int64s:
        """Number of tokens from one sample of each stage to the next, int64 [num_stages]."""
        return np.array([stage.request.sample_tokens for stage in self.stages], np.int64)

    def locate_many(self, ks: npt.ArrayLike) -> tuple[Int32s, Int64s]:
        """Return the source of each of the samples `ks`, and the number of the sample within its
        source (int32 [n], int64 [n]). Raises: IndexError if a sample is out of range."""
        if len(self.stages) == 1:
            return self.plan_of(0).locate_many(ks)
        numbers = sample_numbers(ks, self.num_samples)
        if not numbers.size:
            return np.zeros(numbers.shape, np.int32), np.zeros(numbers.shape, np.int64)
        first = self._stage_of(int(numbers.min()))
        if self._stage_of(int(numbers.max())) == first:
            return self._locate_in(first, numbers)
        by_number = np.argsort(numbers, axis=None, kind="stable")
        sources = np.empty(numbers.size, np.int32)
        ordinals = np.empty(numbers.size, np.int64)
        ascending = numbers.ravel()[by_number]
        # Where each stage's samples end
        ends = np.searchsorted(ascending, [*self._starts[1:], self.num_samples])
        begin = 0
        for stage, end in enumerate(ends.tolist()):
            if begin < end:
                rows = by_number[begin:end]
                sources[rows], ordinals[rows] = self._locate_in(stage, ascending[begin:end])
            begin = end
        return sources.reshape(numbers.shape), ordinals.reshape(numbers.shape)

    def counts(self, n: int) -> Int64s:
        """Return how many of the first n samples come from each source: int64 [num_sources].
        Raises: IndexError if n is outside [0, num_samples]."""
        stage = self._stage_of(prefix_length(n, self.num_samples))
        if n == self.num_samples:  # known without a plan
            totals: Int64s = self._samples_before[-1].copy()
            return totals
        counts: Int64s = self._samples_before[stage] + self.plan_of(stage).counts(
            n - self._starts[stage]
        )
        return counts

    def find_samples(self, sources: Int32s, ordinals: Int64s) -> Int64s:
        """Return the numbers of the samples with these sources and ordinals: the inverse of
        `locate_many`. This is fastest if neighbours have the same source and ascending ordinals.

        Args:
            sources, ordinals: int32 [n] and int64 [n]; all sources must be in the plan.

        Returns: int64 [n], -1 for ordinals that the plan does not have.
        """
        ks = np.full(len(ordinals), -1, np.int64)
        pending = np.arange(len(ordinals))  # entries that no stage so far has
        current = ordinals  # ordinals of these entries; after a cut, their next ordinals
        for number in range(len(self.stages)):
            if not len(pending):
                break
            next_ordinals, is_later = self._advance(number, sources[pending], current)
            rows = pending[~is_later]
            if len(rows):
                local = current[~is_later] - self._samples_before[number][sources[rows]]
                ks[rows] = self._starts[number] + self.plan_of(number).samples_of(
                    sources[rows], local
                )
            pending = pending[is_later]
            current = next_ordinals[is_later]
        return ks

    def sample_of_count(self, source: int, ordinal: int) -> int | None:
        """Return the sample at which a source reaches as many samples as it has ordinals up to
        `ordinal`, whatever the ordinals of these samples are. Return None if the run ends
        before."""
        stage = int((self._first_ordinals[1:, source] <= ordinal).sum())
        if stage == len(self.stages) or ordinal < self._first_ordinals[stage, source]:
            return None
        before = int(ordinal - self._first_ordinals[stage, source])
        # An earlier stage has begun the ordinal, but it is never read, because its source was
        # withdrawn
        if before >= self.stages[stage].read[source]:
            return None
        return self._starts[stage] + self.plan_of(stage).nth_sample(source, before + 1)

    def nth_sample(self, source: int, n: int) -> int:
        """Return the n-th sample of a source in the order of samples; n is from 1 to the source's
        number of samples."""
        stage = int((self._samples_before[1:, source] < n).sum())
        before = int(self._samples_before[stage, source])
        return self._starts[stage] + self.plan_of(stage).nth_sample(source, n - before)

    def _advance(
        self, number: int, sources: Int32s, ordinals: Int64s
    ) -> tuple[Int64s, npt.NDArray[np.bool_]]:
        """Convert ordinals as a stage counts them, int64 [n], to ordinals as the next stage counts
        them.

        Returns: the next ordinals if the stage was cut, otherwise the same ordinals, int64 [n]; and
            whether each ordinal is not read by the stage, bool [n].
        """
        if number not in self._tail_stops:
            return ordinals, ordinals >= self._samples_before[number + 1][sources]
        first = self._samples_before[number][sources]
        next_ordinals, is_later = self._tails_of(number).find_next(sources, ordinals - first)
        return next_ordinals + first, is_later

    def token_ranges(self, sources: Int32s, ordinals: Int64s) -> tuple[Int64s, int | Int64s]:
        """Return the first token of each sample in its source, and the number of tokens from one
        sample to the next.

        Args:
            sources, ordinals: int32 [n] and int64 [n], the samples.

        Returns: the first token of each sample, counted over all epochs of the source, int64 [n];
            and the number of tokens from there to the first token of the source's next sample,
            one number if it is the same in all stages, otherwise int64 [n].
        """
        if len(self.stages) == 1:
            step = self.stages[0].request.sample_tokens
            return self.stages[0].cursor.take(sources) + ordinals * step, step
        stages = (self._first_ordinals[1:-1, sources] <= ordinals).sum(
            axis=0
        )  # over [num_stages - 1, n]
        inside = ordinals - self._samples_before[stages, sources]
        starts: Int64s = self._first_tokens[stages, sources] + inside * self._sample_tokens[stages]
        if (self._sample_tokens == self._sample_tokens[0]).all():
            return starts, int(self._sample_tokens[0])
        return starts, self._sample_tokens[stages]

    def count_tokens(self, n: int) -> Int64s:
        """Return the number of tokens by which the first n samples advance the position of each
        source, without extra tokens: int64 [num_sources]."""
        stage = self._stage_of(prefix_length(n, self.num_samples))
        tokens: Int64s = (
            self._first_tokens[stage]
            + (self.counts(n) - self._samples_before[stage]) * self._sample_tokens[stage]
        )
        return tokens

    def count_within(self, source: int, tokens: int, extra: int) -> int:
        """Return the number of a source's samples that end within its first `tokens` tokens. The
        `extra` tokens of a sample are part of the sample."""
        count = 0
        for token_range in self.list_tokens(source):
            inside = (tokens - extra - token_range.token) // token_range.step
            count = min(token_range.stop, token_range.first + max(0, inside))
            if count < token_range.stop:
                return count
        return count

    def ordinal_ending_at(self, source: int, position: int) -> int | None:
        """Return the ordinal of a source's sample whose tokens, without extra ones, end at a
        position; None if there is none."""
        for token_range in self.list_tokens(source):
            samples, rest = divmod(position - token_range.token, token_range.step)
            if rest == 0 and 0 < samples <= token_range.stop - token_range.first:
                return token_range.first + samples - 1
        return None

    def list_tokens(self, source: int) -> list[TokenRange]:
        """Return the token ranges of a source, in the order of ordinals. Neighbouring stages whose
        samples have the same length share a range.
        """
        ranges = list[TokenRange]()
        for number, stage in enumerate(self.stages):
            first = int(self._first_ordinals[number, source])
            is_last = number == len(self.stages) - 1
            stop = int(
                self._stop_ordinals[source] if is_last else self._first_ordinals[number + 1, source]
            )
            if first >= stop:
                continue
            step = stage.request.sample_tokens
            if ranges and ranges[-1].step == step:
                ranges[-1] = ranges[-1]._replace(stop=stop)
            else:
                token = int(self._first_tokens[number, source])
                ranges.append(TokenRange(first, stop, token, step))
        return ranges

    def plan_of(self, stage: int) -> Plan:
        """Return the plan of stage number `stage`. Raises: PlanError if the stage cannot be
        planned."""
        if stage not in self._plans:
            planned = self.stages[stage]
            make_plan = find_interleaving(planned.interleaving).plan
            self._plans[stage] = planned.plan or make_plan(planned.request)
        return self._plans[stage]

    def _tails_of(self, stage: int) -> Tails:
        """Return the tails of a stage that was cut and has tails."""
        if stage not in self._tails:
            planned = self.stages[stage]
            find_tails = find_interleaving(planned.interleaving).find_tails
            assert find_tails is not None
            tails = find_tails(self.plan_of(stage), planned.length)
            assert tails is not None
            self._tails[stage] = tails
        return self._tails[stage]

    def _stage_of(self, k: int) -> int:
        """Return the number of the stage that contains sample k; the last stage if k is the run's
        end."""
        return bisect_right(self._starts, k) - 1

    def _locate_in(self, stage: int, ks: Int64s) -> tuple[Int32s, Int64s]:
        """Locate samples as `locate_many` does, given that all of them are in one stage."""
        sources, ordinals = self.plan_of(stage).locate_many(ks - self._starts[stage])
        ordinals = ordinals + self._samples_before[stage].take(sources)
        # If earlier stages were cut, these are next ordinals
        for number, stops in reversed(self._tail_stops.items()):
            if number < stage and (ordinals < stops[sources]).any():
                first = self._samples_before[number][sources]
                ordinals = first + self._tails_of(number).resolve(sources, ordinals - first)
        return sources, ordinals
