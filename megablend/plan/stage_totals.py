"""The limits of a run with several stages: every source with a share has a sample in the run, and none exceeds its caps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from megablend.errors import PlanError
from megablend.plan.caps import longest_stage
from megablend.plan.check_totals import describe_caps
from megablend.plan.requested_stages import RequestedStage
from megablend.plan.shares import cap_of, find_most_tokens
from megablend.plan.specification import Specification

if TYPE_CHECKING:
    from megablend.plan.epochs import Epochs
    from megablend.plan.stages_plan import StagesPlan, Stretch


def check_stage_totals(asked: Specification, plan: StagesPlan, starts: Sequence[int]) -> None:
    """Refuse a run of several stages in which a source with a share gets no samples, or one exceeds its caps.

    Args:
        plan: of the run.
        starts: first sample of each of the ledger's stages.

    Raises: PlanError that names the stage, the source, and where the stage could end.
    """
    stretches = plan.list_stretches()
    totals = np.sum([stretch.read for stretch in stretches], axis=0)
    for number in np.flatnonzero(totals == 0).tolist():
        source, weight = asked.sources[number], asked.weights[number]
        if weight > 0:
            raise PlanError(
                f"source {source.name!r} gets none of {asked.num_samples:,} samples: its share of the run is "
                f"{float(weight):.3g}; "
                "give it a larger share, or a share of 0 in every stage"
            )
    for stretch in stretches:
        is_drain = stretch.stage + 1 < len(starts) and stretch.start >= starts[stretch.stage + 1]
        # what is left of stages before was begun where their caps allowed it; a drain with a length reads further
        if not is_drain or asked.stage_at(stretch.start).drain is not None:
            _check_caps(asked, asked.stage_at(starts[stretch.stage]), stretch, plan.epochs, is_drain=is_drain)


def _check_caps(
    asked: Specification, stage: RequestedStage, stretch: Stretch, epochs: Epochs, *, is_drain: bool
) -> None:
    """Raises: PlanError for the first source that the stage, or a drain after it, reads more often than its caps allow."""
    request, extra = stretch.request, int(asked.config.add_extra_token_to_sequence)
    length, sources = request.sample_tokens, list(stage.config.sources_of(asked.split).values())
    if not any(source.is_capped for source in sources):
        return
    totals, before = stretch.read.tolist(), stretch.cursor.tolist()
    most = find_most_tokens(sources, epochs, (stretch.cursor + stretch.read * length).tolist())
    left = [
        cap_of(source, tokens, length, extra, read=read, most=limit)
        for source, tokens, read, limit in zip(sources, asked.tokens_of(stage), before, most, strict=True)
    ]
    for i, (source, total, cap) in enumerate(zip(sources, totals, left, strict=True)):
        if cap is None or total <= cap or (is_drain and stage.weights[i] == 0):
            continue
        place = f"stages[{asked.stages.index(stage)}]"
        count = float(epochs.count(i, before[i] + total * length + extra))
        longest = longest_stage(stage.weights, left, redistribute=False)
        ends = "" if not longest else f"end the stage at sample {stretch.start + longest:,} or before, "
        if is_drain:
            raise PlanError(
                f"{place}: source {source.name!r} would have been read {count:.2f} times, more than {describe_caps(source)}, "
                f"when samples get another length at sample {stretch.stop:,}: until then this stage goes on; amend the run "
                "at an earlier sample, or raise the cap in that stage"
            )
        raise PlanError(
            f"{place}: source {source.name!r} would have been read {count:.2f} times at the stage's end, more than "
            f"{describe_caps(source)}: {total:,} samples of {length} tokens are requested, {cap:,} are left; {ends}raise the "
            "cap, give the source a smaller share, or set `on_exhausted: redistribute`"
        )
