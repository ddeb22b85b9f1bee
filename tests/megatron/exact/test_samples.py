from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablend.errors import PlanError
from megablend.megatron.exact import samples as ours
from megablend.megatron.exact.epochs import num_samples
from tests.examples import examples
from tests.megatron.exact.whole_index import sample_index
from tests.megatron_core import megatron


def theirs(
    lengths: Any,
    documents: Any,
    length: int,
    epochs: int,
    tokens: int,
    keep_tail: bool,
    extra: int,
    dtype: Any,
) -> Any:
    build = getattr(megatron("helpers_cpp"), f"build_sample_idx_{np.dtype(dtype).name}")
    rows: Any = build(lengths, documents, length, epochs, tokens, not keep_tail, extra)
    return rows


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@examples(150)
@given(st.data())
def test_as_megatron(dtype: Any, data: st.DataObject) -> None:
    lengths = np.array(data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=9)), np.int32)
    tokens = int(lengths.sum())
    epochs = data.draw(st.integers(1, 3))
    length = data.draw(st.integers(1, 9))
    extra = data.draw(st.integers(0, 1))
    keep_tail = data.draw(st.booleans())
    if tokens == 0:
        return
    documents = np.tile(np.arange(len(lengths), dtype=np.int32), epochs)
    np.random.RandomState(data.draw(st.integers(0, 99))).shuffle(documents)
    expected = theirs(lengths, documents, length, epochs, tokens, keep_tail, extra, dtype)
    samples = num_samples(tokens, epochs, length, extra, keep_tail)
    options: dict[str, Any] = {"extra": extra, "keep_tail": keep_tail, "dtype": dtype}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours, "ROWS", data.draw(st.integers(1, 9)))
        if expected[-1, 1] < 0:
            with pytest.raises(PlanError, match="the last of the shuffled documents is empty"):
                sample_index(lengths, documents, length, samples, **options)
        else:
            found = sample_index(lengths, documents, length, samples, **options)
            np.testing.assert_array_equal(found, expected, strict=True)


@pytest.mark.long
def test_many_documents_as_megatron() -> None:
    rng = np.random.default_rng(1)
    lengths = rng.integers(0, 90, 400_000, dtype=np.int32)
    lengths[[5, 77_777]] = 9_000_000, 1
    documents = rng.permutation(400_000).astype(np.int32)
    tokens = int(lengths.sum())
    samples = num_samples(tokens, 1, 512, 1, keep_tail=False)
    found = sample_index(lengths, documents, 512, samples, extra=1)
    np.testing.assert_array_equal(
        found, theirs(lengths, documents, 512, 1, tokens, False, 1, np.int32), strict=True
    )


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("longest", [80, 400, 100_000])
def test_short_documents_as_megatron(longest: int, dtype: Any) -> None:
    rng = np.random.default_rng(2)
    lengths = rng.integers(0, 80, 300_000, dtype=np.int32)
    lengths[rng.integers(0, 300_000, 3000 if longest < 500 else 20)] = longest
    documents = np.concatenate([rng.permutation(300_000) for _ in range(2)]).astype(np.int32)
    tokens = int(lengths.sum())
    samples = num_samples(tokens, 2, 2000, 0, keep_tail=True)
    found = sample_index(lengths, documents, 2000, samples, extra=0, keep_tail=True, dtype=dtype)
    np.testing.assert_array_equal(
        found, theirs(lengths, documents, 2000, 2, tokens, True, 0, dtype), strict=True
    )


@pytest.mark.long
def test_samples_that_single_precision_adds() -> None:
    lengths = np.full(2**21, 16, np.int32)
    lengths[-1] += 7
    documents = np.arange(len(lengths), dtype=np.int32)
    samples = num_samples(2**25 + 7, 1, 2, 1, keep_tail=True)
    found = sample_index(lengths, documents, 2, samples, extra=1, keep_tail=True)
    np.testing.assert_array_equal(
        found, theirs(lengths, documents, 2, 1, 2**25 + 7, True, 1, np.int32), strict=True
    )
    np.testing.assert_array_equal(found[-1], found[-2])


def test_wrong_lengths_are_refused() -> None:
    lengths = np.array([5, 6], np.int32)
    documents = np.array([0, 1, 1], np.int32)
    with pytest.raises(PlanError, match="enough for 4 samples only, but 5 were planned"):
        sample_index(lengths, documents, 4, 5, extra=1)
    with pytest.raises(
        PlanError,
        match="the document index refers to documents 0 to 2, but lengths are given for only 2",
    ):
        sample_index(lengths, documents + np.array([0, 0, 1], np.int32), 4, 4, extra=1)
