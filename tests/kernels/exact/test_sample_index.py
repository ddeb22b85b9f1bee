from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablend.kernels.exact.sample_index import cut
from tests import naive_megatron as naive
from tests.examples import examples


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@examples(50, soak=150)
@given(st.data())
def test_cut_in_any_pieces_equals_the_twin(dtype: Any, data: st.DataObject) -> None:
    sizes = st.integers(0, 9) | st.integers(254, 256)
    lengths = np.array(data.draw(st.lists(sizes, min_size=1, max_size=8)), np.int32)
    documents = np.array(
        data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=12)), np.int32
    )
    length = data.draw(st.integers(1, 7))
    extra = data.draw(st.integers(0, 1))
    samples = max(0, (int(lengths[documents].sum()) - extra) // length)
    rows = np.full((samples + 1, 2), -7, dtype)
    rows[0] = 0
    sample = 1
    document = 0
    tokens = 0
    while document < len(documents) and sample <= samples:
        left = documents[document : document + data.draw(st.integers(1, 12))]
        room = rows[sample : sample + data.draw(st.integers(1, 12))]
        filled, passed, tokens = cut(lengths, left, document, tokens, length, extra, sample, room)
        sample = sample + filled
        document = document + passed
        assert tokens == lengths[documents[:document]].sum()
    assert [tuple(row) for row in rows.tolist()] == naive.sample_index(
        lengths.tolist(), documents.tolist(), length, samples, extra
    )


def test_places_beyond_32_bits() -> None:
    lengths = np.array([2**31 - 1], np.int32)
    documents = np.zeros(3, np.int32)
    rows = np.empty((2, 2), np.int64)
    begin = 2**40 // 2048
    found = cut(lengths, documents, 2**33, begin * 2048 - 5, 2048, 1, begin, rows)
    assert rows.tolist() == [[2**33, 5], [2**33, 2053]]
    assert found == (2, 0, begin * 2048 - 5)


@pytest.mark.parametrize("wrong", [-1, 3, 2**31 - 1, -(2**31)])
def test_documents_that_do_not_exist_are_told(wrong: int) -> None:
    lengths = np.array([5, 6, 7], np.int32)
    documents = np.array([0, 2, wrong, 1], np.int32)
    assert cut(lengths, documents, 0, 0, 4, 1, 1, np.empty((5, 2), np.int32)) == (2, -1, 12)
