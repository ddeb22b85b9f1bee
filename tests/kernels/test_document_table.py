"""Where documents begin: running counts and lengths against plain sums."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablend.kernels.document_table import add_lengths
from tests.examples import examples


@examples(60)
@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(1, 9), st.integers(0, 1))
def test_starts_are_sums(lengths: list[int], every: int, end_tokens: int) -> None:
    ends = [length + end_tokens if length else 0 for length in lengths]
    documents = np.arange(len(lengths) + 1)[::-1].copy()
    firsts = [document - document % every for document in documents.tolist()]
    starts = np.array([sum(ends[:first]) for first in firsts])
    counts = np.array([sum(ends[first : first + every]) for first in firsts])
    assert (
        add_lengths(np.array(lengths, np.int32), every, end_tokens, documents, counts, starts) == -1
    )
    assert starts.tolist() == [sum(ends[:document]) for document in documents]


@pytest.mark.parametrize("wrong", [0, 3, 7, 11])
@pytest.mark.parametrize("value", [-(2**31), -1, 0, 1, 2**31 - 1])
@pytest.mark.parametrize("end_tokens", [0, 1])
def test_lengths_that_do_not_add_up_are_told(wrong: int, value: int, end_tokens: int) -> None:
    lengths = np.array([5, 0, 9, 6] * 3, np.int32)
    counts = np.add.reduceat(lengths + end_tokens * (lengths > 0), [0, 5, 10]).astype(np.int64)
    lengths[wrong] = value
    documents = np.arange(12)
    starts = np.zeros(12, np.int64)
    found = add_lengths(lengths, 5, end_tokens, documents, counts[documents // 5], starts)
    assert found == wrong // 5 * 5
    assert starts[found:].tolist() == [0] * (12 - found)
