"""Which ranges are read together, and how things are cut into portions."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megablend.storage.base import ReadLimits
from megablend.storage.ranges import merge_ranges, portions
from tests.examples import examples

GAP = 5
MOST = 40
LIMITS = ReadLimits(max_gap_bytes=GAP, max_merged_bytes=MOST, max_reads=1)


@examples(100)
@given(st.lists(st.integers(0, 12)), st.integers(1, 9))
def test_portions_are_neighbours_and_small(sizes: list[int], most: int) -> None:
    parts = [sizes[part] for part in portions(np.array(sizes, np.int64), most)]
    assert [size for part in parts for size in part] == sizes
    assert all(parts)
    assert all(sum(part[1:]) < most for part in parts)


def _runs_one_by_one(ranges: list[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """Ranges (offset, size, load) in their order, each taken into the last run or into a new one."""
    found: list[list[tuple[int, int, int]]] = []
    reach = 0
    for each in ranges:
        near = found and each[0] - reach <= GAP
        if near and sum(load for _, _, load in found[-1]) + each[2] <= MOST:
            found[-1].append(each)
        else:
            found.append([each])
        reach = max(reach, each[0] + each[1])
    return found


@examples(300)
@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 50), st.integers(0, 50)), max_size=25),
    st.randoms(),
)
def test_neighbours_are_read_together_as_far_as_the_limits_go(
    ranges: list[tuple[int, int, int]], chance: object
) -> None:
    ranges.sort(key=lambda each: each[0])
    expected = _runs_one_by_one(ranges)
    offsets, sizes, loads = (np.array([each[i] for each in ranges], np.int64) for i in range(3))
    starts, stops, runs = merge_ranges(offsets, sizes, LIMITS, loads)
    assert runs.tolist() == [number for number, run in enumerate(expected) for _ in run]
    assert starts.tolist() == [run[0][0] for run in expected]
    assert stops.tolist() == [max(offset + size for offset, size, _ in run) for run in expected]


@examples(100)
@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 50)), max_size=25),
    st.integers(0, 1 << 30),
)
def test_ranges_may_come_in_any_order(ranges: list[tuple[int, int]], seed: int) -> None:
    offsets, sizes = (np.array([each[i] for each in ranges], np.int64) for i in range(2))
    starts, stops, runs = merge_ranges(offsets, sizes, LIMITS)
    assert ((starts[runs] <= offsets) & (offsets + sizes <= stops[runs])).all()
    order = np.random.default_rng(seed).permutation(len(ranges))
    again = merge_ranges(offsets[order], sizes[order], LIMITS)
    if len(set(offsets.tolist())) == len(ranges):
        assert again.starts.tolist() == starts.tolist()
        assert again.stops.tolist() == stops.tolist()
        assert again.runs.tolist() == runs[order].tolist()
    assert all(first < second for first, second in itertools.pairwise(starts.tolist())) or len(
        set(starts.tolist())
    ) < len(starts)
