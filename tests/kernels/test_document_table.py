"""Where documents begin: running counts and lengths against plain sums."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megablend.kernels.document_table import add_lengths


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(1, 9), st.integers(0, 1))
def test_starts_are_sums(lengths: list[int], every: int, end_tokens: int) -> None:
    ends = [length + end_tokens if length else 0 for length in lengths]
    documents = np.arange(len(lengths) + 1)[::-1].copy()
    starts = np.array([sum(ends[: document - document % every]) for document in documents])
    add_lengths(np.array(lengths, np.int32), every, end_tokens, documents, starts)
    assert starts.tolist() == [sum(ends[:document]) for document in documents]
