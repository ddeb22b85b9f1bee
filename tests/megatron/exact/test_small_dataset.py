"""Small datasets' arrays, made by one call, against those that Megatron makes one after the other."""

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablend.errors import PlanError
from megablend.megatron.exact.epochs import num_epochs, num_samples, samples_before_final_epoch
from megablend.megatron.exact.small_dataset import SmallDataset, fill_small_datasets
from tests.examples import examples
from tests.megatron_core import megatron


class Rules(NamedTuple):
    """How datasets are shuffled and split into samples."""

    seed: int
    length: int
    extra: int


class Arrays(NamedTuple):
    """Where a dataset's arrays are in memory."""

    dataset: SmallDataset
    epochs: int

    def taken(self, memory: Any) -> tuple[Any, ...]:
        """Document, sample and shuffle index."""
        found = self.dataset
        samples = self.dataset.num_samples
        return (
            memory[found.documents : found.documents + found.num_entries],
            memory[found.rows : found.rows + 2 * (samples + 1)].reshape(-1, 2),
            memory[found.samples : found.samples + samples].view(np.uint32),
        )


def place(
    lengths: Any, begin: int, asked: int | None, rules: Rules, start: int, *, keep_tail: bool
) -> Arrays:
    """A dataset whose arrays are in memory from `start` on, a gap between each two."""
    tokens = int(lengths.sum())
    epochs = num_epochs(tokens, asked, rules.length, rules.extra)
    samples = num_samples(tokens, epochs, rules.length, rules.extra, keep_tail)
    before = samples_before_final_epoch(tokens, epochs, asked, rules.length, rules.extra)
    rows = start + epochs * len(lengths) + 1
    last = rows + 2 * (samples + 1) + 1
    dataset = SmallDataset(
        lengths, begin, epochs * len(lengths), samples, before, keep_tail, start, rows, last
    )
    return Arrays(dataset, epochs)


@pytest.mark.long
@examples(200)
@given(st.data())
def test_as_megatron(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 90))
    extra = data.draw(st.integers(0, 1))
    rules = Rules(data.draw(st.integers(0, 99)), length, extra)
    end = 0
    all_arrays = list[Arrays]()
    for _ in range(data.draw(st.integers(1, 4))):
        lengths = np.array(
            data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=40)), np.int32
        )
        if lengths.sum():
            begin = data.draw(st.sampled_from([0, 0, 7]))
            keep_tail = data.draw(st.booleans())
            asked = data.draw(st.none() | st.integers(0, 60))
            all_arrays.append(place(lengths, begin, asked, rules, end, keep_tail=keep_tail))
            end = all_arrays[-1].dataset.samples + all_arrays[-1].dataset.num_samples + 1
    if not all_arrays:
        return
    memory = np.full(end, -7, np.int32)
    datasets = [each.dataset for each in all_arrays]
    expected = [as_megatron(each, rules) for each in all_arrays]
    if any(rows[-1, 1] < 0 for _, rows, _ in expected):
        with pytest.raises(PlanError, match="the last of the shuffled documents is empty"):
            fill_small_datasets(datasets, memory, **rules._asdict())
        return
    fill_small_datasets(datasets, memory, **rules._asdict())
    for each, arrays in zip(all_arrays, expected, strict=True):
        for found, array in zip(each.taken(memory), arrays, strict=True):
            np.testing.assert_array_equal(found, array, strict=True)
        assert (memory[[each.dataset.rows - 1, each.dataset.samples - 1]] == -7).all()


def as_megatron(arrays: Arrays, rules: Rules) -> tuple[Any, ...]:
    """Document, sample and shuffle index, by the functions that GPTDataset calls."""
    dataset = arrays.dataset
    module = megatron("gpt_dataset")
    state = np.random.RandomState(rules.seed)
    separate = dataset.samples_before_final is not None
    numbers = np.arange(dataset.begin, dataset.begin + len(dataset.lengths), dtype=np.int32)
    documents = module._build_document_index(numbers, arrays.epochs, state, separate)
    whole = np.concatenate([np.full(dataset.begin, 99, np.int32), dataset.lengths])
    tokens = int(dataset.lengths.sum())
    rows = megatron("helpers_cpp").build_sample_idx_int32(
        whole, documents, rules.length, arrays.epochs, tokens, not dataset.keep_tail, rules.extra
    )
    first = (
        dataset.num_samples
        if dataset.samples_before_final is None
        else dataset.samples_before_final
    )
    return documents, rows, module._build_shuffle_index(first, dataset.num_samples, state)


def test_documents_that_do_not_reach_all_samples_are_an_error() -> None:
    dataset = SmallDataset(
        np.array([3, 4], np.int32), 0, 2, 3, None, keep_tail=False, documents=0, rows=2, samples=10
    )
    with pytest.raises(PlanError, match=r"enough for 1 samples, but 3 were planned"):
        fill_small_datasets([dataset], np.empty(13, np.int32), seed=1, length=4, extra=1)
