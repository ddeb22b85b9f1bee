"""The dict of GPTDataset: tokens, labels, masks and position ids of samples.

Source: megatron-core, megatron/core/datasets/gpt_dataset.py (GPTDataset.__getitem__,
    _get_ltor_masks_and_position_ids).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megablend.kernels.reader.masks import count_positions, document_ends, fill_causal_mask
from megablend.prefetch.samples import Samples
from megablend.reader.transform import sample_of
from megablend.run.run import Section


def batch_dict(settings: Section, samples: Samples) -> dict[str, Any]:
    """A batch of samples like GPTDataset's, collated. No tensor shares memory with another, so
    users may modify any of them.

    Returns: tokens, labels, position_ids int64 [n, sequence_length]; loss_mask float32 [n,
        sequence_length]; dataset_id int64 [n]; with `create_attention_mask`, attention_mask bool
        [n, 1, sequence_length, sequence_length], True where attention is masked out; with
        `inter_document_masking`, cu_seqlens int32 [n, sequence_length + 1] padded with
        sequence_length, and max_seqlen int32 [n]; with extra columns, extra: a dict of tensors [n,
        tokens per sample] by column, in which value j belongs to token j of the sample, so that [:,
        :-1] belong to tokens and [:, 1:] to labels.
    """
    masks = settings.masks
    tokens = samples.tokens
    shape = samples.tokens.shape
    loss_mask = np.empty(shape, np.float32)
    loss_mask[:] = _ones(shape[1])  # whole rows are copied in half the time of a fill
    if masks.eod_mask_loss:
        loss_mask[tokens == masks.eod] = 0.0
    if not settings.add_extra_token_to_sequence:  # the last token has no label
        loss_mask[:, -1] = 0.0
    if samples.masked is not None:
        loss_mask[samples.masked] = 0.0
    arrays: dict[str, npt.NDArray[Any]] = {
        "tokens": tokens,
        "labels": samples.labels,
        "loss_mask": loss_mask,
    }
    after_eod = _after(tokens, masks.eod) if masks.needs_eod and masks.eod is not None else None
    positions_from = after_eod if masks.reset_position_ids else None
    if masks.inter_document_masking:
        assert samples.begins is not None
        positions_from = np.ascontiguousarray(samples.begins[:, : shape[1]])
        arrays["cu_seqlens"] = np.empty((shape[0], shape[1] + 1), np.int32)
        arrays["max_seqlen"] = np.empty(shape[0], np.int32)
        document_ends(positions_from, arrays["cu_seqlens"], arrays["max_seqlen"])
    arrays["position_ids"] = positions = np.empty(shape, np.int64)
    if positions_from is None:
        positions[:] = _counted(shape[1])
    else:
        count_positions(positions_from, positions)
    if masks.create_attention_mask:
        masked_before = (
            after_eod
            if masks.reset_attention_mask and after_eod is not None
            else np.zeros(shape, np.bool_)
        )
        arrays["attention_mask"] = np.empty((shape[0], 1, shape[1], shape[1]), np.bool_)
        fill_causal_mask(masked_before, arrays["attention_mask"])
    arrays["dataset_id"] = samples.sources.astype(np.int64)
    batch: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if samples.extra:
        batch["extra"] = {
            name: torch.from_numpy(_signed(array)) for name, array in samples.extra.items()
        }
    return batch


def sample_dict(settings: Section, samples: Samples) -> dict[str, Any]:
    """The first of the samples as GPTDataset returns it:
    without the batch dimension, dataset_id an int."""
    return sample_of(batch_dict(settings, samples), 0)


def _signed(numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert uint16 and uint32, which torch hardly supports, to the next wider signed dtype."""
    wider = {"uint16": np.int32, "uint32": np.int64}.get(numbers.dtype.name)
    return numbers if wider is None else numbers.astype(wider)


@cache
def _ones(length: int) -> npt.NDArray[np.float32]:
    """The loss mask of a sample without masked tokens."""
    return np.ones(length, np.float32)


@cache
def _counted(length: int) -> npt.NDArray[np.int64]:
    """The positions 0, 1, 2, ... of a sample; a run has one sequence length."""
    return np.arange(length)


def _after(tokens: npt.NDArray[np.int64], eod: int) -> npt.NDArray[np.bool_]:
    """Where the previous token is `eod`: bool, of the shape of `tokens` [n, length]."""
    after = np.zeros(tokens.shape, np.bool_)
    after[:, 1:] = tokens[:, :-1] == eod
    return after
