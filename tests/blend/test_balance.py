"""How far counts stray from the share: over prefixes of the tree, within steps, and at their ends."""

from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablend.blend.allocate import largest_remainder, stage_totals
from megablend.blend.interleavings.lanes import build_tree
from megablend.blend.plan import StagesPlan
from tests.examples import examples
from tests.run.plans import lane_plan

Floats = npt.NDArray[np.float64]


def blends(scale: int = 1) -> dict[str, list[int | Fraction]]:
    rng = np.random.default_rng(0)
    return {
        "one": [1],
        "equal": [1] * 10,
        "zipf": [Fraction(1, i) for i in range(1, 60 * scale)],
        "dirichlet": [Fraction(w) for w in rng.dirichlet(np.ones(40 * scale))],
        "tiny": [Fraction(1, 10**9), 1, 1],
        "half beside equal": [100 * scale, *[1] * 100 * scale],
        "3 big beside small": [*[500 * scale] * 3, *[1] * 500 * scale],
        "adversarial": [1, 14, 10, 11, 28, 50, 65, 111, 107, 251, 381],
    }


@pytest.mark.long
@pytest.mark.parametrize("name", blends())
@pytest.mark.parametrize("total", [4_001, 10**13])
def test_every_prefix_is_within_2(name: str, total: int) -> None:
    totals = np.array(largest_remainder(blends()[name], total))
    tree = build_tree(totals)
    edges = (
        range(total + 1)
        if total < 10_000
        else np.random.default_rng(1).integers(0, total, 2000).tolist()
    )
    for n in edges:
        ideal = [n * int(samples) for samples in tree.samples]
        worst = max(
            abs(int(count) * total - share)
            for count, share in zip(tree.counts(n), ideal, strict=True)
        )
        assert worst <= 2 * total, n
    assert np.array_equal(tree.counts(total), tree.samples)


def steps(
    plan: StagesPlan, size: int, start: int, stop: int, share: Floats
) -> Iterator[tuple[float, float]]:
    """(worst deviation within a step, at a step's end) of whole steps of `size` in [start, stop), some at a time."""
    seen = plan.counts(start)
    for low in range(start, stop - size + 1, 256 * size):
        high = min(low + 256 * size, low + (stop - low) // size * size)
        sources, _ = plan.locate_many(np.arange(low, high))
        step = np.arange(len(sources)) // size
        cells = step * plan.num_sources + sources
        counts = np.bincount(cells, minlength=(step[-1] + 1) * plan.num_sources).reshape(
            -1, plan.num_sources
        )
        sums = seen + np.cumsum(counts, axis=0)
        ends = low + size * (np.arange(len(counts)) + 1)
        yield (
            float(np.abs(counts - share * size).max()),
            float(np.abs(sums - np.outer(ends, share)).max()),
        )
        seen = sums[-1]


def check_steps(weights: list[int | Fraction], lanes: int, slots: int, total: int) -> None:
    totals = largest_remainder(weights, total)
    plan = lane_plan([totals], lanes=lanes, slots=slots, spans=[1] * len(totals), seed=5)
    share = np.array(totals) / total
    full = total // (lanes * slots) * lanes * slots
    for size in (lanes, lanes // 2, lanes // 4):
        for within, end in steps(plan, size, 0, full, share):
            assert within <= 2
            assert end <= 20
        for within, end in steps(plan, size, full, total, share):
            assert within <= 4
            assert end <= 20


@pytest.mark.parametrize("name", blends())
@pytest.mark.parametrize(("lanes", "slots"), [(8, 64), (64, 64), (32, 100), (12, 40)])
def test_steps_are_balanced(name: str, lanes: int, slots: int) -> None:
    cycle = lanes * slots
    for total in (2 * cycle + 3 * lanes + 5, cycle + cycle // 2 + 1):
        check_steps(blends()[name], lanes, slots, total)


@pytest.mark.slow
@pytest.mark.parametrize("name", blends())
@pytest.mark.parametrize(
    ("lanes", "slots"),
    [(8, 512), (64, 512), (128, 1024), (512, 512), (512, 700), (100, 128), (4, 4096)],
)
def test_steps_are_balanced_in_large_plans(name: str, lanes: int, slots: int) -> None:
    cycle = lanes * slots
    for total in (3 * cycle + cycle // 7, 2 * cycle + cycle * 3 // 4 + 11):
        check_steps(blends(10)[name], lanes, slots, total)


@examples(25)
@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=12),
    st.integers(1, 16),
    st.integers(0, 60),
    st.integers(1, 9000),
)
def test_steps_are_balanced_in_any_plan(
    weights: list[int], quarter: int, more: int, total: int
) -> None:
    check_steps([*weights], 4 * quarter, 4 * quarter + more, total)


@pytest.mark.long
@examples(25)
@given(
    st.lists(st.integers(1, 1000), min_size=2, max_size=40),
    st.integers(2, 8),
    st.integers(1, 3),
    st.integers(1, 200_000),
    st.integers(1, 20_000),
)
def test_steps_of_any_size_in_powers_of_two(
    weights: list[int], digits: int, windows: int, total: int, size: int
) -> None:
    """Sums at any sample stay within 10; those at a slot's samples within 2 log2 K of those at its start."""
    lanes = 2**digits
    totals = largest_remainder(weights, total)
    plan = lane_plan([totals], lanes=lanes, slots=lanes * windows, spans=[1] * len(totals), seed=5)
    sources, _ = plan.locate_many(np.arange(total))
    full = total // (lanes**2 * windows) * lanes**2 * windows
    for source, samples in enumerate(totals):
        seen = np.concatenate([[0], np.cumsum(sources == source)])
        strays = seen - samples / total * np.arange(total + 1)
        assert np.abs(strays).max() <= 10
        assert np.abs(np.diff(strays[::size])).max(initial=0) <= 20
        slots = strays[:full].reshape(-1, lanes)
        assert np.abs(slots - slots[:, :1]).max(initial=0) < 2 * digits


@pytest.mark.long
@pytest.mark.parametrize("name", blends())
def test_a_thousand_appends_of_one_sample_stay_within_2(name: str) -> None:
    weights = blends()[name]
    totals = stage_totals(weights, range(1, 1001))
    plan = lane_plan(totals, lanes=64, slots=512, spans=[1] * len(weights), seed=0)
    sources, _ = plan.locate_many(np.arange(1000))
    seen = np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0)
    share = np.array([float(Fraction(weight) / sum(weights)) for weight in weights])
    assert np.abs(seen - np.outer(np.arange(1, 1001), share)).max() < 2
