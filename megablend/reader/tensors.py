"""Make dicts of tensors like those that GPTDataset returns: tokens, labels, masks and position ids
of samples.

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
from megablend.run.run import Section


def batch_dict(settings: Section, samples: Samples) -> dict[str, Any]:
    """Return a batch of samples as a dict, like the collated samples of GPTDataset. The tensors do
    not share memory, so users may modify them.

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
    num_samples, length = tokens.shape
    arrays: dict[str, npt.NDArray[Any]] = {
        "tokens": tokens,
        "labels": samples.labels,
        "loss_mask": _make_loss_mask(settings, samples),
    }
    # Where documents begin, for values that are reset there
    after_eod = None
    if masks.needs_eod and masks.eod is not None:
        after_eod = _find_after(tokens, masks.eod)
    position_resets = after_eod if masks.reset_position_ids else None
    if masks.inter_document_masking:
        assert samples.begins is not None
        position_resets = np.ascontiguousarray(samples.begins[:, :length])
        arrays["cu_seqlens"] = np.empty((num_samples, length + 1), np.int32)
        arrays["max_seqlen"] = np.empty(num_samples, np.int32)
        document_ends(position_resets, arrays["cu_seqlens"], arrays["max_seqlen"])
    positions = np.empty((num_samples, length), np.int64)
    if position_resets is None:
        positions[:] = _positions(length)
    else:
        count_positions(position_resets, positions)
    arrays["position_ids"] = positions
    if masks.create_attention_mask:
        attention_resets = after_eod if masks.reset_attention_mask else None
        if attention_resets is None:
            attention_resets = np.zeros((num_samples, length), np.bool_)
        arrays["attention_mask"] = np.empty((num_samples, 1, length, length), np.bool_)
        fill_causal_mask(attention_resets, arrays["attention_mask"])
    arrays["dataset_id"] = samples.sources.astype(np.int64)
    batch: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if samples.extra:
        batch["extra"] = {
            name: torch.from_numpy(_signed(array)) for name, array in samples.extra.items()
        }
    return batch


def _make_loss_mask(settings: Section, samples: Samples) -> npt.NDArray[np.float32]:
    """Return the loss mask of samples: float32 [n, sequence_length]."""
    loss_mask = np.empty(samples.tokens.shape, np.float32)
    loss_mask[:] = _ones(samples.tokens.shape[1])  # copying rows takes half the time of a fill
    if settings.masks.eod_mask_loss:
        loss_mask[samples.tokens == settings.masks.eod] = 0.0
    if not settings.add_extra_token_to_sequence:  # the last token has no label
        loss_mask[:, -1] = 0.0
    if samples.masked is not None:
        loss_mask[samples.masked] = 0.0
    return loss_mask


def _signed(numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert arrays of uint16 and uint32, which torch does not fully support, to the next wider
    signed dtype. Other arrays are returned unchanged."""
    wider = {"uint16": np.int32, "uint32": np.int64}.get(numbers.dtype.name)
    return numbers if wider is None else numbers.astype(wider)


@cache
def _ones(length: int) -> npt.NDArray[np.float32]:
    """Return the loss mask of a sample without masked tokens. Results are cached, since a run has
    only a few sequence lengths."""
    return np.ones(length, np.float32)


@cache
def _positions(length: int) -> npt.NDArray[np.int64]:
    """Return the positions 0, 1, 2, ... of a sample without resets."""
    return np.arange(length)


def _find_after(tokens: npt.NDArray[np.int64], eod: int) -> npt.NDArray[np.bool_]:
    """Return a boolean array of the shape of `tokens` [n, length] that is True where the previous
    token is `eod`."""
    after = np.zeros(tokens.shape, np.bool_)
    after[:, 1:] = tokens[:, :-1] == eod
    return after
