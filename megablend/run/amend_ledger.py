"""Amend a ledger: one of its stages is cut at the end of a cycle, and other stages follow. No
sample before the cut changes."""

from __future__ import annotations

import bisect
import dataclasses
from itertools import dropwhile

from megablend.blend.interleavings.registry import find_interleaving
from megablend.blend.plan import StagesPlan
from megablend.errors import ConfigError, PlanError, StateError
from megablend.run.ledger import Ledger
from megablend.run.links import find_parting
from megablend.run.stage import Blend, Stage
from megablend.run.state import State


def cut_ledger(ledger: Ledger, plan: StagesPlan, sample: int) -> Ledger:
    """Return the stages of a ledger, cut at the first sample, not before `sample`, where a stage
    can stop. A stage can stop at the end of a cycle, and at its own end.

    If `sample` is in a drain, the drain is read to its end, followed by one cycle.

    Args:
        plan: the plan of the ledger.

    Raises: ConfigError if `sample` is not between 1 and the run's number of samples.
    """
    if not 0 < sample <= ledger.num_samples:
        raise ConfigError(
            f"found sample {sample:,}, expected 1 to {ledger.num_samples:,}: run {ledger.run!r} must keep at least the "
            f"first of its {ledger.num_samples:,} samples; to change the whole run, plan it again (`megablend runs reset "
            "CONFIG`)"
        )
    number = bisect.bisect_left(ledger.ends, sample)
    stage = ledger.stages[number]
    planned = _find_planned(plan, number, stage, sample)
    start = plan.stages[planned].start
    round_up = find_interleaving(stage.blend.interleaving).round_up
    # After a sample of the drain before `start`, the stage continues for one cycle
    length = round_up(plan.plan_of(planned), max(1, sample - start))
    stop = min(stage.stop, start + length)
    last = dataclasses.replace(stage, cut=None if stop == stage.end else stop)
    return dataclasses.replace(ledger, stages=(*ledger.stages[:number], last))


def _find_planned(plan: StagesPlan, number: int, stage: Stage, sample: int) -> int:
    """Return the index in a plan of the part of stage `number` that contains `sample`. If the
    sample is in the drain before the stage, return the index of the stage's first part."""
    last = 0
    for index, part in enumerate(plan.stages):
        # A drain after the stage also has the stage's number, but starts where the stage stops
        if part.number == number and part.start < stage.stop:
            last = index
            if sample <= part.stop:
                break
    return last


def rewind_to(ledger: Ledger, state: State) -> Ledger:
    """Return the ledger as it is in a state's plan. If the state is past the cut of a later
    amendment, the stage that was cut ends where the state says, and no stage follows it.

    Raises: StateError if the state belongs to another plan.
    """
    parting = find_parting(ledger.links, state.stages)
    if not parting.by_cut or state.consumed_samples <= parting.sample:
        state.check(split="train", indices=ledger.indices, stages=ledger.links)
        return ledger
    number = 0
    while ledger.links[number] == state.stages[number]:
        number += 1
    # The state is of another amendment, which this ledger does not have
    if ledger.ends[number] != parting.sample:
        state.check(split="train", indices=ledger.indices, stages=ledger.links)
    last = dataclasses.replace(ledger.stages[number], cut=state.stages[number].cut)
    rewound = dataclasses.replace(ledger, stages=(*ledger.stages[:number], last))
    if state.consumed_samples > rewound.num_samples:
        raise StateError(
            f"the state is at sample {state.consumed_samples:,}, in a stage that run {ledger.run!r} no longer has since it was "
            f"amended from sample {parting.sample:,} on; give a state saved at sample {rewound.num_samples:,} or earlier"
        )
    return rewound


def amend_ledger(cut: Ledger, requested: Ledger, committed: Ledger) -> Ledger:
    """Return the stages of a ledger that was cut, followed by those that are requested after the
    cut.

    Args:
        committed: the ledger before it was cut; its stages after the cut are replaced.

    Raises: PlanError if the requested blend or data of a sample before the cut differs from what
        was committed, a later stage with `new_data` would be left out, or nothing changes;
        ConfigError if no requested stage begins at the cut.
    """
    stop = cut.num_samples
    early_starts = [start for start in requested.starts if cut.starts[-1] < start < stop]
    if early_starts and early_starts[0] not in cut.ends:
        raise ConfigError(
            f"the config's next stage begins at sample {early_starts[0]:,}, expected {stop:,}: set `samples: "
            f"{cut.stages[-1].end}` in the previous stage, as it was built, and `from: {stop}` in the next one"
        )
    cut.check_past(requested, stop)
    if stop not in requested.ends[:-1]:
        later_starts = [start for start in requested.starts if start >= stop]
        listed = ""
        if later_starts:
            listed = f" (its next stage begins at sample {later_starts[0]:,})"
        raise ConfigError(
            f"the config lists no stage that begins at sample {stop:,}{listed}; add one to `stages` after the "
            f"stage that has this sample, with the settings to change and `from: {stop}`"
        )
    added = requested.stages[bisect.bisect_right(requested.ends, stop) :]
    replaced = committed.stages[len(cut.stages) :]
    last = cut.stages[-1]
    if all(
        (stage.index, stage.blend) == (last.index, last.blend) for stage in (added[0], *replaced)
    ):
        raise PlanError(
            f"run {cut.run!r}: amending from sample {stop:,} on would change nothing; change a setting that affects the order "
            f"of samples; masks need no amendment, only `from: {stop}` in their stage"
        )
    cut.check_indices(requested, stop)
    _check_later_data(cut, requested, committed)
    return dataclasses.replace(cut, stages=(*cut.stages, *added))


def _check_later_data(cut: Ledger, requested: Ledger, committed: Ledger) -> None:
    """Refuse a request that has fewer stages with `new_data` at or after the cut than the run. A
    stage that begins exactly at the cut is replaced by the stage that is requested there. Raises:
    PlanError."""
    stop = cut.num_samples
    listed = requested.index_changes
    listed = listed[bisect.bisect_left(listed, stop) :]
    kept = committed.index_changes[len(cut.index_changes) :]
    needed = [sample for sample in kept if sample != stop or stop in listed]
    if len(listed) < len(needed):
        missing = [sample for sample in needed if sample not in listed][-1]
        raise PlanError(
            f"run {cut.run!r} reads new data from sample {missing:,} on, but the config lists no stage with "
            "`new_data` there: list that stage again after the one that you add, or first replace it by one without "
            f"`new_data` (`megablend amend CONFIG --at {missing}`)"
        )


def list_left_out(cut: Ledger, amended: Ledger, committed: Ledger) -> list[int]:
    """List the first samples of committed stages that an amended run no longer has. These are
    stages without `new_data` that begin after the cut and whose settings no stage of the amendment
    has. If the amended run has more stages, the list is empty. Stages that only made the cut stage
    longer do not count.

    Args:
        cut: the ledger up to the amendment.
        committed: the ledger before it was cut.
    """
    number = len(cut.stages)
    added = amended.stages[number:]
    starts = zip(committed.stages[number:], committed.starts[number:], strict=True)
    later = [(stage, start) for stage, start in starts if start != cut.num_samples]
    if len(added) > len(later):
        return []
    own = _settings(cut.stages[-1])
    kept = list(map(_settings, added))
    return [
        start
        for stage, start in dropwhile(lambda pair: _settings(pair[0]) == own, later)
        if start not in committed.index_changes and _settings(stage) not in kept
    ]


def _settings(stage: Stage) -> Blend:
    """Return the settings of a stage that depend on neither its length nor its blocks."""
    sources = (source.with_share(source.share, None) for source in stage.blend.sources)
    return dataclasses.replace(stage.blend, sources=tuple(sources), schedule=None)
