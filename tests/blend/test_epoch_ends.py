"""Where a source's epoch ends: little of the next one is read before, and all of it is the oracle's order."""

import os
import random

import numpy as np
import pytest

from megablend.blend.allocate import largest_remainder
from tests import oracle
from tests.run.plans import lane_plan

SOAK_PLANS = int(os.environ.get("MEGABLEND_SOAK_PLANS", "2000"))
SOAK_SEED = int(os.environ.get("MEGABLEND_SOAK_SEED", "1"))


def check_plan(given: oracle.Plan) -> float:
    """Order and promises of a plan against the oracle; by how many samples an epoch's end exceeds a quarter."""
    plan = lane_plan(**given)
    sources, ordinals = plan.locate_many(np.arange(plan.num_samples))
    walked = oracle.walk(**given)
    assert list(zip(sources.tolist(), ordinals.tolist(), strict=True)) == walked, given

    rng = random.Random(given["seed"])
    start = rng.randrange(plan.num_samples)
    there = plan.locate_many(np.arange(start, plan.num_samples))  # entered in the middle of periods
    assert np.array_equal(there[1], ordinals[start:]), (start, given)
    for source in range(plan.num_sources):
        of_source = np.flatnonzero(sources == source)
        assert np.array_equal(np.sort(ordinals[of_source]), np.arange(len(of_source)))
        numbers = rng.sample(range(1, len(of_source) + 1), min(3, len(of_source)))
        assert [plan.sample_of_count(source, n - 1) for n in numbers] == [
            of_source[n - 1] for n in numbers
        ], given
    if given["epoch_tokens"] is None:
        return 0.0
    check_that_epochs_mix_in_one_cycle(given, sources, ordinals)
    ends = list(oracle.epoch_ends(given, walked))
    for end in ends:
        # Proved in megablend.kernels.blend.periods
        assert end.early <= end.cycle_samples // 2, (end, given)
        assert end.early <= end.measured, (end, given)
    return max((end.early - end.cycle_samples / 4 for end in ends), default=0.0)


def check_that_epochs_mix_in_one_cycle(
    given: oracle.Plan, sources: np.ndarray, ordinals: np.ndarray
) -> None:
    """Before the cycle in which an epoch ends, nothing of the next one is read; after it, nothing of this one."""
    assert given["epoch_tokens"] is not None
    cycle = given["lanes"] * given["slots"]
    start = 0
    cycles = np.empty(len(sources), np.int64)
    for number, stage in enumerate(given["totals"]):
        cycles[start : start + sum(stage)] = np.arange(sum(stage)) // cycle + (number << 40)
        start += sum(stage)
    for source, tokens in enumerate(given["epoch_tokens"]):
        of_source = sources == source
        begins = ordinals[of_source] * given["sample_tokens"] // tokens
        for epoch in range(1, int(begins.max(initial=0)) + 1):
            last_of_old = cycles[of_source][begins < epoch].max()
            first_of_new = cycles[of_source][begins >= epoch].min()
            assert last_of_old <= first_of_new, (source, epoch, given)


def test_random_plans_equal_the_oracle() -> None:
    rng = random.Random(0)
    excess = [check_plan(oracle.draw_plan(rng, most_samples=600)) for _ in range(40)]
    assert max(excess) <= 2


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_random_plans_equal_the_oracle() -> None:
    rng = random.Random(SOAK_SEED)
    for number in range(SOAK_PLANS):
        given = oracle.draw_plan(rng, most_samples=6000)
        if number % 4 == 0:
            given["epoch_tokens"] = None
        check_plan(given)


@pytest.mark.long
@pytest.mark.parametrize(
    ("lanes", "slots", "cycle_samples", "span"),
    [(512, 64, 320, 32), (64, 64, 41, 32), (8, 64, 100, 7), (1, 64, 9, 3)],
)
@pytest.mark.parametrize("epoch", [2000, 777.3])
def test_an_epoch_begins_when_the_last_one_has_ended(
    lanes: int, slots: int, cycle_samples: int, span: int, epoch: float
) -> None:
    """512 lanes of 64 slots, a share of 1 %, epochs of 2,000 samples: a fifth of the epoch was once read twice before its end."""
    num_cycles = 4 * 2000 // cycle_samples
    totals = [
        largest_remainder(
            [cycle_samples, lanes * slots - cycle_samples], num_cycles * lanes * slots
        )
    ]
    given: oracle.Plan = {
        "totals": totals,
        "lanes": lanes,
        "slots": slots,
        "spans": [span, span],
        "seed": 3,
        "epoch_tokens": [int(epoch * 16), 10**12],
        "sample_tokens": 16,
    }
    early = dict[str, list[oracle.EpochEnd]]()
    for name, epochs in (("regarded", given["epoch_tokens"]), ("not", None)):
        plan = lane_plan(**given | {"epoch_tokens": epochs})
        sources, ordinals = plan.locate_many(np.arange(plan.num_samples))
        ours = np.flatnonzero(sources == 0)  # the oracle would count the others' epochs, too
        ends = []
        for worth in np.ceil(np.arange(1, len(ours) // epoch) * epoch).astype(int):
            low = ours[worth - 1] // (lanes * slots) * lanes * slots
            of_cycle = ((ours >= low) & (ours < low + lanes * slots)).sum()
            ends.append(
                oracle.EpochEnd(
                    0, int((ordinals[ours][:worth] >= worth).sum()), int(of_cycle), True, epoch
                )
            )
        early[name] = ends
    assert len(early["regarded"]) >= 2
    assert max(end.early - end.cycle_samples / 4 for end in early["regarded"]) <= 2
    if lanes > 1:
        assert max(end.early - end.cycle_samples / 4 for end in early["not"]) > 20


def test_periods_begin_and_end_with_an_epoch() -> None:
    """A lane's part of a period is a run of neighbours, from the first cycle that has some of the epoch to its last."""
    lanes = 4
    slots = 8
    span = 3
    epoch = 32 * 5 - 7
    plan = lane_plan(
        [[32 * 20]], lanes=lanes, slots=slots, spans=[span], seed=1, epoch_tokens=[epoch]
    )
    _, ordinals = plan.locate_many(np.arange(32 * 20))
    samples = np.arange(32 * 20)
    begins = {0: 0, 1: 4, 2: 9, 3: 14}  # epoch -> the cycle in which it begins
    for number, begin in begins.items():
        for low in range(begin, begins.get(number + 1, 19) + 1, span):
            inside = (
                (samples // 32 >= low)
                & (samples // 32 < low + span)
                & (ordinals // epoch == number)
            )
            period = np.sort(ordinals[inside])
            assert np.array_equal(period, np.arange(period[0], period[-1] + 1))
            for lane in range(lanes):
                of_lane = np.sort(ordinals[inside & (samples % lanes == lane)])
                assert len(of_lane) == 0 or len(of_lane) == np.ptp(of_lane) + 1


@pytest.mark.parametrize("epoch", [11, 16, 31, 32, 33])
def test_epochs_as_long_as_a_cycle_or_shorter(epoch: int) -> None:
    """Alone, an epoch of 32 samples is all of a cycle; with another source, several epochs of either are in one."""
    given: oracle.Plan = {
        "totals": [[197]],
        "lanes": 4,
        "slots": 8,
        "spans": [3],
        "seed": 5,
        "epoch_tokens": [epoch],
        "sample_tokens": 1,
    }
    assert check_plan(given) <= 2
    assert (
        check_plan(given | {"totals": [[97, 100]], "spans": [3, 1], "epoch_tokens": [epoch, 7]})
        <= 2
    )


def test_epochs_of_less_than_a_sample_and_of_more_than_a_run() -> None:
    for tokens in ([3, 1, 10**15], [10**15, 7, 2]):
        totals = [[200, 31, 90], [7, 0, 50]]
        given: oracle.Plan = {
            "totals": totals,
            "lanes": 4,
            "slots": 6,
            "spans": [3, 2, 5],
            "seed": 9,
            "epoch_tokens": tokens,
            "sample_tokens": 10,
        }
        check_plan(given)
