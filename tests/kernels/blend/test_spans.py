"""Stretches cut where things begin, token by token."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megablend.kernels.blend.spans import count_cuts, cut
from tests.examples import examples


@examples(200)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60))),
)
def test_cuts_hold_the_tokens_of_their_stretches(
    sizes: list[int], asked: list[tuple[int, int]]
) -> None:
    total = sum(sizes)
    stretches = [(min(a, b, total), min(max(a, b), total)) for a, b in asked]
    starts, stops = np.array(stretches, np.int64).reshape(-1, 2).T.copy()
    offsets = np.cumsum([0, *sizes]).astype(np.int64)
    out = np.full((4, count_cuts(offsets, starts, stops)), -1, np.int64)
    cut(offsets, starts, stops, out)
    tokens = [(thing, token) for thing, size in enumerate(sizes) for token in range(size)]
    for number, (start, stop) in enumerate(stretches):
        mine = out[1:, out[0] == number].T.tolist()
        assert [
            (thing, token) for thing, low, high in mine for token in range(low, high)
        ] == tokens[start:stop]
        assert len(mine) == len({thing for thing, _ in tokens[start:stop]})
