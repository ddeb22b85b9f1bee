"""Amending a ledger: its last stage stops at the end of a cycle, and other stages follow. No sample
before it changes."""

from __future__ import annotations

import dataclasses

from megablend.blend.interleavings.registry import find_interleaving
from megablend.blend.plan import StagesPlan
from megablend.errors import ConfigError, PlanError, StateError
from megablend.run.ledger import Ledger, describe_difference
from megablend.run.links import find_parting
from megablend.run.stage import Stage
from megablend.run.state import State


def cut_ledger(ledger: Ledger, plan: StagesPlan, sample: int) -> Ledger:
    """The ledger up to the first sample from `sample` on at which its stage can stop: the end of a
    cycle, or of the stage.

    What is left of a stage before it (a drain) is read to its end, and then one cycle.

    Args:
        plan: the ledger's.

    Raises: ConfigError for a sample that the run does not have, and before its first.
    """
    if not 0 < sample <= ledger.num_samples:
        raise ConfigError(
            f"found sample {sample:,}, expected 1 to {ledger.num_samples:,}, the samples of run {ledger.run!r}; to "
            "change the whole run, plan it again (`megablend runs reset CONFIG`)"
        )
    number = next(number for number, stop in enumerate(ledger.ends) if sample <= stop)
    stretches = plan.stages
    stage = ledger.stages[number]
    # the steps of the stage, without a drain after it
    steps = [
        which
        for which, each in enumerate(stretches)
        if each.number == number and each.start < stage.stop
    ]
    which = next((which for which in steps if sample <= stretches[which].stop), steps[-1])
    start = stretches[which].start
    round_up = find_interleaving(stage.blend.interleaving).round_up
    stop = min(stage.stop, start + round_up(plan.plan_of(which), max(1, sample - start)))
    cut = None if stop == stage.end else stop
    return dataclasses.replace(
        ledger, stages=(*ledger.stages[:number], dataclasses.replace(stage, cut=cut))
    )


def rewind_to(ledger: Ledger, state: State) -> Ledger:
    """The ledger as a state knows it: without a cut that the state has passed,
    on the plan that was committed before it.

    Raises: StateError if the state is of another run.
    """
    parting = find_parting(ledger.links, state.stages)
    if parting is None or not parting.by_cut or state.consumed_samples <= parting.sample:
        state.check(split="train", indices=ledger.indices, stages=ledger.links)
        return ledger
    number = next(
        i for i, (x, y) in enumerate(zip(ledger.links, state.stages, strict=False)) if x != y
    )
    # The state is of another amendment, which this ledger does not have
    if ledger.ends[number] != parting.sample:
        state.check(split="train", indices=ledger.indices, stages=ledger.links)
    known = dataclasses.replace(ledger.stages[number], cut=state.stages[number].cut)
    rewound = dataclasses.replace(ledger, stages=(*ledger.stages[:number], known))
    if state.consumed_samples > rewound.num_samples:
        raise StateError(
            f"the state is at sample {state.consumed_samples:,}, in a stage that run {ledger.run!r} no longer has: it was "
            f"amended from sample {parting.sample:,} on; give a state of sample {rewound.num_samples:,} or earlier"
        )
    return rewound


def amend_ledger(cut: Ledger, requested: Ledger, committed: Ledger) -> Ledger:
    """The stages of a ledger that was cut, followed by those that are requested after it.

    Args:
        committed: the ledger as it is; its stages after the cut are replaced.

    Raises: PlanError if the blend of a sample before differs from the committed one, or nothing
        changes; ConfigError if no stage is requested to begin there.
    """
    at = cut.num_samples
    early = next((start for start in requested.starts if cut.starts[-1] < start < at), None)
    if early is not None and early not in cut.ends:
        raise ConfigError(
            f"the config's next stage begins at sample {early:,}, expected {at:,}: set the end of the stage before "
            f"it to the one that was built, `samples: {cut.stages[-1].end}`, and set `from: {at}`, or no `from`, in "
            "the next stage"
        )
    cut.check_past(requested, at)
    if at not in requested.ends[:-1]:
        where = next((start for start in requested.starts if start >= at), None)
        listed = f" (its next stage begins at sample {where:,})" if where is not None else ""
        raise ConfigError(
            f"the config lists no stage that begins at sample {at:,}{listed}; add one to `stages` after the stage that has this "
            f"sample, with what changes and `from: {at}`"
        )
    added = [stage for stage in requested.stages if stage.stop > at]
    replaced = committed.stages[len(cut.stages) :]
    if not any(_differs(stage, cut.stages[-1]) for stage in (added[0], *replaced)):
        raise PlanError(
            f"run {cut.run!r}: the order from sample {at:,} on would not change; change a setting that affects it (masks do not, "
            "and need no amendment)"
        )
    return dataclasses.replace(cut, stages=(*cut.stages, *added))


def _differs(stage: Stage, before: Stage) -> bool:
    """Whether a stage has another order than the one before it."""
    return stage.index != before.index or describe_difference(before.blend, stage.blend) is not None
