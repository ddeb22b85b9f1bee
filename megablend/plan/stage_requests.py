"""From the stages of a ledger to their plans: each source's samples in a stage, and its position when the stage begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from megablend.errors import PlanError
from megablend.plan.allocate import stage_totals
from megablend.plan.interleavings.base import Int64s, StageRequest, check_tokens
from megablend.plan.interleavings.registry import find_interleaving
from megablend.plan.shares import samples_in
from megablend.plan.stage import Blend, Stage
from megablend.plan.stages_plan import PlannedStage, StagesPlan

Step = tuple[int, Int64s]
"""End of a step, as a sample number of the run; samples of each source in it, int64 [num_sources]."""


def plan_stages(stages: Sequence[Stage], tokens: Sequence[int]) -> StagesPlan:
    """The plan of a run.

    Before samples get another length, what stages that were cut have left of their periods is read: a *drain*, in the settings of
    the stage before, since pieces that are not neighbours are never joined into one sample.

    Args:
        tokens: tokens per epoch of each source of the split, including end-of-document tokens.

    Raises: PlanError where the ends of stages do not increase, or a stage cannot be planned.
    """
    planned, start, number = list[PlannedStage](), 0, 0
    cursor, given, reach = (np.zeros(len(tokens), np.int64) for _ in range(3))
    for group in _list_groups(stages):
        blend = group[0].blend
        if number and stages[number - 1].stop < start >= group[0].end:
            raise PlanError(
                f"stage {number} ends at sample {group[0].end:,}, but where an amendment changes the length of samples, the "
                f"settings before it are kept to sample {start:,}: end the stage later"
            )
        for stage, steps in zip(group, _divide(group, start, tokens), strict=True):
            for end, totals in steps:
                part = _plan_step(stage, _make_request(blend, totals, start, cursor, tokens), end, number)
                read = _count_read(part)
                if part.tails is not None:
                    reach = np.maximum(reach, given + part.tails.stop)
                planned.append(part)
                start, cursor, given = start + part.length, cursor + read * blend.sequence_length, given + read
                if start == stage.stop:
                    break
            number += 1
            left = np.maximum(0, reach - given)
            if number < len(stages) and stages[number].blend.sequence_length != blend.sequence_length and left.any():
                drain = _plan_drain(planned[-1], left, start, cursor)
                planned.append(drain)
                start, cursor, given = start + drain.length, cursor + left * blend.sequence_length, given + left
    return StagesPlan(planned)


def _list_groups(stages: Sequence[Stage]) -> Iterator[list[Stage]]:
    """Neighbours of one blend; a stage that was cut is the last of its group."""
    group = list[Stage]()
    for stage in stages:
        if group and (group[-1].blend != stage.blend or group[-1].cut is not None or stage.blend.schedule is not None):
            yield group
            group = []
        group.append(stage)
    yield group


def _divide(group: Sequence[Stage], start: int, tokens: Sequence[int]) -> list[list[Step]]:
    """The steps of each stage of one blend, had none been cut; one where its shares are constant.

    Stages of constant shares are divided together, so that many short ones give the same as one long one.

    Args:
        start: number of the first sample.
    """
    blend, ends = group[0].blend, [stage.end for stage in group]
    if blend.schedule is not None:
        steps = zip(blend.schedule.ends, blend.schedule.totals(blend.shares), strict=True)
        return [[(start + end, np.array(totals, np.int64)) for end, totals in steps]]
    if blend.is_blended:
        divided = stage_totals(blend.shares, [end - start for end in ends])
    else:
        divided = [samples_of_one_pass(tokens, blend.sequence_length, int(blend.add_extra_token_to_sequence))]
    return [[(end, np.array(totals, np.int64))] for end, totals in zip(ends, divided, strict=True)]


def _make_request(blend: Blend, totals: Int64s, start: int, cursor: Int64s, tokens: Sequence[int]) -> StageRequest:
    """The request of a stage. Raises: PlanError where the tokens that it reaches cannot be counted in 64 bits."""
    check_tokens(totals.tolist(), cursor.tolist(), tokens, blend.sequence_length)
    return StageRequest(
        totals=totals,
        first_sample=start,
        first_tokens=cursor,
        seed=blend.seed,
        lanes=blend.lanes,
        shuffle_window=blend.shuffle_window,
        cycles=np.array([source.cycles or 1 for source in blend.sources], np.int64),
        epoch_tokens=np.array(tokens, np.int64) if blend.plan_version > 1 else None,
        sample_tokens=blend.sequence_length,
    )


def _plan_step(stage: Stage, request: StageRequest, end: int, number: int) -> PlannedStage:
    """A step of stage number `number` of the ledger, which ends at sample `end` or where the stage was cut.

    Raises: PlanError where it was cut and its interleaving cannot stop before its end.
    """
    name = stage.blend.interleaving
    if stage.cut is None or stage.cut >= end:
        return PlannedStage(request=request, interleaving=name, number=number, length=request.num_samples)
    kind, length = find_interleaving(name), stage.cut - request.first_sample
    if kind.find_tails is None:
        raise PlanError(
            f"interleaving {name!r} cannot stop before the end of a stage; only a stage that ends can be followed"
        )
    plan = kind.plan(request)
    tails = kind.find_tails(plan, length)
    return PlannedStage(request=request, interleaving=name, number=number, length=length, plan=plan, tails=tails)


def _count_read(stage: PlannedStage) -> Int64s:
    """Samples of each source that a stage reads: int64 [num_sources]."""
    return stage.request.totals if stage.plan is None else stage.plan.counts(stage.length)


def _plan_drain(stage: PlannedStage, left: Int64s, start: int, cursor: Int64s) -> PlannedStage:
    """The samples that a stage and those before it left of their periods, in the settings of that stage."""
    request = replace(stage.request, totals=left, first_sample=start, first_tokens=cursor)
    return PlannedStage(
        request=request, interleaving=stage.interleaving, number=stage.number, length=request.num_samples
    )


def samples_of_one_pass(tokens: Sequence[int], sequence_length: int, extra: int) -> list[int]:
    """The number of complete samples of each source."""
    return [samples_in(n, sequence_length, extra) for n in tokens]
