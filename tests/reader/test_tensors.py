"""The dict of a sample equals what the installed megatron-core makes of the same tokens."""

from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids

from megablend.config import load_config
from megablend.prefetch.samples import Samples
from megablend.reader.tensors import batch_dict
from megablend.reader.transform import sample_of
from megablend.run.run import Section
from tests.examples import examples

LENGTH = 12


@cache
def section(**flags: Any) -> Section:
    """A run of one sample, with the settings that a config with these flags gives it."""
    source = {"name": "a", "path": "/a.arrow"}
    settings = {"cache": "/c", "sequence_length": LENGTH, "samples": 1, "eod_token": 0}
    config = load_config({**settings, "sources": [source], **flags})
    return Section(0, 1, LENGTH, config.add_extra_token_to_sequence, config.masks)


def sample(tokens: list[int], starts: list[int] | None = None) -> Samples:
    begins = np.isin(np.arange(len(tokens)), starts or [0])
    labels = tokens[1:] + [0] * (LENGTH + 1 - len(tokens))
    text = np.array([tokens[:LENGTH], labels], np.int64)
    return Samples(np.array([3], np.int32), text[:1], text[1:], begins[np.newaxis], {})


@examples(200)
@given(
    st.lists(st.integers(0, 3), min_size=LENGTH + 1, max_size=LENGTH + 1),
    st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_masks_and_positions_are_megatrons(tokens: list[int], flags: list[bool]) -> None:
    reset_position_ids, reset_attention_mask, eod_mask_loss, create_attention_mask = flags
    settings = section(
        reset_position_ids=reset_position_ids,
        reset_attention_mask=reset_attention_mask,
        eod_mask_loss=eod_mask_loss,
        create_attention_mask=create_attention_mask,
    )
    found = sample_of(batch_dict(settings, sample(tokens)), 0)
    text = torch.tensor(tokens)
    mask, loss, positions = _get_ltor_masks_and_position_ids(text[:-1], 0, *flags)
    assert torch.equal(found["tokens"], text[:-1])
    assert torch.equal(found["labels"], text[1:])
    assert torch.equal(found["loss_mask"], loss)
    assert torch.equal(found["position_ids"], positions)
    assert found["dataset_id"] == 3
    assert ("attention_mask" in found) == create_attention_mask
    if create_attention_mask:
        assert torch.equal(found["attention_mask"], mask)
    dtypes = {
        name: tensor.dtype for name, tensor in found.items() if isinstance(tensor, torch.Tensor)
    }
    assert dtypes["tokens"] == dtypes["labels"] == dtypes["position_ids"] == torch.int64
    assert dtypes["loss_mask"] == torch.float32


def test_without_the_extra_token_the_last_label_counts_for_nothing() -> None:
    settings = section(add_extra_token_to_sequence=False)
    found = sample_of(batch_dict(settings, sample(list(range(1, LENGTH + 1)))), 0)
    assert found["labels"].tolist() == [*range(2, LENGTH + 1), 0]
    assert found["loss_mask"].tolist() == [1.0] * (LENGTH - 1) + [0.0]


@pytest.mark.parametrize(
    ("starts", "ends", "longest"),
    [
        ([0], [LENGTH], LENGTH),
        ([0, 5], [5, LENGTH], 7),
        ([0, 1, 2], [1, 2, LENGTH], 10),
        ([0, LENGTH], [LENGTH], LENGTH),  # the extra token alone is of the next document
    ],
)
def test_inter_document_masking(starts: list[int], ends: list[int], longest: int) -> None:
    settings = section(inter_document_masking=True)
    found = sample_of(batch_dict(settings, sample(list(range(LENGTH + 1)), starts)), 0)
    lengths = found["cu_seqlens"]
    assert lengths.dtype == torch.int32
    assert lengths.tolist() == [0, *ends, *[LENGTH] * (LENGTH - len(ends))]
    assert (found["max_seqlen"].dtype, int(found["max_seqlen"])) == (torch.int32, longest)
    borders = [0, *ends]
    expected = [i for low, high in pairwise(borders) for i in range(high - low)]
    assert found["position_ids"].tolist() == expected
    assert "attention_mask" not in found
