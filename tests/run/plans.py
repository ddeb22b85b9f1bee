"""Plans of several stages in lanes, made of lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megablend.blend.interleavings.base import StageRequest
from megablend.blend.plan import PlannedStage, StagesPlan


def make_request(totals: Sequence[int], **settings: Any) -> StageRequest:
    """The request of the first stage of a run, of one cycle per run of ordinals."""
    zeros = np.zeros(len(totals), np.int64)
    defaults: dict[str, Any] = {"first_tokens": zeros, "cycles": zeros + 1, "seed": 1}
    return StageRequest(totals=np.array(totals, np.int64), **(defaults | settings))


def lane_plan(
    totals: Sequence[Sequence[int]],
    *,
    lanes: int,
    slots: int,
    spans: Sequence[int],
    seed: int,
    epoch_tokens: Sequence[int] | None = None,
    sample_tokens: int = 1,
) -> StagesPlan:
    """The plan of stages of one number of lanes; every stage's plan is made."""
    requests = list[StageRequest]()
    start = 0
    tokens = np.zeros(len(spans), np.int64)
    for stage in totals:
        request = StageRequest(
            totals=np.array(stage, np.int64),
            first_sample=start,
            first_tokens=tokens[: len(stage)],
            seed=seed,
            lanes=lanes,
            shuffle_window=slots,
            cycles=np.array(spans, np.int64),
            epoch_tokens=None if epoch_tokens is None else np.array(epoch_tokens, np.int64),
            sample_tokens=sample_tokens,
        )
        requests.append(request)
        start = start + sum(stage)
        tokens = tokens[: len(stage)] + np.array(stage, np.int64) * sample_tokens
    plan = StagesPlan(
        [
            PlannedStage(
                request=request,
                cursor=request.first_tokens,
                interleaving="lanes",
                number=number,
                length=request.num_samples,
            )
            for number, request in enumerate(requests)
        ]
    )
    for number in range(len(requests)):
        plan.plan_of(number)
    return plan
