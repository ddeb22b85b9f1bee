from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablend.errors import PlanError
from megablend.megatron.exact.epochs import (
    num_epochs,
    num_samples,
    sample_dtype,
    samples_before_final_epoch,
    shuffle_dtype,
)
from tests.examples import examples
from tests.megatron_core import megatron


@pytest.mark.long
@examples(200)
@given(st.integers(1, 300), st.none() | st.integers(0, 400), st.integers(1, 40), st.integers(0, 1))
def test_epochs_as_megatron(tokens: int, samples: int | None, length: int, extra: int) -> None:
    config = SimpleNamespace(sequence_length=length, add_extra_token_to_sequence=bool(extra))
    dataset: Any = SimpleNamespace(num_samples=samples, config=config)
    expected = megatron("gpt_dataset").GPTDataset._get_num_epochs(dataset, tokens)
    assert num_epochs(tokens, samples, length, extra) == expected


def test_no_tokens_no_epochs() -> None:
    with pytest.raises(PlanError, match="a split contains 0 tokens; expected at least one"):
        num_epochs(0, 10, 4, 1)
    with pytest.raises(PlanError, match="a split contains 0 tokens; expected at least one"):
        num_epochs(0, 0, 4, 1)
    assert num_epochs(0, None, 4, 1) == num_epochs(0, 0, 4, 0) == 1


@pytest.mark.long
@pytest.mark.parametrize("keep_tail", [False, True])
@pytest.mark.parametrize(("length", "extra"), [(1, 0), (2, 0), (2, 1), (3, 1)])
def test_no_tokens_no_samples_as_megatron(length: int, extra: int, keep_tail: bool) -> None:
    lengths = np.zeros(3, np.int32)
    documents = np.arange(2, dtype=np.int32)
    expected = megatron("helpers").build_sample_idx(
        lengths, documents, length, 1, 0, not keep_tail, bool(extra)
    )
    assert num_samples(0, 1, length, extra, keep_tail) == len(expected) - 1


@pytest.mark.parametrize(
    ("tokens", "length", "extra", "expected"),
    [
        (2**25 + 7, 2, 1, 16_777_220),  # 16,777,219 in truth
        (2**31 + 1, 4096, 0, 524_288),  # 524,289 in truth
        (101, 10, 1, 10),
        (102, 10, 1, 11),
        (1, 10, 1, 0),
    ],
)
def test_kept_tails_are_counted_in_single_precision(
    tokens: int, length: int, extra: int, expected: int
) -> None:
    assert num_samples(tokens, 1, length, extra, keep_tail=True) == expected


def test_the_final_epoch_is_separate_below_four_fifths() -> None:
    for samples in range(201, 300):  # of 3 epochs of 100 samples
        before = samples_before_final_epoch(1001, 3, samples, 10, 1)
        assert before == (200 if samples - 200 < 80 else None)
    assert samples_before_final_epoch(1001, 1, 20, 10, 1) is None
    assert samples_before_final_epoch(1001, 3, None, 10, 1) is None


def test_types() -> None:
    assert sample_dtype(2**31 - 1) == "int32"
    assert sample_dtype(2**31) == "int64"
    assert shuffle_dtype(2**32 - 3) == "uint32"
    assert shuffle_dtype(2**32 - 2) == "int64"
