"""Stages that an amendment cuts, against a twin that walks the run sample by sample.

The twin knows no tails: after a cut a source's next samples are those of its ordinals that were not read, in ascending order.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, pairwise

import numpy as np
import pytest

from megablend.blend.plan import StagesPlan
from megablend.errors import PlanError
from megablend.run.plan_stages import plan_stages
from megablend.run.stage import Blend, SourceShare, Stage
from tests import oracle
from tests.blend.test_plan import History, draw_blend

Sample = tuple[int, int]


def draw_amended(rng: random.Random, *, lengths: tuple[int, ...]) -> History:
    """A history most of whose stages are cut at the end of one of their cycles."""
    num_sources = rng.randrange(1, 6)
    stages = list[Stage]()
    start = 0
    tokens = [rng.randrange(30, 900) for _ in range(num_sources)]
    seed = rng.randrange(2**63)
    version = rng.choice([1, 2, 2])
    for number in range(rng.randrange(2, 6)):
        blend = replace(
            draw_blend(rng, num_sources, seed=seed, version=version),
            sequence_length=rng.choice(lengths),
            lanes=rng.choice([1, 2, 3, 4, 8]),
            shuffle_window=rng.randrange(1, 6),
        )
        blend = replace(
            blend,
            sources=tuple(replace(each, cycles=rng.choice([1, 2, 5, 9])) for each in blend.sources),
        )
        length = rng.randrange(30, 250)
        cycle = blend.lanes * blend.shuffle_window
        end = start + length
        if number:  # what is left of the stage before comes first, where the length changes
            end = max(
                end, start + 1 + drained([*stages, Stage(end=10**6, index="", blend=blend)], tokens)
            )
            length = end - start
        cycles = (length - 1) // cycle if blend.interleaving == "lanes" else 0
        cut = (
            start + rng.randrange(1, cycles + 1) * cycle if cycles and rng.random() < 0.8 else None
        )
        if cut is not None and number:
            drain = drained([*stages, Stage(end=end, index="", blend=blend)], tokens)
            first = start + drain
            cut = first + max(1, (cut - first) // cycle) * cycle
            cut = None if cut >= end else cut
        stages.append(Stage(end=end, index="", blend=blend, cut=cut))
        start = stages[-1].stop
    return History([*stages[:-1], replace(stages[-1], cut=None)], tokens)


def drained(stages: list[Stage], tokens: list[int]) -> int:
    """Samples of the drain before the last of these stages."""
    stretches = plan_stages(stages, tokens).stages
    before = [stretch for stretch in stretches if stretch.number == len(stages) - 2]
    return sum(stretch.stop - stretch.start for stretch in before[1:])


def walk(plan: StagesPlan, history: History) -> list[Sample]:
    """All samples; of the plan only the totals of each stage are taken."""
    samples = list[Sample]()
    seen = [set[int]() for _ in history.tokens]
    # Of each source: an ordinal, and the token at which it begins
    bases = [(0, 0)] * len(history.tokens)
    before: Blend | None = None
    for stretch in plan.stages:
        blend = history.stages[stretch.number].blend
        totals = stretch.request.totals.tolist()
        if before is not None and before.sequence_length != blend.sequence_length:
            for d, each in enumerate(seen):  # nothing may be left in samples of another length
                assert each == set(range(len(each)))
                ordinal, token = bases[d]
                bases[d] = len(each), token + (len(each) - ordinal) * before.sequence_length
        before = blend
        unread = [ascending(each) for each in seen]
        nexts = [[next(unread[d]) for _ in range(total)] for d, total in enumerate(totals)]
        if blend.interleaving == "sequential":
            local = [(d, i) for d, total in enumerate(totals) for i in range(total)]
        else:
            epochs = history.tokens if blend.plan_version > 1 else [None] * len(totals)
            periods = [
                oracle.Periods(
                    source.cycles or 1,
                    0,
                    epochs[d],
                    blend.sequence_length,
                    bases[d][1] + (len(seen[d]) - bases[d][0]) * blend.sequence_length,
                )
                for d, source in enumerate(blend.sources)
            ]
            local = oracle._walk_stage(
                totals, blend.lanes, blend.shuffle_window, blend.seed, len(samples), periods
            )
        for d, i in local[: stretch.stop - stretch.start]:
            samples.append((d, nexts[d][i]))
            seen[d].add(nexts[d][i])
    return samples


def ascending(read: set[int]) -> Iterator[int]:
    """The ordinals that were not read."""
    gone = set(read)
    return (ordinal for ordinal in count() if ordinal not in gone)


def check_history(history: History) -> None:
    plan = history.plan
    expected = walk(plan, history)
    ks = np.arange(plan.num_samples)
    sources, ordinals = plan.locate_many(ks)
    assert list(zip(sources.tolist(), ordinals.tolist(), strict=True)) == expected
    assert len(set(expected)) == len(expected)  # none repeated
    assert np.array_equal(plan.find_samples(sources, ordinals), ks)
    rng = random.Random(len(expected))
    for source in range(plan.num_sources):
        read = {ordinal for which, ordinal in expected if which == source}
        given = [k for k, (which, _) in enumerate(expected) if which == source]
        if read == set(range(len(read))):
            assert [plan.sample_of_count(source, ordinal) for ordinal in range(len(read) + 1)] == [
                *given,
                None,
            ]
        assert [plan.nth_sample(source, n) for n in range(1, len(given) + 1)] == given
        beyond = np.arange(max(read, default=0) + 3)
        found = plan.find_samples(np.full(len(beyond), source, np.int32), beyond)
        assert [k >= 0 for k in found] == [ordinal in read for ordinal in beyond]
    stops = {stretch.stop for stretch in plan.stages}
    for n in {0, plan.num_samples, *stops, rng.randrange(plan.num_samples)}:
        counts = [
            sum(which == source for which, _ in expected[:n]) for source in range(plan.num_sources)
        ]
        assert plan.counts(n).tolist() == counts
    check_tokens(plan, expected)
    assert pickle.loads(pickle.dumps(plan)).locate(plan.num_samples - 1) == expected[-1]


def check_tokens(plan: StagesPlan, expected: list[Sample]) -> None:
    """No token of a source is read twice, and none is left out but in samples of its last length that were not read."""
    sources, ordinals = (np.array(column) for column in zip(*expected, strict=True))
    starts, steps = plan.token_ranges(sources.astype(np.int32), ordinals)
    steps = np.broadcast_to(steps, starts.shape)
    for source in range(plan.num_sources):
        rows = np.flatnonzero(sources == source)
        rows = rows[np.argsort(ordinals[rows])]
        token = 0
        ordinal = 0
        for row in rows.tolist():
            # Unread ones before it are as long as it
            token += (int(ordinals[row]) - ordinal) * int(steps[row])
            assert starts[row] == token
            token = token + int(steps[row])
            ordinal = int(ordinals[row]) + 1
    for n in (0, len(expected) // 2, len(expected)):
        read = np.bincount(sources[:n], steps[:n], minlength=plan.num_sources)
        assert plan.count_tokens(n).tolist() == read.tolist()


@pytest.mark.parametrize("number", range(16))
def test_an_amended_run_equals_its_walk(number: int) -> None:
    check_history(draw_amended(random.Random(number), lengths=(7,) if number % 2 else (5, 7, 16)))


@pytest.mark.slow
def test_many_amended_runs_equal_their_walks() -> None:
    for number in range(1000, 3000):
        check_history(
            draw_amended(random.Random(number), lengths=(7,) if number % 2 else (5, 7, 16))
        )


@pytest.mark.parametrize("number", range(8))
def test_the_past_of_an_amended_run_is_unchanged(number: int) -> None:
    history = draw_amended(random.Random(number), lengths=(5, 7, 16))
    for last, stage in enumerate(history.stages):
        if stage.cut is None:
            continue
        promised = plan_stages([*history.stages[:last], replace(stage, cut=None)], history.tokens)
        ks = np.arange(stage.cut)
        assert np.array_equal(
            np.stack(history.plan.locate_many(ks)), np.stack(promised.locate_many(ks))
        )


def test_a_drain_is_short() -> None:
    """At most max H - 1 cycles of the stages that it drains."""
    drains = 0
    for number in range(30):
        history = draw_amended(random.Random(number), lengths=(5, 7, 16))
        for before, drain in pairwise(history.plan.stages):
            if before.number == drain.number:
                cut = [
                    stage.blend
                    for stage in history.stages[: drain.number + 1]
                    if stage.cut is not None
                ]
                longest = [max(source.cycles or 1 for source in blend.sources) - 1 for blend in cut]
                most = sum(
                    h * blend.lanes * blend.shuffle_window
                    for h, blend in zip(longest, cut, strict=True)
                )
                assert drain.stop - drain.start <= most
                drains += 1
    assert drains > 10


def test_a_stage_without_samples_is_refused() -> None:
    blend = Blend(
        split="test of 1,0,0",
        sequence_length=5,
        add_extra_token_to_sequence=False,
        sources=(SourceShare(name="a", append_eod=None),),
    )
    stage = Stage(end=1, index="f" * 32, blend=blend)
    with pytest.raises(PlanError, match="stage 0 has no samples; expected at least one"):
        plan_stages([stage], [4])
