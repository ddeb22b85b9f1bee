"""A sample index made in parts is the one that is made at once."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablend.errors import PlanError
from megablend.megatron.exact.epochs import num_samples
from megablend.megatron.exact.samples import count_run, cut_run, end_row, reached
from tests import naive_megatron as naive
from tests.examples import examples
from tests.megatron.exact.whole_index import sample_index


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@examples(200)
@given(st.data())
def test_parts_make_the_whole(dtype: Any, data: st.DataObject) -> None:
    lengths = np.array(data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=9)), np.int32)
    documents = np.array(
        data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=20)), np.int32
    )
    length = data.draw(st.integers(1, 9))
    extra = data.draw(st.integers(0, 1))
    keep_tail = data.draw(st.booleans())
    tokens = int(lengths[documents].sum())
    samples = num_samples(tokens, 1, length, extra, keep_tail) if tokens else 0
    cuts = sorted(data.draw(st.lists(st.integers(0, len(documents)), max_size=4)))
    rows = np.full((samples + 1, 2), -7, dtype)
    made = [0]
    rows[0] = 0
    block = data.draw(st.integers(1, 5))
    max_rows = data.draw(st.integers(1, 4))
    sizes: dict[str, Any] = {"extra": extra, "dtype": dtype, "block": block, "max_rows": max_rows}
    start = 0
    for first, stop in pairwise([0, *cuts, len(documents)]):
        gathered, sums = count_run(lengths, documents[first:stop], block=block)
        for sample, part in cut_run(gathered, sums, first, start, length, samples, **sizes):
            assert part.dtype == dtype
            rows[sample : sample + len(part)] = part
            made += range(sample, sample + len(part))
        start += sum(sums)
    assert start == tokens
    sample = reached(tokens, length, samples, extra)
    end = int(lengths[documents[-1]]), len(documents), sample, samples
    options: dict[str, Any] = {"extra": extra, "keep_tail": keep_tail}
    try:
        expected = sample_index(lengths, documents, length, samples, dtype=dtype, **options)
    except PlanError as error:
        with pytest.raises(PlanError, match=str(error)):
            end_row(*end, **options)
        return
    if sample <= samples:
        rows[sample:] = end_row(*end, **options)
        made += range(sample, samples + 1)
    assert made == list(range(samples + 1))  # each once, in order
    np.testing.assert_array_equal(rows, expected, strict=True)
    if not keep_tail:
        found = naive.sample_index(lengths.tolist(), documents.tolist(), length, samples, extra)
        assert [tuple(row) for row in rows.tolist()] == found


def test_a_run_of_other_lengths_is_refused() -> None:
    lengths = np.array([5, 6], np.int32)
    with pytest.raises(
        PlanError,
        match="the document index refers to documents 0 to 2, but lengths are given for only 2",
    ):
        count_run(lengths, np.array([0, 2], np.int32))
    with pytest.raises(PlanError, match="enough for 2 samples, but 3 were planned"):
        end_row(6, 2, reached(11, 4, 3, 1), 3, extra=1, keep_tail=False)
