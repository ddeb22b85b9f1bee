"""Stretches cut where blocks begin, token by token."""

import random
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from megablend.kernels.blend.spans import STRETCH_DTYPE, cut
from tests.examples import examples


@examples(200)
@given(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=12), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(0, 90))),
    st.sampled_from(["u1", "u2", "u4", "i8"]),
    st.randoms(use_true_random=False),
)
def test_cuts_hold_the_tokens_of_their_ranges(
    stretches: list[list[int]],
    asked: list[tuple[int, int, int]],
    entry_type: str,
    rng: random.Random,
) -> None:
    kept = list[npt.NDArray[Any]]()
    table = np.zeros(len(stretches), STRETCH_DTYPE)
    blocks = list[list[int]]()
    for row, sizes in zip(table, stretches, strict=True):
        blocks.append(list(range(len(sizes))))
        rng.shuffle(blocks[-1])
        offsets = np.cumsum([0, *sizes]).astype(np.int64)
        entries = np.array(blocks[-1], entry_type)
        kept += [offsets, entries]
        row["epoch"] = rng.randrange(9)
        row["first"] = rng.randrange(1 << 60)
        row["tokens"] = sum(sizes)
        row["items"] = len(sizes)
        row["offsets"] = offsets.ctypes.data
        row["entries"] = entries.ctypes.data
        row["entry_bytes"] = entries.itemsize
        row["first_block"] = rng.randrange(1 << 40)
        row["skip"] = rng.randrange(7)
    places = np.array([place % len(stretches) for place, _, _ in asked], np.int64)
    first = table["first"][places]
    tokens = table["tokens"][places]
    starts = first + np.minimum(np.array([start for _, start, _ in asked], np.int64), tokens)
    stops = first + np.array([stop for _, _, stop in asked], np.int64)
    out = np.full((5, cut(table, places, starts, stops, np.empty((5, 0), np.int64))), -1, np.int64)
    assert cut(table, places, starts, stops, out) == out.shape[1]
    for number, place in enumerate(places.tolist()):
        row = table[place]
        everything = [
            (row["epoch"], row["first_block"] + block, token + (row["skip"] if block == 0 else 0))
            for block, size in zip(blocks[place], stretches[place], strict=True)
            for token in range(size)
        ]
        mine = out[1:, out[0] == number].T.tolist()
        assert [
            (epoch, block, token) for epoch, block, low, high in mine for token in range(low, high)
        ] == everything[starts[number] - row["first"] : max(0, stops[number] - row["first"])]
        assert len(mine) == len({block for _, block, _, _ in mine})
