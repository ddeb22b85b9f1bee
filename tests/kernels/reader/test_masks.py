"""What a batch says of its documents, against lists."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megablend.kernels.reader.masks import count_positions, document_ends, fill_causal_mask
from tests.examples import examples

ROWS = st.integers(1, 9).flatmap(
    lambda length: st.lists(
        st.lists(st.booleans(), min_size=length, max_size=length), min_size=1, max_size=3
    )
)


def starts(row: list[bool]) -> list[int]:
    return [0, *(i for i in range(1, len(row)) if row[i])]


@examples(100)
@given(ROWS)
def test_positions_count_from_the_last_start(rows: list[list[bool]]) -> None:
    out = np.empty((len(rows), len(rows[0])), np.int64)
    count_positions(np.array(rows), out)
    expected = [
        [i - max(s for s in starts(row) if s <= i) for i in range(len(row))] for row in rows
    ]
    assert out.tolist() == expected


@examples(100)
@given(ROWS)
def test_ends_are_running_lengths(rows: list[list[bool]]) -> None:
    begins = np.array([[True, *row[1:]] for row in rows])
    length = begins.shape[1]
    ends = np.empty((len(rows), length + 1), np.int32)
    longest = np.empty(len(rows), np.int32)
    document_ends(begins, ends, longest)
    for row, found, most in zip(rows, ends.tolist(), longest.tolist(), strict=True):
        edges = [*starts(row), length]
        assert found == edges + [length] * (length + 1 - len(edges))
        assert most == max(b - a for a, b in pairwise(edges))


@examples(100)
@given(ROWS)
def test_attention_stays_within_a_document_and_the_past(rows: list[list[bool]]) -> None:
    length = len(rows[0])
    out = np.empty((len(rows), 1, length, length), np.bool_)
    fill_causal_mask(np.array(rows), out)
    for row, found in zip(rows, out[:, 0], strict=True):
        document = [sum(s <= i for s in starts(row)) for i in range(length)]
        seen = [
            [document[i] == document[j] and j <= i for j in range(length)] for i in range(length)
        ]
        assert np.array_equal(~found, seen)
