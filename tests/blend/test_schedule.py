"""Schedules: steps of whole cycles, shares on the way, and totals that follow the integral of the shares."""

from __future__ import annotations

import json
import math
import random
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from megablend.blend.schedule import Schedule, make_schedule
from megablend.run.ledger_file import parse_ledger
from megablend.run.ledger_format import dump_ledger, ledger_record
from megablend.run.plan_stages import plan_stages
from megablend.run.stage import Blend, SourceShare, Stage
from tests.blend.test_plan import History
from tests.run.test_amended_plan import walk


def draw_shares(rng: random.Random, num_sources: int) -> tuple[Fraction, ...]:
    weights = [rng.choice([0, rng.randrange(1, 50)]) for _ in range(num_sources)]
    weights[rng.randrange(num_sources)] += 1
    return tuple(Fraction(weight, sum(weights)) for weight in weights)


def draw_schedule(rng: random.Random, num_sources: int) -> Schedule:
    made = make_schedule(
        rng.choice(["linear", "cosine"]),
        rng.choice([2, 5, 32]),
        draw_shares(rng, num_sources),
        samples=rng.randrange(60, 500),
        cycle=rng.choice([4, 6, 12]),
        longest=rng.choice([1, 3]),
    )
    assert made is not None
    return made


@pytest.mark.parametrize("seed", range(20))
def test_totals_follow_the_integral_of_the_shares(seed: int) -> None:
    rng = random.Random(seed)
    target = draw_shares(rng, 4)
    schedule = draw_schedule(rng, 4)
    due = [Fraction(0)] * 4
    given = [0] * 4
    before = 0
    totals = schedule.totals(target)
    for step, (end, each) in enumerate(zip(schedule.ends, totals, strict=True)):
        way = (2 * step + 1) / (2 * len(totals))
        done = way if schedule.kind == "linear" else (1 - math.cos(math.pi * way)) / 2
        shares = [
            float(a) + (float(b) - float(a)) * done
            for a, b in zip(schedule.start, target, strict=True)
        ]
        assert [float(share) for share in schedule.shares(target)[step]] == pytest.approx(
            shares, abs=1e-11
        )
        due = [
            had + share * (end - before)
            for had, share in zip(due, schedule.shares(target)[step], strict=True)
        ]
        given = [had + more for had, more in zip(given, each, strict=True)]
        assert sum(each) == end - before
        assert min(each) >= 0
        assert all(abs(had - owed) < 2 for had, owed in zip(given, due, strict=True))
        before = end
    assert before == schedule.samples
    whole = [(a + b) / 2 * schedule.samples for a, b in zip(schedule.start, target, strict=True)]
    assert all(
        abs(had - float(owed)) < 1 + schedule.cycle for had, owed in zip(given, whole, strict=True)
    )


def test_steps_are_whole_cycles_and_long_enough() -> None:
    half = (Fraction(1, 2), Fraction(1, 2))

    def steps(samples: int, number: int = 32, longest: int = 1) -> list[int] | None:
        made = make_schedule("linear", number, half, samples=samples, cycle=10, longest=longest)
        return None if made is None else np.diff([0, *made.ends]).tolist()

    assert steps(19) is None
    assert steps(20) == [10, 10]
    assert steps(1280) == [40] * 32
    assert steps(400) == [40] * 10  # at least four cycles each
    assert steps(1280, longest=4) == [160] * 8
    assert steps(105, number=2) == [50, 55]
    assert steps(12_800, number=3) == [4260, 4270, 4270]


@pytest.mark.parametrize("seed", range(8))
def test_a_run_with_a_schedule_equals_its_walk(seed: int) -> None:
    rng = random.Random(seed)
    schedule = draw_schedule(rng, 3)
    lanes = 2
    sources = tuple(
        SourceShare(name=str(d), append_eod=None, share=share, cycles=rng.randrange(1, 4))
        for d, share in enumerate(draw_shares(rng, 3))
    )
    blend = Blend(
        split="train of 1,0,0",
        sequence_length=7,
        add_extra_token_to_sequence=True,
        sources=sources,
        interleaving="lanes",
        plan_version=2,
        seed=seed,
        lanes=lanes,
        shuffle_window=schedule.cycle // lanes,
        schedule=schedule,
    )
    tokens = [rng.randrange(30, 900) for _ in range(3)]
    plain = [
        Stage(end=48, index="f" * 32, blend=Blend(**{f: getattr(blend, f) for f in FIELDS})),
        Stage(end=48 + schedule.samples, index="f" * 32, blend=blend),
    ]
    cut = 48 + schedule.samples // 2 // schedule.cycle * schedule.cycle
    amended = [
        plain[0],
        Stage(end=plain[1].end, index="f" * 32, blend=blend, cut=cut),
        Stage(**NEXT, blend=plain[0].blend),
    ]
    for stages in (plain, amended):
        history = History(stages, tokens)
        plan = history.plan
        expected = walk(plan, history)
        sources_of, ordinals = plan.locate_many(np.arange(plan.num_samples))
        assert list(zip(sources_of.tolist(), ordinals.tolist(), strict=True)) == expected
        assert np.array_equal(plan.find_samples(sources_of, ordinals), np.arange(plan.num_samples))
        parsed = parse_ledger(json.loads(dump_ledger("demo", stages)))
        assert (parsed.run, list(parsed.stages)) == ("demo", stages)
    before = plan_stages(plain, tokens)
    assert np.array_equal(
        np.stack(before.locate_many(np.arange(cut))), np.stack(plan.locate_many(np.arange(cut)))
    )
    record = ledger_record("demo", plain)
    assert len(record["stages"]) == 2
    assert len(dump_ledger("demo", plain)) < 1500


FIELDS = (
    "split",
    "sequence_length",
    "add_extra_token_to_sequence",
    "sources",
    "interleaving",
    "plan_version",
    "seed",
    "lanes",
    "shuffle_window",
)
NEXT: dict[str, Any] = {"end": 2000, "index": "f" * 32}
