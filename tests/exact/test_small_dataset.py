"""A small dataset's arrays, made by one call, beside those that Megatron makes one after the other."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablend.errors import PlanError
from megablend.exact.epochs import num_epochs, num_samples, samples_before_final_epoch
from megablend.exact.small_dataset import EpochPlan, fill_small_dataset
from tests.examples import examples
from tests.megatron_core import megatron


@pytest.mark.long
@examples(200)
@given(st.data())
def test_as_megatron(data: st.DataObject) -> None:
    lengths = np.array(data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=40)), np.int32)
    if not (tokens := int(lengths.sum())):
        return
    begin, seed = data.draw(st.sampled_from([0, 0, 7])), data.draw(st.integers(0, 99))
    length, extra, keep_tail = data.draw(st.integers(1, 90)), data.draw(st.integers(0, 1)), data.draw(st.booleans())
    asked = data.draw(st.none() | st.integers(0, 60))
    epochs = num_epochs(tokens, asked, length, extra)
    samples = num_samples(tokens, epochs, length, extra, keep_tail)
    before = samples_before_final_epoch(tokens, epochs, asked, length, extra)
    plan = EpochPlan(length=length, extra=extra, keep_tail=keep_tail, samples_before_final=before)
    documents = np.empty(epochs * len(lengths), np.int32)
    rows, shuffled = np.empty((samples + 1, 2), np.int32), np.empty(samples, np.uint32)

    expected = as_megatron(lengths, begin, seed, plan, epochs, samples)
    if expected[1][-1, 1] < 0:
        with pytest.raises(PlanError, match="the last of the shuffled documents is empty"):
            fill_small_dataset(lengths, begin, seed, plan, documents, rows, shuffled)
        return
    fill_small_dataset(lengths, begin, seed, plan, documents, rows, shuffled)
    for found, array in zip((documents, rows, shuffled), expected, strict=True):
        np.testing.assert_array_equal(found, array, strict=True)


def as_megatron(lengths: Any, begin: int, seed: int, plan: EpochPlan, epochs: int, samples: int) -> tuple[Any, ...]:
    """Document, sample and shuffle index, by the functions that GPTDataset calls."""
    module, state = megatron("gpt_dataset"), np.random.RandomState(seed)
    separate = plan.samples_before_final is not None
    numbers = np.arange(begin, begin + len(lengths), dtype=np.int32)
    documents = module._build_document_index(numbers, epochs, state, separate)
    whole = np.concatenate([np.full(begin, 99, np.int32), lengths])
    rows = megatron("helpers_cpp").build_sample_idx_int32(
        whole, documents, plan.length, epochs, int(lengths.sum()), not plan.keep_tail, plan.extra
    )
    first = samples if plan.samples_before_final is None else plan.samples_before_final
    return documents, rows, module._build_shuffle_index(first, samples, state)


def test_documents_that_do_not_reach_all_samples_are_an_error() -> None:
    plan = EpochPlan(length=4, extra=1, keep_tail=False, samples_before_final=None)
    documents, rows, samples = np.empty(2, np.int32), np.empty((4, 2), np.int32), np.empty(3, np.uint32)
    with pytest.raises(PlanError, match=r"contain 1 samples; expected 3"):
        fill_small_dataset(np.array([3, 4], np.int32), 0, 1, plan, documents, rows, samples)
