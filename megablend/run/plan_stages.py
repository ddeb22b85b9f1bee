"""From the stages of a ledger to their plans: each source's samples in a stage, and its position
when the stage begins."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.blend.allocate import divide_drain, drain_length, stage_totals
from megablend.blend.epochs import EpochsBuilder, ReadBefore, Withdrawals
from megablend.blend.interleavings.base import StageRequest, check_tokens
from megablend.blend.interleavings.registry import find_interleaving
from megablend.blend.plan import PlannedStage, StagesPlan
from megablend.blend.shares import samples_in
from megablend.errors import PlanError
from megablend.run.stage import Blend, Stage

TokensByIndex = Mapping[str, Sequence[int]]
"""Tokens per epoch of each source, [num_sources], by the digest of a snapshot of the index; 0 where
it lacks the source."""
Step = tuple[int, Int64s]
"""End of a step, as a sample number of the run; samples of each source in it, int64
[num_sources]."""


def plan_stages(
    stages: Sequence[Stage],
    tokens: Sequence[int] | TokensByIndex,
    withdrawals: Sequence[Withdrawals] = (),
) -> StagesPlan:
    """The plan of a run.

    Before samples get another length, and before files are withdrawn, what stages that were cut
    have left of their periods is read: a *drain*, in the settings of the stage before, since pieces
    that are not neighbours are never joined into one sample. If the ledger gives its length
    (`Stage.drain`), it goes on in the shares of the stage before as well.

    Args:
        tokens: tokens per epoch of each source of the split, including end-of-document tokens;
            if stages read several snapshots of the index, by the snapshot's digest.
        withdrawals: of each source, needed if a snapshot may lack files that one before had.

    Raises: PlanError if the ends of stages do not increase, or a stage cannot be planned.
    """
    if not isinstance(tokens, Mapping):
        tokens = dict.fromkeys((stage.index for stage in stages), tokens)
    return _Planner(stages, tokens, withdrawals).plan()


def count_before(
    stages: Sequence[Stage],
    tokens: TokensByIndex,
    withdrawals: Sequence[Withdrawals],
    stop: int,
    following: Stage,
    unit: int | None = None,
    *,
    is_new: bool,
) -> ReadBefore:
    """What the first `stop` samples of these stages, and a drain, read before the following stage.
    Raises: as plan_stages.

    Args:
        unit: choose a length for the drain with which it ends at a multiple of this many samples.
        is_new: the following stage is not committed: find out whether it has `whole_epochs`.
    """
    starts = [0, *(stage.stop for stage in stages)]
    before = [stage for stage, start in zip(stages, starts, strict=False) if start < stop]
    planner = _Planner(before, tokens, withdrawals)
    plan = planner.plan()
    if planner.start == stop:
        if is_new:
            is_other = planner.drains_otherwise(before[-1], following)
            following = dataclasses.replace(following, whole_epochs=is_other)
        if unit is not None:
            following = dataclasses.replace(
                following, drain=planner.choose_drain(before[-1], following, unit)
            )
        planner.drain_before(before[-1], following)
        read = planner.tokens_read
        stop = planner.start
    else:
        read = plan.count_tokens(stop)
    if is_new and planner.leaves_rest(following):
        following = dataclasses.replace(following, whole_epochs=True)
    planner.enter(following)
    return ReadBefore(
        read.tolist(), planner.epochs.finish(), stop, following.drain, following.whole_epochs
    )


class _Planner:
    """Plans stages one after another.

    Attributes, all but `start` int64 [num_sources]:
        start: number of the sample with which the next stage begins.
        tokens_read: tokens of a source that the stages so far read.
        samples_read: samples of a source that they read.
        samples_begun: as `samples_read`, with the samples up to the last one of a period that was
            begun: a stage that was cut within a period reads some of these, not all.
        abandoned_samples: `samples_begun` of a source that had samples left when the stages after
            it no longer read it; 0 of other sources.
        abandoned_tokens: the same in tokens: positions before these count as read.

    Whether files are gone is asked in two ways. A stage with `whole_epochs` asks of all that lanes
    have begun (`begun_loses_files`, `coming_loses_files`); other stages, which earlier releases
    committed, ask of the epoch at the cursor (`loses_files`), and their order has to stay.
    """

    def __init__(
        self, stages: Sequence[Stage], tokens: TokensByIndex, withdrawals: Sequence[Withdrawals]
    ) -> None:
        self.stages = stages
        self.tokens = tokens
        self.planned = list[PlannedStage]()
        self.start = 0
        size = len(next(iter(tokens.values())))
        first = stages[0].blend if stages else None
        self.tokens_read = np.zeros(size, np.int64)
        self.samples_read = np.zeros(size, np.int64)
        self.samples_begun = np.zeros(size, np.int64)
        self.abandoned_samples = np.zeros(size, np.int64)
        self.abandoned_tokens = np.zeros(size, np.int64)
        if first is not None:
            extra = int(first.add_extra_token_to_sequence)
            self.epochs = EpochsBuilder(tokens, stages[0].index, first.order, extra, withdrawals)

    def plan(self) -> StagesPlan:
        """Plan all stages. Raises: as plan_stages."""
        number = 0
        for group in _list_groups(self.stages):
            self._check_end(group[0], number)
            self.enter(group[0])
            for stage, steps in zip(
                group, _divide(group, self.start, self.tokens[group[0].index]), strict=True
            ):
                for end, totals in steps:
                    self._add_step(stage, end, totals, number)
                    if self.start == stage.stop:
                        break
                number += 1
                if number < len(self.stages):
                    self.drain_before(stage, self.stages[number])
        return StagesPlan(self.planned, self.epochs.finish() if self.stages else None)

    def _check_end(self, stage: Stage, number: int) -> None:
        if number and self.stages[number - 1].stop < self.start >= stage.end:
            raise PlanError(
                f"stage {number} ends at sample {stage.end:,}, but the settings of the stage before it are kept "
                f"until sample {self.start:,}"
            )

    def enter(self, stage: Stage) -> None:
        """Begin a stage with its snapshot and order."""
        self.epochs.enter(
            stage.index,
            stage.blend.order,
            np.maximum(self._find_begun_tokens(), self.abandoned_tokens),
            self.tokens_read,
            whole=stage.whole_epochs,
        )

    def leaves_rest(self, stage: Stage) -> bool:
        """Whether a stage that begins here has to read epochs whole; see `Stage.whole_epochs`."""
        return self.epochs.leaves_rest(
            stage.index,
            stage.blend.order,
            np.maximum(self._find_begun_tokens(), self.abandoned_tokens),
            self.tokens_read,
        )

    def drains_otherwise(self, stage: Stage, following: Stage) -> bool:
        """Whether what `Stage.whole_epochs` says of drains makes a difference before a stage."""
        ways = [dataclasses.replace(following, whole_epochs=whole) for whole in (False, True)]
        if stage.blend.sequence_length == following.blend.sequence_length:
            old, new = (self._needs_drain(stage, each) for each in ways)
            return old != new
        old_shares, new_shares = (self._find_shares(stage, each) for each in ways)
        return old_shares != new_shares

    def _find_begun_tokens(self) -> Int64s:
        """Positions up to which stages before have begun the sources, int64 [num_sources]."""
        step = self.planned[-1].request.sample_tokens if self.planned else 0
        begun: Int64s = (
            self.tokens_read + np.maximum(0, self.samples_begun - self.samples_read) * step
        )
        return begun

    def _add_step(self, stage: Stage, end: int, totals: Int64s, number: int) -> None:
        request = self._make_request(stage.blend, _pad(totals, len(self.samples_read)))
        self._check_dropped(stage, request.totals)
        part = _plan_step(stage, request, self.tokens_read, end, number)
        if part.cut_edges is not None:
            self.samples_begun = np.maximum(
                self.samples_begun, self.samples_read + part.cut_edges[2]
            )
        self._advance(part)

    def _advance(self, part: PlannedStage) -> None:
        is_dropped = self.abandoned_samples.any()
        self.planned.append(
            dataclasses.replace(part, dropped=self.abandoned_samples) if is_dropped else part
        )
        self.start += part.length
        self.tokens_read = self.tokens_read + part.read * part.request.sample_tokens
        self.samples_read = self.samples_read + part.read

    def drain_before(self, stage: Stage, following: Stage) -> None:
        """Read the samples that stages up to `stage` have begun but not finished, of the sources
        that the following stage still has, if the following stage needs that."""
        if not self._needs_drain(stage, following):
            if following.drain is not None:
                raise PlanError(
                    "found `drain`, but this stage needs none: its samples have the same length as "
                    "those before; remove it"
                )
            return
        is_gone, totals = self._find_left(following)
        has_left = is_gone & (self.samples_begun > self.samples_read)
        dropped = np.where(has_left, self.samples_begun, self.abandoned_samples)
        self.abandoned_tokens = np.where(has_left, self._find_begun_tokens(), self.abandoned_tokens)
        if following.drain is not None:
            shares = self._find_shares(stage, following)
            totals = np.array(divide_drain(shares, totals.tolist(), following.drain), np.int64)
        if totals.any():
            last = self.planned[-1]
            request = self._make_request(stage.blend, totals)
            part = PlannedStage(
                request=request,
                cursor=self.tokens_read,
                interleaving=last.interleaving,
                number=last.number,
                length=request.num_samples,
            )
            self._advance(part)
        self.samples_begun = np.minimum(self.samples_begun, self.samples_read)
        self.abandoned_samples = dropped

    def choose_drain(self, stage: Stage, following: Stage, unit: int) -> int | None:
        """How many samples continue a stage, such that they end at a multiple of `unit`. None if
        there are none, and if samples keep their length or no source may be read further: then a
        drain is what is left."""
        _, left = self._find_left(following)
        shares = self._find_shares(stage, following)
        is_same = stage.blend.sequence_length == following.blend.sequence_length
        if is_same or not any(shares) or not (left.any() or stage.cut is not None):
            return None
        return drain_length(shares, left.tolist(), self.start, unit) or None

    def _find_left(self, following: Stage) -> tuple[npt.NDArray[np.bool_], Int64s]:
        """Whether the following stage lacks each source: bool [num_sources]; and how many samples
        the others have left."""
        is_gone = np.array(self.tokens[following.index]) == 0
        return is_gone, np.where(is_gone, 0, np.maximum(0, self.samples_begun - self.samples_read))

    def _find_shares(self, stage: Stage, following: Stage) -> list[Fraction]:
        """The shares with which a stage stopped, [num_sources]; 0 of sources that lose files, of
        which no more may be begun."""
        totals = self.planned[
            -1
        ].request.totals  # a step of a schedule has no other shares than these
        shares = (
            list(stage.blend.shares)
            if stage.blend.schedule is None
            else list(map(Fraction, totals.tolist()))
        )
        shares += [Fraction(0)] * (len(totals) - len(shares))
        if following.whole_epochs:
            lost = self.epochs.coming_loses_files(following.index, self._find_begun_tokens())
        else:
            lost = self.epochs.loses_files(following.index, self.tokens_read, begun=False)
        lost |= np.array(self.tokens[following.index]) == 0
        return [
            Fraction(0) if is_lost else share
            for share, is_lost in zip(shares, lost.tolist(), strict=True)
        ]

    def _check_dropped(self, stage: Stage, totals: Int64s) -> None:
        """Raises: PlanError for a source that comes back after what it had left was dropped."""
        for source in np.flatnonzero(
            (totals > 0) & (self.abandoned_samples > self.samples_read)
        ).tolist():
            raise PlanError(
                f"source {stage.blend.sources[source].name!r} is read again after a stage without "
                "any of its files, but in between the sequence length changed or files were "
                "withdrawn; add its new files as a source with another name"
            )

    def _needs_drain(self, stage: Stage, following: Stage) -> bool:
        if stage.blend.sequence_length != following.blend.sequence_length:
            return True
        begun = self._find_begun_tokens()
        if following.whole_epochs:
            lost = self.epochs.begun_loses_files(following.index, self.tokens_read, begun)
        else:
            lost = self.epochs.loses_files(following.index, self.tokens_read)
        return bool((lost & (begun > self.tokens_read)).any())

    def _make_request(self, blend: Blend, totals: Int64s) -> StageRequest:
        """The request of a stage. Raises: PlanError if the tokens that it reaches cannot be
        counted in 64 bits."""
        places, tokens = self.epochs.place(self.tokens_read)
        check_tokens(totals.tolist(), places.tolist(), tokens.tolist(), blend.sequence_length)
        cycles = np.array([source.cycles or 1 for source in blend.sources], np.int64)
        return StageRequest(
            totals=totals,
            first_sample=self.start,
            first_tokens=places,
            seed=blend.seed,
            lanes=blend.lanes,
            shuffle_window=blend.shuffle_window,
            cycles=_pad(cycles, len(totals), 1),
            epoch_tokens=tokens if blend.plan_version > 1 else None,
            sample_tokens=blend.sequence_length,
        )


def _pad(values: Int64s, num_sources: int, value: int = 0) -> Int64s:
    """Values of a stage's sources, int64 [n], with those of sources
    that come later: int64 [num_sources]."""
    missing = num_sources - len(values)
    return values if missing == 0 else np.concatenate([values, np.full(missing, value, np.int64)])


def _list_groups(stages: Sequence[Stage]) -> Iterator[list[Stage]]:
    """Neighbours of one blend and one snapshot; a stage that was cut is the last of its group."""
    group = list[Stage]()
    for stage in stages:
        changes = bool(group) and (group[-1].index, group[-1].blend) != (stage.index, stage.blend)
        if group and (changes or group[-1].cut is not None or stage.blend.schedule is not None):
            yield group
            group = []
        group.append(stage)
    yield group


def _divide(group: Sequence[Stage], start: int, tokens: Sequence[int]) -> list[list[Step]]:
    """The steps of each stage of one blend, had none been cut; one if its shares are constant.

    Stages of constant shares are divided together,
    so that many short ones give the same as one long one.

    Args:
        start: number of the first sample.
    """
    blend = group[0].blend
    ends = [stage.end for stage in group]
    if blend.schedule is not None:
        steps = zip(blend.schedule.ends, blend.schedule.totals(blend.shares), strict=True)
        return [[(start + end, np.array(totals, np.int64)) for end, totals in steps]]
    if blend.is_blended:
        divided = stage_totals(blend.shares, [end - start for end in ends])
    else:
        divided = [
            samples_of_one_pass(
                tokens, blend.sequence_length, int(blend.add_extra_token_to_sequence)
            )
        ]
    return [[(end, np.array(totals, np.int64))] for end, totals in zip(ends, divided, strict=True)]


def _plan_step(
    stage: Stage, request: StageRequest, cursor: Int64s, end: int, number: int
) -> PlannedStage:
    """A step of stage number `number` of the ledger,
    which ends at sample `end` or where the stage was cut.

    Raises: PlanError if it was cut and its interleaving cannot stop there.
    """
    name = stage.blend.interleaving
    if stage.cut is None or stage.cut >= end:
        return PlannedStage(
            request=request,
            cursor=cursor,
            interleaving=name,
            number=number,
            length=request.num_samples,
        )
    kind = find_interleaving(name)
    length = stage.cut - request.first_sample
    if kind.find_tails is None:
        raise PlanError(
            f"interleaving {name!r} cannot be cut within a stage; begin the next one where a stage "
            "ends"
        )
    plan = kind.plan(request)
    possible = kind.round_up(plan, max(1, length))
    if possible != length:
        raise PlanError(
            f"from: found {stage.cut:,}, expected {request.first_sample + possible:,}, the end of a cycle of lanes x "
            "shuffle_window samples; `megablend amend CONFIG --at SAMPLE` rounds up and prints the number to write here"
        )
    tails = kind.find_tails(plan, length)
    edges = [plan.counts(length)] * 3 if tails is None else [tails.first, tails.read, tails.stop]
    return PlannedStage(
        request=request,
        cursor=cursor,
        interleaving=name,
        number=number,
        length=length,
        plan=plan,
        cut_edges=np.stack(edges),
    )


def samples_of_one_pass(tokens: Sequence[int], sequence_length: int, extra: int) -> list[int]:
    """The number of complete samples of each source."""
    return [samples_in(n, sequence_length, extra) for n in tokens]
