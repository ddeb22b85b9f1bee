"""The dict of GPTDataset: tokens, labels, masks and position ids of one sample.

Source: megatron-core, megatron/core/datasets/gpt_dataset.py (GPTDataset.__getitem__, _get_ltor_masks_and_position_ids).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megablend.config import Config
from megablend.reader.samples import Sample


def sample_dict(config: Config, sample: Sample) -> dict[str, Any]:
    """A sample as GPTDataset gives it.

    Returns: tokens, labels, position_ids int64 [sequence_length]; loss_mask float32 [sequence_length]; dataset_id int; with
        `create_attention_mask`, attention_mask bool [1, sequence_length, sequence_length], True where attention is barred; with
        `inter_document_masking`, cu_seqlens int32 [sequence_length + 1] padded with sequence_length, and max_seqlen int32 [].
    """
    length = config.sequence_length
    text = torch.from_numpy(sample.tokens)
    tokens = text[:length]
    loss_mask = torch.ones(length, dtype=torch.float32)
    if config.eod_mask_loss:
        loss_mask[tokens == config.eod] = 0.0
    if config.add_extra_token_to_sequence:
        labels = text[1:].clone()  # not a view: users write into either
    else:  # the last token has no label: it counts for nothing
        labels = torch.cat([text[1:], torch.zeros(1, dtype=torch.int64)])
        loss_mask[-1] = 0.0
    found: dict[str, Any] = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask}
    after_eod = np.flatnonzero(sample.tokens[:length] == config.eod) + 1 if config.needs_eod else np.zeros(0, np.int64)
    if config.inter_document_masking:
        starts = sample.starts[sample.starts < length]
        found["position_ids"] = torch.from_numpy(_positions(length, starts))
        ends = np.full(length + 1, length, np.int32)
        ends[: len(starts)] = starts
        found["cu_seqlens"] = torch.from_numpy(ends)
        found["max_seqlen"] = torch.tensor(np.diff(starts, append=length).max(), dtype=torch.int32)
    else:
        found["position_ids"] = torch.from_numpy(_positions(length, after_eod if config.reset_position_ids else ()))
    if config.create_attention_mask:
        mask = torch.triu(torch.ones((1, length, length), dtype=torch.bool), diagonal=1)
        for start in after_eod if config.reset_attention_mask else ():
            mask[0, start:, :start] = True
        found["attention_mask"] = mask
    found["dataset_id"] = sample.source
    return found


def _positions(length: int, starts: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """0, 1, 2, ... beginning anew at each start."""
    begins = np.zeros(length, np.int64)
    inside = np.asarray(starts, dtype=np.int64)
    inside = inside[inside < length]
    begins[inside] = inside
    return np.arange(length, dtype=np.int64) - np.maximum.accumulate(begins)
