from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablend.kernels.exact.greedy import fill, fill_by_scan
from tests import naive_megatron as naive
from tests.examples import examples

WEIGHTS = st.lists(
    st.sampled_from([1, 2, 3, 7, 50]) | st.floats(0, 1), min_size=1, max_size=9
).filter(any)


def drawn(datasets: Any, samples: Any) -> list[tuple[int, int]]:
    return list(zip(datasets.tolist(), samples.tolist(), strict=True))


@examples(100)
@given(WEIGHTS, st.booleans(), st.data())
def test_in_any_pieces_as_the_twin(weights: list[float], capped: bool, data: st.DataObject) -> None:
    sizes = [int(max(1, weight)) for weight in weights]
    values = np.array(sizes if capped else weights, np.float64)
    values /= values.sum()
    caps = np.array(sizes if capped else [np.inf] * len(sizes), np.float64)
    size = min(60, sum(sizes)) if capped else 60
    _, groups = np.unique(values, return_inverse=True)
    members = np.argsort(groups, kind="stable")
    firsts = np.concatenate([[0], np.cumsum(np.bincount(groups))])
    heads = members[firsts[:-1]]
    counts = np.zeros(len(heads))
    turns = np.zeros(len(heads), np.int64)
    scanned = np.zeros(len(values))
    found: list[tuple[int, int]] = []
    by_scan: list[tuple[int, int]] = []
    while len(found) < size:
        step = len(found)
        piece = data.draw(st.integers(1, size - len(found)))
        datasets = np.empty(piece, np.int16)
        samples = np.empty(piece, np.int64)
        fill(values[heads], caps[heads], firsts, members, counts, turns, step, datasets, samples)
        found += drawn(datasets, samples)
        fill_by_scan(values, caps, scanned, step, datasets, samples)
        by_scan += drawn(datasets, samples)
    assert found == by_scan == naive.blend(values.tolist(), caps.tolist(), size)


@pytest.mark.parametrize("step", [2**31 + 5, 2**40])
def test_far_steps(step: int) -> None:
    weights = np.array([0.3, 0.2, 0.5])
    counts = np.floor(weights * step)
    scanned = counts.copy()
    turns = np.zeros(3, np.int64)
    none = np.full(3, np.inf)
    one, other = ((np.empty(200, np.int16), np.empty(200, np.int64)) for _ in range(2))
    fill(weights, none, np.arange(4), np.arange(3), counts, turns, step, *one)
    fill_by_scan(weights, none, scanned, step, *other)
    assert drawn(*one) == drawn(*other)
    np.testing.assert_array_equal(counts, scanned)
