"""Where sources begin, end and repeat in a plan, against a walk over the whole run."""

from __future__ import annotations

import numpy as np
import pytest

from megablend.blend.epochs import Epochs, Segment
from megablend.blend.interleavings.base import StageRequest
from megablend.blend.plan import PlannedStage, StagesPlan
from megablend.blend.progress import NONE, find_epoch_ends, find_presence


def make_plan(
    totals: list[list[int]], tokens: list[int], length: int, *, interleaving: str = "lanes"
) -> StagesPlan:
    """A plan of stages with these totals, of sources with so many tokens an epoch."""
    stages = []
    start = 0
    first = np.zeros(len(tokens), np.int64)
    for each in np.array(totals, np.int64):
        stages.append(
            StageRequest(
                totals=each,
                first_sample=start,
                first_tokens=first,
                seed=3,
                lanes=4,
                shuffle_window=8,
                cycles=np.full(len(tokens), 2),
                epoch_tokens=np.array(tokens),
                sample_tokens=length,
            )
        )
        start = start + int(each.sum())
        first = first + each * length
    return StagesPlan(
        [
            PlannedStage(
                request=stage,
                cursor=stage.first_tokens,
                interleaving=interleaving,
                number=number,
                length=stage.num_samples,
            )
            for number, stage in enumerate(stages)
        ],
        Epochs(tuple((Segment(0, 0, "", "block", each),) for each in tokens)),
    )


@pytest.mark.parametrize("scanned", [16, 1000])
@pytest.mark.parametrize("interleaving", ["lanes", "sequential"])
def test_presence_is_what_a_walk_finds(scanned: int, interleaving: str) -> None:
    totals = [[500, 120, 30, 1, 0], [20, 300, 0, 0, 2]]
    plan = make_plan(totals, [900, 800, 100, 50, 50], 8, interleaving=interleaving)
    start = 0
    for stage in totals:
        stop = start + sum(stage)
        sources = [plan.locate(k)[0] for k in range(start, stop)]
        found = find_presence(plan, start, stop, scanned=scanned)
        assert found.counts.tolist() == stage
        for d, count in enumerate(stage):
            places = [start + i for i, source in enumerate(sources) if source == d]
            assert (found.first[d], found.last[d]) == (
                (places[0], places[-1]) if places else (NONE, NONE)
            )
            share = count / sum(stage)
            given = 0
            errors = [0.0]
            for n, source in enumerate(sources[:scanned], 1):
                given += source == d
                errors.append(abs(given - share * n))
            assert found.worst_error[d] == pytest.approx(max(errors))
        start = stop


def test_epochs_end_where_as_many_samples_were_read() -> None:
    totals = [[90, 30], [40, 60]]
    tokens = [203, 77]
    length = 8
    plan = make_plan(totals, tokens, length)
    for d, epoch in enumerate(tokens):
        samples = sorted(k for k in range(plan.num_samples) if plan.locate(k)[0] == d)
        ends = [
            samples[(e * epoch - 1) // length] for e in range(1, len(samples) * length // epoch + 1)
        ]
        assert find_epoch_ends(plan, limit=99)[d] == ends
        assert find_epoch_ends(plan, limit=2)[d] == ends[:2]


def test_a_source_without_samples_ends_no_epoch() -> None:
    plan = make_plan([[5, 0]], [100, 3], 8)
    assert find_epoch_ends(plan, limit=5) == [[], []]
