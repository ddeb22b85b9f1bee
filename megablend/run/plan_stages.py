"""Plan the stages of a ledger: how many samples each source has in a stage, and its position when
the stage begins."""

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
"""For each snapshot of the index, by its digest: the number of tokens per epoch of each source,
[num_sources]; 0 if the snapshot lacks the source."""
Step = tuple[int, Int64s]
"""A step of a stage: the sample number of the run at which the step ends, and the number of samples
of each source in the step, int64 [num_sources]."""


def plan_stages(
    stages: Sequence[Stage],
    tokens: Sequence[int] | TokensByIndex,
    withdrawals: Sequence[Withdrawals] = (),
) -> StagesPlan:
    """Plan the stages of a run, which has at least one.

    A stage that was cut leaves periods unfinished. Before the length of samples changes, and before
    files are withdrawn, the rest of these periods is read with the settings of that stage. This is
    called a *drain*; it is needed because pieces that are not neighbours are never joined into one
    sample. If the ledger sets the length of the drain (`Stage.drain`), the drain continues that
    stage, with its shares, up to this length.

    Args:
        tokens: tokens per epoch of each source of the split, including end-of-document tokens;
            if stages read several snapshots of the index, by the snapshot's digest.
        withdrawals: [num_sources], needed if a snapshot may lack files that an earlier one had.

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
    """Count what the first `stop` samples of these stages, and a drain after them, have read when
    the following stage begins.

    Args:
        unit: if given, the length of the drain is chosen so that it ends at a multiple of this
            number of samples.
        is_new: whether the following stage is not committed; its `whole_epochs` is then determined
            here.

    Raises: see plan_stages.
    """
    starts = [0, *(stage.stop for stage in stages)]
    before = [stage for stage, start in zip(stages, starts, strict=False) if start < stop]
    planner = _Planner(before, tokens, withdrawals)
    plan = planner.plan()
    if planner.start == stop:
        if is_new:
            whole = planner.drain_depends_on_whole(before[-1], following)
            following = dataclasses.replace(following, whole_epochs=whole)
        if unit is not None:
            following = dataclasses.replace(
                following, drain=planner.choose_drain(before[-1], following, unit)
            )
        planner.drain_before(before[-1], following)
        read = planner.tokens_read
        stop = planner.start
    else:
        read = plan.count_tokens(stop)
    if is_new and planner.start_depends_on_whole(following):
        following = dataclasses.replace(following, whole_epochs=True)
    planner.enter(following)
    return ReadBefore(
        read.tolist(), planner.epochs.finish(), stop, following.drain, following.whole_epochs
    )


class _Planner:
    """Plans stages one after another.

    Attributes, all but `start` int64 [num_sources]:
        start: number of the sample with which the next stage begins.
        tokens_read: tokens of each source that the stages so far have read.
        samples_read: samples of each source that the stages so far have read.
        samples_begun: samples of each source up to the end of the periods that the stages so far
            have begun; more than `samples_read` after a stage that was cut within a period.
        abandoned_samples: `samples_begun` of each source that had samples left when a stage began
            whose snapshot lacks the source; 0 for other sources.
        abandoned_tokens: the position, in tokens, up to which such a source counts as read.

    There are two ways to find out whether a snapshot lacks files that are still needed. For a stage
    with `whole_epochs`, all epochs that lanes have begun count (`begun_epochs_lose_files`,
    `next_epochs_lose_files`). For other stages, only the epoch at the cursor counts
    (`current_epoch_loses_files`): earlier releases committed them, and their order must not change.
    """

    def __init__(
        self, stages: Sequence[Stage], tokens: TokensByIndex, withdrawals: Sequence[Withdrawals]
    ) -> None:
        self.stages = stages
        self.tokens = tokens
        self.planned = list[PlannedStage]()
        self.start = 0
        size = len(next(iter(tokens.values())))
        first = stages[0].blend
        self.tokens_read = np.zeros(size, np.int64)
        self.samples_read = np.zeros(size, np.int64)
        self.samples_begun = np.zeros(size, np.int64)
        self.abandoned_samples = np.zeros(size, np.int64)
        self.abandoned_tokens = np.zeros(size, np.int64)
        extra = int(first.add_extra_token_to_sequence)
        self.epochs = EpochsBuilder(tokens, stages[0].index, first.order, extra, withdrawals)

    def plan(self) -> StagesPlan:
        """Plan all stages. Raises: see plan_stages."""
        number = 0
        for group in _list_groups(self.stages):
            stage = group[0]
            if number and self.stages[number - 1].stop < self.start >= stage.end:
                raise PlanError(
                    f"stage {number} ends at sample {stage.end:,}, but the settings of the previous stage are kept "
                    f"until sample {self.start:,}; let it end later"
                )
            self.enter(stage)
            steps_of_stages = _list_steps(group, self.start, self.tokens[stage.index])
            for stage, steps in zip(group, steps_of_stages, strict=True):
                for end, totals in steps:
                    self._add_step(stage, end, totals, number)
                    if self.start == stage.stop:
                        break
                number += 1
                if number < len(self.stages):
                    self.drain_before(stage, self.stages[number])
        return StagesPlan(self.planned, self.epochs.finish())

    def enter(self, stage: Stage) -> None:
        """Begin a stage with its snapshot and order."""
        begun = np.maximum(self._find_begun_tokens(), self.abandoned_tokens)
        self.epochs.enter(
            stage.index, stage.blend.order, begun, self.tokens_read, whole=stage.whole_epochs
        )

    def start_depends_on_whole(self, stage: Stage) -> bool:
        """Return whether `Stage.whole_epochs` decides where epochs start if the stage begins
        now."""
        begun = np.maximum(self._find_begun_tokens(), self.abandoned_tokens)
        return self.epochs.start_depends_on_whole(
            stage.index, stage.blend.order, begun, self.tokens_read
        )

    def drain_depends_on_whole(self, stage: Stage, following: Stage) -> bool:
        """Return whether the drain before the following stage depends on that stage's
        `whole_epochs`."""
        without = dataclasses.replace(following, whole_epochs=False)
        whole = dataclasses.replace(following, whole_epochs=True)
        if stage.blend.sequence_length == following.blend.sequence_length:
            return self._needs_drain(stage, without) != self._needs_drain(stage, whole)
        return self._find_shares(stage, without) != self._find_shares(stage, whole)

    def _count_left(self) -> Int64s:
        """Return the number of samples of each source that were begun but not read (int64
        [num_sources])."""
        left: Int64s = np.maximum(0, self.samples_begun - self.samples_read)
        return left

    def _find_begun_tokens(self) -> Int64s:
        """Return the position in each source at which the samples that stages have begun end (int64
        [num_sources])."""
        step = self.planned[-1].request.sample_tokens if self.planned else 0
        begun: Int64s = self.tokens_read + self._count_left() * step
        return begun

    def _find_gone(self, following: Stage) -> npt.NDArray[np.bool_]:
        """Return, for each source, whether the following stage's snapshot lacks it: bool [num_sources]."""
        gone: npt.NDArray[np.bool_] = np.array(self.tokens[following.index]) == 0
        return gone

    def _add_step(self, stage: Stage, end: int, totals: Int64s, number: int) -> None:
        """Plan a step of a stage, and count what it reads. For the arguments, see `_plan_step`.
        Raises: PlanError if a source is read again after its remaining samples were dropped."""
        request = self._make_request(stage.blend, _pad(totals, len(self.samples_read)))
        for source in np.flatnonzero(
            (request.totals > 0) & (self.abandoned_samples > self.samples_read)
        ).tolist():
            raise PlanError(
                f"source {stage.blend.sources[source].name!r} is read again after a stage without "
                "any of its files, but in between the sequence length changed or files were "
                "withdrawn; add its new files as a source with another name"
            )
        part = _plan_step(stage, request, self.tokens_read, end, number)
        if part.cut_edges is not None:
            self.samples_begun = np.maximum(
                self.samples_begun, self.samples_read + part.cut_edges[2]
            )
        self._advance(part)

    def _advance(self, part: PlannedStage) -> None:
        """Append a step or a drain to the plan, and count what it reads."""
        is_dropped = self.abandoned_samples.any()
        self.planned.append(
            dataclasses.replace(part, dropped=self.abandoned_samples) if is_dropped else part
        )
        self.start += part.length
        self.tokens_read = self.tokens_read + part.read * part.request.sample_tokens
        self.samples_read = self.samples_read + part.read

    def drain_before(self, stage: Stage, following: Stage) -> None:
        """Plan a drain, if the following stage needs one. From each source that the following stage
        still has, the drain reads the samples that stages up to `stage` have begun but not
        finished."""
        if not self._needs_drain(stage, following):
            if following.drain is not None:
                raise PlanError(
                    "found `drain`, but this stage needs none: its samples have the same length as those before; "
                    "remove `drain`"
                )
            return
        is_gone = self._find_gone(following)
        left = self._count_left()
        is_abandoned = is_gone & (left > 0)
        abandoned_samples = np.where(is_abandoned, self.samples_begun, self.abandoned_samples)
        self.abandoned_tokens = np.where(
            is_abandoned, self._find_begun_tokens(), self.abandoned_tokens
        )
        totals = np.where(is_gone, 0, left)
        if following.drain is not None:
            shares = self._find_shares(stage, following)
            totals = np.array(divide_drain(shares, totals.tolist(), following.drain), np.int64)
        if totals.any():
            last = self.planned[-1]
            request = self._make_request(stage.blend, totals)
            self._advance(_plan_all(request, self.tokens_read, last.interleaving, last.number))
        self.samples_begun = np.minimum(self.samples_begun, self.samples_read)
        self.abandoned_samples = abandoned_samples

    def choose_drain(self, stage: Stage, following: Stage, unit: int) -> int | None:
        """Return the length in samples of the drain after a stage, chosen so that the drain ends at
        a multiple of `unit`. Return None if no drain is needed, or if it can only read what is
        left, because samples keep their length or no source may be read further."""
        left = np.where(self._find_gone(following), 0, self._count_left())
        shares = self._find_shares(stage, following)
        is_same = stage.blend.sequence_length == following.blend.sequence_length
        if is_same or not any(shares) or not (left.any() or stage.cut is not None):
            return None
        return drain_length(shares, left.tolist(), self.start, unit) or None

    def _find_shares(self, stage: Stage, following: Stage) -> list[Fraction]:
        """Return the shares that a stage had at its end, [num_sources]. The share is 0 for a source
        that loses files, since no more of its samples may be begun."""
        totals = self.planned[-1].request.totals
        shares = list(stage.blend.shares)
        if stage.blend.schedule is not None:  # its last step's shares are known by the totals only
            shares = list(map(Fraction, totals.tolist()))
        shares += [Fraction(0)] * (len(totals) - len(shares))
        if following.whole_epochs:
            lost = self.epochs.next_epochs_lose_files(following.index, self._find_begun_tokens())
        else:
            lost = self.epochs.current_epoch_loses_files(
                following.index, self.tokens_read, begun=False
            )
        lost |= self._find_gone(following)
        return [
            Fraction(0) if is_lost else share
            for share, is_lost in zip(shares, lost.tolist(), strict=True)
        ]

    def _needs_drain(self, stage: Stage, following: Stage) -> bool:
        """Return whether a drain must come before the following stage: the length of samples
        changes there, or the stage lacks files of epochs that were begun."""
        if stage.blend.sequence_length != following.blend.sequence_length:
            return True
        begun = self._find_begun_tokens()
        if following.whole_epochs:
            lost = self.epochs.begun_epochs_lose_files(following.index, self.tokens_read, begun)
        else:
            lost = self.epochs.current_epoch_loses_files(following.index, self.tokens_read)
        return bool((lost & (begun > self.tokens_read)).any())

    def _make_request(self, blend: Blend, totals: Int64s) -> StageRequest:
        """Make the request of a stage for `totals` samples of its sources (int64 [num_sources]).
        Raises: PlanError if the positions that it reaches do not fit into 64 bits."""
        positions, tokens = self.epochs.place(self.tokens_read)
        check_tokens(totals.tolist(), positions.tolist(), tokens.tolist(), blend.sequence_length)
        cycles = np.array([source.cycles or 1 for source in blend.sources], np.int64)
        return StageRequest(
            totals=totals,
            first_sample=self.start,
            first_tokens=positions,
            seed=blend.seed,
            lanes=blend.lanes,
            shuffle_window=blend.shuffle_window,
            cycles=_pad(cycles, len(totals), 1),
            epoch_tokens=tokens if blend.plan_version > 1 else None,
            sample_tokens=blend.sequence_length,
        )


def _pad(values: Int64s, num_sources: int, value: int = 0) -> Int64s:
    """Extend an array that has a value for each source of a stage, int64 [n], by `value` for each
    source that later stages add. Returns int64 [num_sources]."""
    missing = num_sources - len(values)
    return values if missing == 0 else np.concatenate([values, np.full(missing, value, np.int64)])


def _list_groups(stages: Sequence[Stage]) -> Iterator[list[Stage]]:
    """Group consecutive stages that have the same blend and snapshot. A stage that was cut is the
    last of its group, and a stage with a schedule is a group of its own."""
    group = list[Stage]()
    for stage in stages:
        changes = bool(group) and (group[-1].index, group[-1].blend) != (stage.index, stage.blend)
        if group and (changes or group[-1].cut is not None or stage.blend.schedule is not None):
            yield group
            group = []
        group.append(stage)
    yield group


def _list_steps(group: Sequence[Stage], start: int, tokens: Sequence[int]) -> list[list[Step]]:
    """Return the steps of each stage of a group, as if no stage were cut: several if the stage has
    a schedule, otherwise one.

    Stages with constant shares are divided together, so that many short stages give the same totals
    as one long stage.

    Args:
        start: number of the group's first sample.
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


def _plan_all(
    request: StageRequest, cursor: Int64s, interleaving: str, number: int
) -> PlannedStage:
    """Plan all samples of a request; see `PlannedStage` for the arguments. Raises: PlanError if
    there are none."""
    length = request.num_samples
    if length == 0:
        raise PlanError(f"stage {number} has no samples; expected at least one")
    return PlannedStage(
        request=request, cursor=cursor, interleaving=interleaving, number=number, length=length
    )


def _plan_step(
    stage: Stage, request: StageRequest, cursor: Int64s, end: int, number: int
) -> PlannedStage:
    """Plan a step of a stage, which ends at sample `end`, or at the cut of the stage if that comes
    first.

    Args:
        number: number of the stage in the ledger.

    Raises: PlanError if the stage is cut where its interleaving cannot stop.
    """
    name = stage.blend.interleaving
    step = _plan_all(request, cursor, name, number)
    if stage.cut is None or stage.cut >= end:
        return step
    interleaving = find_interleaving(name)
    length = stage.cut - request.first_sample
    if interleaving.find_tails is None:
        raise PlanError(
            f"a stage with interleaving {name!r} cannot be cut short at sample {stage.cut:,}; begin the next stage "
            f"where this one ends, at sample {stage.end:,}"
        )
    plan = interleaving.plan(request)
    possible = interleaving.round_up(plan, max(1, length))
    if possible != length:
        raise PlanError(
            f"from: found {stage.cut:,}, expected {request.first_sample + possible:,}, the end of a cycle of lanes x "
            "shuffle_window samples; `megablend amend CONFIG --at SAMPLE` rounds up and prints the number to write"
        )
    tails = interleaving.find_tails(plan, length)
    edges = [plan.counts(length)] * 3 if tails is None else [tails.first, tails.read, tails.stop]
    return dataclasses.replace(step, length=length, plan=plan, cut_edges=np.stack(edges))


def samples_of_one_pass(tokens: Sequence[int], sequence_length: int, extra: int) -> list[int]:
    """Return the number of complete samples of each source in one epoch, [num_sources]."""
    return [samples_in(n, sequence_length, extra) for n in tokens]
