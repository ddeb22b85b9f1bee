"""Skipped ranges, against lists of the samples that are left."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megablend.run.skips import Skips

RANGES = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 10)), max_size=5)


@given(RANGES)
def test_positions_are_those_of_what_is_left(drawn: list[tuple[int, int]]) -> None:
    skips = Skips()
    for start, size in drawn:
        skips = skips.add(start, start + size)
    dropped = {k for start, size in drawn for k in range(start, start + size)}
    left = [k for k in range(100) if k not in dropped]
    assert [skips.position(trained) for trained in range(len(left))] == left
    assert [skips.next_sample(k) for k in range(60)] == [
        min(n for n in left if n >= k) for k in range(60)
    ]
    assert [skips.count_trained(k) for k in range(61)] == [
        sum(n < k for n in left) for k in range(61)
    ]
    for (_, stop), (start, _) in zip(skips.ranges, skips.ranges[1:], strict=False):
        assert stop < start
    for k in range(60):
        assert (skips.containing(k) is not None) == (k in dropped and k - 1 in dropped)
