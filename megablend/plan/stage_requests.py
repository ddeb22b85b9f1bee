"""From the stages of a ledger to stage requests: each source's samples in a stage, and its position when the stage begins."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from megablend.plan.allocate import stage_totals
from megablend.plan.interleavings.base import Int64s, StageRequest
from megablend.plan.shares import samples_in
from megablend.plan.stage import Stage


def stage_requests(stages: Sequence[Stage], tokens: Sequence[int]) -> list[StageRequest]:
    """The stages of a run as requests to their interleavings.

    Args:
        tokens: tokens per epoch of each source of the split, including end-of-document tokens.

    Raises: PlanError where the ends of stages do not increase.
    """
    requests, start, first_tokens = list[StageRequest](), 0, np.zeros(len(tokens), np.int64)
    for stage, totals in zip(stages, totals_of(stages, tokens), strict=True):
        blend = stage.blend
        request = StageRequest(
            totals=totals,
            first_sample=start,
            first_tokens=first_tokens,
            seed=blend.seed,
            lanes=blend.lanes,
            shuffle_window=blend.shuffle_window,
            cycles=np.array([source.cycles or 1 for source in blend.sources], np.int64),
            epoch_tokens=np.array(tokens, np.int64) if blend.plan_version > 1 else None,
            sample_tokens=blend.sequence_length,
        )
        requests.append(request)
        start, first_tokens = stage.end, first_tokens + totals * blend.sequence_length
    return requests


def totals_of(stages: Sequence[Stage], tokens: Sequence[int]) -> list[Int64s]:
    """Samples of each source in each stage, int64 [num_sources] each.

    Consecutive stages with the same blend are divided together, so that many short stages give the same as one long one.
    """
    totals, start = list[Int64s](), 0
    for blend, group in groupby(stages, key=lambda stage: stage.blend):
        ends = [stage.end - start for stage in group]
        if blend.is_blended:
            divided = stage_totals(blend.shares, ends)
        else:
            divided = [samples_of_one_pass(tokens, blend.sequence_length, int(blend.add_extra_token_to_sequence))]
        totals += [np.array(each, np.int64) for each in divided]
        start += ends[-1]
    return totals


def samples_of_one_pass(tokens: Sequence[int], sequence_length: int, extra: int) -> list[int]:
    """The number of complete samples of each source."""
    return [samples_in(n, sequence_length, extra) for n in tokens]
