"""Stages that differ: each in its own weights, lanes, window, cycles and sequence length, and ordinals go on."""

from __future__ import annotations

import pickle
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import pytest

from megablend.blend.interleavings.lanes import LanePlan
from megablend.blend.plan import StagesPlan
from megablend.errors import PlanError
from megablend.run.ledger import Ledger
from megablend.run.plan_stages import plan_stages
from megablend.run.stage import Blend, SourceShare, Stage
from tests import oracle
from tests.run.plans import make_request


@dataclass(frozen=True)
class History:
    """A run of several stages."""

    stages: list[Stage]
    tokens: list[int]

    @property
    def plan(self) -> StagesPlan:
        return plan_stages(self.stages, self.tokens)


def draw_history(rng: random.Random) -> History:
    """Some stages begin as the one before goes on; most change weights, lanes, windows and cycles."""
    num_sources = rng.randrange(1, 6)
    end = 0
    stages = list[Stage]()
    blend = draw_blend(rng, num_sources, seed=rng.randrange(2**63), version=rng.choice([1, 2]))
    for _ in range(rng.randrange(1, 6)):
        if stages and rng.random() < 0.7:
            blend = draw_blend(rng, num_sources, seed=blend.seed, version=blend.plan_version)
        end += rng.randrange(1, 150)
        stages.append(Stage(end=end, index="f" * 32, blend=blend))
    return History(stages, [rng.randrange(1, 900) for _ in range(num_sources)])


def draw_blend(rng: random.Random, num_sources: int, *, seed: int, version: int) -> Blend:
    weights = [rng.choice([0, rng.randrange(1, 50)]) for _ in range(num_sources)]
    weights[rng.randrange(num_sources)] += 1
    shares = [Fraction(weight, sum(weights)) for weight in weights]
    return Blend(
        split="train of 1,0,0",
        sequence_length=rng.choice([5, 7, 7, 16]),
        add_extra_token_to_sequence=True,
        sources=tuple(
            SourceShare(name=str(number), append_eod=None, share=share, cycles=rng.randrange(1, 5))
            for number, share in enumerate(shares)
        ),
        interleaving=rng.choice(["lanes", "lanes", "lanes", "sequential"]),
        plan_version=version,
        seed=seed,
        lanes=rng.choice([1, 2, 3, 4, 8, 64]),
        shuffle_window=rng.randrange(1, 20),
    )


def totals_by_hand(stages: Sequence[Stage]) -> list[list[int]]:
    """Of a blend's stages together each source has had its share, to within a sample; see `stage_totals` for a formula."""
    totals = list[list[int]]()
    start = 0
    given: list[int] = []
    for number, stage in enumerate(stages):
        shares = stage.blend.shares
        if number == 0 or stages[number - 1].blend != stage.blend:
            start = stages[number - 1].end if number else 0
            given = [0] * len(shares)
        end = stage.end - start
        missing = stage.end - start - sum(given)
        lacking = [
            max(Fraction(0), share * end - had) for share, had in zip(shares, given, strict=True)
        ]
        parts = [lack * missing / sum(lacking) for lack in lacking]
        floors = [int(part) for part in parts]
        by_rest = sorted(range(len(parts)), key=lambda d: (floors[d] - parts[d], d))
        for d in by_rest[: missing - sum(floors)]:
            floors[d] += 1
        totals.append(floors)
        given = [had + more for had, more in zip(given, floors, strict=True)]
    return totals


def walk(history: History) -> list[oracle.Sample]:
    """All samples, stage by stage, sample by sample."""
    samples = list[oracle.Sample]()
    given = [0] * len(history.tokens)
    cursors = [0] * len(history.tokens)
    for stage, totals in zip(history.stages, totals_by_hand(history.stages), strict=True):
        blend = stage.blend
        if blend.interleaving == "sequential":
            samples += [(d, given[d] + i) for d, total in enumerate(totals) for i in range(total)]
        else:
            epochs = history.tokens if blend.plan_version > 1 else [None] * len(given)
            periods = [
                oracle.Periods(
                    source.cycles or 1, given[d], epochs[d], blend.sequence_length, cursors[d]
                )
                for d, source in enumerate(blend.sources)
            ]
            samples += oracle._walk_stage(
                totals, blend.lanes, blend.shuffle_window, blend.seed, len(samples), periods
            )
        cursors = [
            read + total * blend.sequence_length
            for read, total in zip(cursors, totals, strict=True)
        ]
        given = [had + more for had, more in zip(given, totals, strict=True)]
    return samples


HISTORIES = [draw_history(random.Random(number)) for number in range(36)]


@pytest.mark.parametrize("history", HISTORIES, ids=range(len(HISTORIES)))
def test_a_history_equals_its_walk(history: History) -> None:
    expected = walk(history)
    plan = history.plan
    assert len(expected) == plan.num_samples == history.stages[-1].end
    rng = random.Random(len(expected))
    backwards = np.arange(plan.num_samples)[::-1]
    for ks in (
        np.arange(plan.num_samples),
        backwards,
        np.array(rng.choices(range(plan.num_samples), k=50)),
    ):
        sources, ordinals = history.plan.locate_many(ks)
        assert list(zip(sources.tolist(), ordinals.tolist(), strict=True)) == [
            expected[k] for k in ks
        ]
        assert np.array_equal(plan.find_samples(sources, ordinals), ks)
    for source in range(plan.num_sources):
        mine = sorted(ordinal for which, ordinal in expected if which == source)
        assert mine == list(range(len(mine)))  # none lost, none repeated
    for n in {
        0,
        plan.num_samples,
        *(stage.end for stage in history.stages),
        rng.randrange(plan.num_samples),
    }:
        counts = [
            sum(which == source for which, _ in expected[:n]) for source in range(plan.num_sources)
        ]
        assert plan.counts(n).tolist() == counts
    assert pickle.loads(pickle.dumps(plan)).locate(plan.num_samples - 1) == expected[-1]


@pytest.mark.parametrize("history", HISTORIES, ids=range(len(HISTORIES)))
def test_a_sample_begins_where_the_one_before_ends(history: History) -> None:
    plan = history.plan
    ends = [stage.end for stage in history.stages]
    lengths = [stage.blend.sequence_length for stage in history.stages]
    sources, ordinals = plan.locate_many(np.arange(plan.num_samples))
    starts = plan.token_ranges(sources, ordinals)[0]
    for source in range(plan.num_sources):
        token = 0
        for k in sorted(np.flatnonzero(sources == source).tolist(), key=lambda k: int(ordinals[k])):
            assert starts[k] == token
            token += lengths[bisect_right(ends, k)]


@pytest.mark.parametrize("history", HISTORIES[:20], ids=range(20))
def test_a_stage_more_changes_nothing_before_it(history: History) -> None:
    last = history.stages[-1]
    blend = replace(last.blend, lanes=5, shuffle_window=11, sources=last.blend.sources)
    longer = replace(
        history, stages=[*history.stages, Stage(end=last.end + 77, index=last.index, blend=blend)]
    )
    ks = np.arange(last.end)
    assert np.array_equal(
        np.stack(history.plan.locate_many(ks)), np.stack(longer.plan.locate_many(ks))
    )
    digests = [Ledger(run="demo", stages=tuple(each.stages)).digests for each in (history, longer)]
    assert digests[1][: len(digests[0])] == digests[0]


def test_a_blend_that_comes_back_begins_its_own_account() -> None:
    history = HISTORIES[0]
    blend = history.stages[0].blend
    other = draw_blend(random.Random(5), len(history.tokens), seed=1, version=2)
    stages = [
        Stage(end=end, index="", blend=each)
        for end, each in ((10, blend), (25, other), (40, blend), (55, blend))
    ]
    plan = plan_stages(stages, history.tokens)
    assert [stretch.request.totals.tolist() for stretch in plan.stages] == totals_by_hand(stages)


def test_only_the_stages_that_are_read_are_made() -> None:
    history = next(each for each in HISTORIES if len(each.stages) == 5)
    plan = history.plan
    plan.locate_many(np.arange(history.stages[1].end, history.stages[2].end))
    assert list(plan._plans) == [2]


@pytest.mark.parametrize("seed", range(3))
def test_counts_belong_to_the_caller(seed: int) -> None:
    plan = draw_history(random.Random(seed)).plan
    for n in (0, plan.num_samples // 2, plan.num_samples):
        counts = plan.counts(n)
        expected = counts.tolist()
        counts += 1
        assert plan.counts(n).tolist() == expected


def test_the_first_sample_chooses_the_order() -> None:
    def order(first_sample: int = 0) -> bytes:
        return (
            LanePlan(make_request([100], shuffle_window=100, first_sample=first_sample))
            .locate_many(np.arange(100))[1]
            .tobytes()
        )

    assert len({order(), order(first_sample=100), order(first_sample=200)}) == 3


def test_a_stage_without_samples_is_refused() -> None:
    history = HISTORIES[0]
    stages = [*history.stages, history.stages[-1]]
    with pytest.raises(PlanError, match="a stage ends at sample"):
        plan_stages(stages, history.tokens)
