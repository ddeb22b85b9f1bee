"""The plan of a run: the plans of its stages, one after another.
A stage's plan is created when it is first needed.

When an amendment cuts a stage, the ordinals that later stages count on from there are *next*
ordinals; `Tails` says for which ordinals they stand.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int32s, Int64s
from megablend.blend.epochs import Epochs
from megablend.blend.interleavings.base import (
    MAX_SAMPLES,
    Plan,
    StageRequest,
    check_places,
    prefix_length,
    sample_numbers,
)
from megablend.blend.interleavings.registry import find_interleaving
from megablend.blend.interleavings.tails import Tails
from megablend.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """A stage as its plan is made."""

    request: StageRequest
    """`first_sample` continues from the stages before it."""
    cursor: Int64s
    """int64 [num_sources], where each source's first sample of the stage begins: a position, see
    `Epochs`."""
    interleaving: str
    """A name of `INTERLEAVINGS`."""
    number: int
    """Number of the stage in the ledger: what is left of a stage that was cut may be a planned
    stage of its own."""
    length: int
    """Samples of the stage: fewer than the request's where it was cut."""
    plan: Plan | None = None
    """Its plan, if made already."""
    cut_edges: Int64s | None = None
    """int64 [3, num_sources] of a stage that was cut: `first`, `read` and `stop` of its tails; see
    `Tails`. None of others."""
    dropped: Int64s | None = None
    """int64 [num_sources], of sources that are read no more, the end of the samples that stages
    before it have begun; 0 of others. None where there are none."""

    @property
    def start(self) -> int:
        """Number of its first sample."""
        return self.request.first_sample

    @property
    def stop(self) -> int:
        """Number of the sample after its last one."""
        return self.request.first_sample + self.length

    @property
    def read(self) -> Int64s:
        """int64 [num_sources], samples of each source that the stage reads."""
        return self.request.totals if self.cut_edges is None else self.cut_edges[1]

    @property
    def has_tails(self) -> bool:
        """Whether a cut of the stage leaves ordinals of the periods that it began
        to the stages after it."""
        return self.cut_edges is not None and bool((self.cut_edges[2] > self.cut_edges[1]).any())

    def make_plan(self) -> Plan:
        """The stage's plan. Raises: PlanError if it cannot be planned."""
        return self.plan or find_interleaving(self.interleaving).plan(self.request)


class TokenRange(NamedTuple):
    """Samples of a source whose tokens begin `step` tokens apart."""

    first: int
    stop: int
    """Ordinals [first, stop)."""
    token: int
    """First token of the first one, counted over all epochs."""
    step: int


class StagesPlan:
    """A plan of several stages; a source's ordinals continue from stage to stage.

    Args:
        stages: in order.
        epochs: of the sources, or what returns them; needed when positions are converted to
            epochs.

    Raises: PlanError, naming the stage, if there are no stages, a stage has no samples, or there
        are too many samples.
    """

    def __init__(
        self, stages: Sequence[PlannedStage], epochs: Epochs | Callable[[], Epochs] | None = None
    ) -> None:
        if not stages:
            raise PlanError("a plan needs at least one stage")
        self.stages = tuple(stages)
        """In order: contiguous ranges of the run's samples with one request."""
        self._epochs = epochs
        self._plans = dict[int, Plan]()
        self.num_sources = len(stages[0].request.totals)
        self._starts = [stage.start for stage in stages]
        self._stops = [stage.stop for stage in stages]
        for stage in stages:
            _check(stage.number, stage.request, self.num_sources)
        given = np.zeros((len(stages) + 1, self.num_sources), np.int64)
        np.cumsum(np.stack([stage.read for stage in stages]), axis=0, out=given[1:])
        self._given: Int64s = given
        """int64 [num_stages + 1, num_sources]: samples of each source before each stage."""
        # The same array, unless a source is dropped
        self._edges = self._given
        """As `given`, but that what stages before have read of dropped sources is theirs."""
        self._reach = given[-1].copy()
        """int64 [num_sources]: the end of each source's ordinals; after a cut some before it may
        not be read any more."""
        self._cuts = list[int]()
        """Numbers of the stages that have tails."""
        for number, stage in enumerate(stages):
            if stage.dropped is not None:
                self._edges = self._edges.copy() if self._edges is self._given else self._edges
                np.maximum(self._edges[number:], stage.dropped, out=self._edges[number:])
            if stage.has_tails:
                self._cuts.append(number)
                np.maximum(self._reach, given[number] + self._tail_stops(number), out=self._reach)
        self._first_tokens = np.stack([stage.cursor for stage in stages])
        self._sample_tokens = np.array([stage.request.sample_tokens for stage in stages], np.int64)
        self._tails = dict[int, Tails]()
        self.num_samples = self._stops[-1]
        if self.num_samples > MAX_SAMPLES:
            raise PlanError(
                f"{self.num_samples} samples requested; a plan can have at most {MAX_SAMPLES}"
            )

    @property
    def epochs(self) -> Epochs:
        """Where the sources' epochs begin."""
        if callable(self._epochs):
            self._epochs = self._epochs()
        assert self._epochs is not None
        return self._epochs

    def locate(self, k: int) -> tuple[int, int]:
        """(source, ordinal over all stages and epochs) of sample k.
        Raises IndexError outside [0, num_samples)."""
        sources, ordinals = self.locate_many([k])
        return int(sources[0]), int(ordinals[0])

    def locate_many(self, ks: npt.ArrayLike) -> tuple[Int32s, Int64s]:
        """Sources int32 [n] and ordinals int64 [n] of samples ks [n]. Raises IndexError."""
        if len(self._starts) == 1:
            return self.plan_of(0).locate_many(ks)
        numbers = sample_numbers(ks, self.num_samples)
        if not numbers.size:
            return np.zeros(numbers.shape, np.int32), np.zeros(numbers.shape, np.int64)
        first = self._stage_of(int(numbers.min()))
        if numbers.max() < self._stops[first]:
            return self._locate_in(first, numbers)
        places = np.argsort(numbers, axis=None, kind="stable")
        sources = np.empty(numbers.size, np.int32)
        ordinals = np.empty(numbers.size, np.int64)
        listed = numbers.ravel()[places]
        edges = np.searchsorted(listed, self._stops)  # of each stage, the end of its samples
        begin = 0
        for stage, end in enumerate(edges.tolist()):
            if begin < end:
                rows = places[begin:end]
                sources[rows], ordinals[rows] = self._locate_in(stage, listed[begin:end])
            begin = end
        return sources.reshape(numbers.shape), ordinals.reshape(numbers.shape)

    def counts(self, n: int) -> Int64s:
        """How many of the first n samples come from each source:
        int64 [num_sources]. Raises IndexError."""
        stage = self._stage_of(prefix_length(n, self.num_samples))
        if n == self.num_samples:  # known without a plan
            totals: Int64s = self._given[-1].copy()
            return totals
        counts: Int64s = self._given[stage] + self.plan_of(stage).counts(n - self._starts[stage])
        return counts

    def samples_of(self, sources: Int32s, ordinals: Int64s) -> Int64s:
        """The samples of (sources, ordinals), int32 and int64 [n]: int64 [n];
        the inverse of `locate_many`.

        Fastest when consecutive entries have the same source and ascending ordinals.
        Raises: IndexError for a source or ordinal that the plan does not have.
        """
        sources, ordinals = check_places(sources, ordinals, self._reach)
        ks = self.find_samples(sources, ordinals)
        if (ks < 0).any():
            first = int(np.argmax(ks < 0))
            raise IndexError(
                f"the plan has no sample with source {sources[first]} and ordinal {ordinals[first]}"
            )
        return ks

    def find_samples(self, sources: Int32s, ordinals: Int64s) -> Int64s:
        """Like `samples_of`, but -1 for ordinals that the plan does not have;
        all sources must be in the plan."""
        ks = np.full(len(ordinals), -1, np.int64)
        left = np.arange(len(ordinals))
        coming = ordinals  # of the entries in `left`: ordinals, and after a cut next ordinals
        for number, stage in enumerate(self.stages):
            if not len(left):
                break
            following, later = self._advance(number, stage, sources[left], coming)
            rows = left[~later]
            if len(rows):
                local = coming[~later] - self._given[number][sources[rows]]
                ks[rows] = self._starts[number] + self.plan_of(number).samples_of(
                    sources[rows], local
                )
            left = left[later]
            coming = following[later]
        return ks

    def first_sample_from(
        self, source: int, ordinal: int, *, before: int | None = None
    ) -> int | None:
        """The first sample that reads an ordinal >= `ordinal` of a source; None if there is none
        (or none below the sample `before`)."""
        coming = np.array([max(0, ordinal)])
        owner = np.array([source], np.int32)
        for number, stage in enumerate(self.stages):
            following, later = self._advance(number, stage, owner, coming)
            start = self._starts[number]
            if before is not None and before <= start:
                return None
            if stage.has_tails or not later[0]:
                sample = self.plan_of(number).first_sample_from(
                    source,
                    int(coming[0] - self._given[number, source]),
                    before=before and before - start,
                )
                if sample is not None and sample < stage.length:
                    return start + sample
            coming = following
        return None

    def sample_of_count(self, source: int, ordinal: int) -> int | None:
        """The sample with which a source has given as many samples as it has ordinals up
        to `ordinal`, in whatever order; None if the run ends before."""
        stage = int((self._edges[1:, source] <= ordinal).sum())
        if stage == len(self.stages) or ordinal < self._edges[stage, source]:
            return None
        before = int(ordinal - self._edges[stage, source])
        # What the stage had begun of a source that was withdrawn
        if before >= self.stages[stage].read[source]:
            return None
        return self._starts[stage] + self.plan_of(stage).nth_sample(source, before + 1)

    def _advance(
        self, number: int, stage: PlannedStage, sources: Int32s, ordinals: Int64s
    ) -> tuple[Int64s, npt.NDArray[np.bool_]]:
        """What ordinals int64 [n] are after a stage, next ordinals if it was cut; and whether
        they come after it: bool [n]."""
        if not stage.has_tails:
            return ordinals, ordinals >= self._given[number + 1][sources]
        first = self._given[number][sources]
        following, later = self._tails_of(number).find_next(sources, ordinals - first)
        return following + first, later

    def token_ranges(self, sources: Int32s, ordinals: Int64s) -> tuple[Int64s, int | Int64s]:
        """First token of the samples (sources, ordinals) [n], counted over all epochs of the
        source: int64 [n]; and the tokens from each to the source's next sample: one number if it
        is the same in all stages, otherwise int64 [n]."""
        if len(self._starts) == 1:
            step = int(self._sample_tokens[0])
            return self._first_tokens[0].take(sources) + ordinals * step, step
        stages = (self._edges[1:-1, sources] <= ordinals).sum(axis=0)  # over [num_stages - 1, n]
        inside = ordinals - self._given[stages, sources]
        starts: Int64s = self._first_tokens[stages, sources] + inside * self._sample_tokens[stages]
        same = (self._sample_tokens == self._sample_tokens[0]).all()
        return starts, int(self._sample_tokens[0]) if same else self._sample_tokens[stages]

    def count_tokens(self, n: int) -> Int64s:
        """Tokens by which the first n samples advance each source,
        without extra tokens: int64 [num_sources]."""
        stage = self._stage_of(prefix_length(n, self.num_samples))
        tokens: Int64s = (
            self._first_tokens[stage]
            + (self.counts(n) - self._given[stage]) * self._sample_tokens[stage]
        )
        return tokens

    def count_within(self, source: int, tokens: int, extra: int) -> int:
        """How many of a source's samples, in the order of their ordinals,
        end within its first `tokens` tokens, `extra` tokens included."""
        count = 0
        for each in self.list_tokens(source):
            inside = (tokens - extra - each.token) // each.step
            count = min(each.stop, each.first + max(0, inside))
            if count < each.stop:
                return count
        return count

    def ordinal_ending_at(self, source: int, position: int) -> int | None:
        """The ordinal of a source's sample whose tokens, without extra ones, end at a position;
        None if there is none."""
        for each in self.list_tokens(source):
            samples, rest = divmod(position - each.token, each.step)
            if rest == 0 and 0 < samples <= each.stop - each.first:
                return each.first + samples - 1
        return None

    def list_tokens(self, source: int) -> list[TokenRange]:
        """How a source's samples cover its tokens, by ordinal; stages with samples of the same
        length are joined."""
        found = list[TokenRange]()
        for number, stage in enumerate(self.stages):
            first, stop = (int(self._edges[each, source]) for each in (number, number + 1))
            if number == len(self.stages) - 1:
                stop = int(self._reach[source])
            if first >= stop:
                continue
            step = stage.request.sample_tokens
            if found and found[-1].step == step:
                found[-1] = found[-1]._replace(stop=stop)
            else:
                found.append(TokenRange(first, stop, int(self._first_tokens[number, source]), step))
        return found

    def plan_of(self, stage: int) -> Plan:
        """The plan of stage number `stage`. Raises: PlanError if the stage cannot be planned."""
        if stage not in self._plans:
            self._plans[stage] = self.stages[stage].make_plan()
        return self._plans[stage]

    def _tails_of(self, stage: int) -> Tails:
        """What the cut of a stage leaves, which must have tails."""
        if stage not in self._tails:
            planned = self.stages[stage]
            find_tails = find_interleaving(planned.interleaving).find_tails
            assert find_tails is not None
            tails = find_tails(self.plan_of(stage), planned.length)
            assert tails is not None
            self._tails[stage] = tails
        return self._tails[stage]

    def _tail_stops(self, stage: int) -> Int64s:
        """int64 [num_sources]: where the tails of a stage end, counted from the stage's start."""
        edges = self.stages[stage].cut_edges
        assert edges is not None
        stops: Int64s = edges[2]
        return stops

    def _stage_of(self, k: int) -> int:
        return bisect_right(self._starts, k) - 1

    def _locate_in(self, stage: int, ks: Int64s) -> tuple[Int32s, Int64s]:
        sources, ordinals = self.plan_of(stage).locate_many(ks - self._starts[stage])
        ordinals = ordinals + self._given[stage].take(sources)
        for number in reversed(self._cuts):
            first = self._given[number][sources]
            if number < stage and (ordinals < first + self._tail_stops(number)[sources]).any():
                ordinals = first + self._tails_of(number).resolve(sources, ordinals - first)
        return sources, ordinals


def _check(number: int, stage: StageRequest, num_sources: int) -> None:
    if len(stage.totals) != num_sources:
        raise PlanError(
            f"stage {number} has totals for {len(stage.totals)} sources; expected {num_sources}"
        )
    if len(stage.totals) and stage.totals.min() < 0:
        source = int(stage.totals.argmin())
        raise PlanError(
            f"stage {number} gives source {source} {stage.totals[source]} samples; expected 0 or more"
        )
    if stage.num_samples == 0:
        raise PlanError(f"stage {number} has no samples; expected at least one")
