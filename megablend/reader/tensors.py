"""The dict of GPTDataset: tokens, labels, masks and position ids of samples.

Source: megatron-core, megatron/core/datasets/gpt_dataset.py (GPTDataset.__getitem__, _get_ltor_masks_and_position_ids).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megablend.config import Config
from megablend.kernels.reader.masks import count_positions, document_ends, fill_causal_mask
from megablend.prefetch.samples import Samples
from megablend.reader.transform import sample_of


def batch_dict(config: Config, samples: Samples) -> dict[str, Any]:
    """Samples as GPTDataset gives them, collated. Every tensor has memory of its own: users write into any.

    Returns: tokens, labels, position_ids int64 [n, sequence_length]; loss_mask float32 [n, sequence_length]; dataset_id int64
        [n]; with `create_attention_mask`, attention_mask bool [n, 1, sequence_length, sequence_length], True where attention is
        barred; with `inter_document_masking`, cu_seqlens int32 [n, sequence_length + 1] padded with sequence_length, and
        max_seqlen int32 [n]; with extra columns, extra: a dict of tensors [n, tokens that a sample draws] by column, in which
        number j belongs to token j of the sample, so that [:, :-1] are those of tokens and [:, 1:] those of labels.
    """
    tokens, shape = samples.tokens, samples.tokens.shape
    loss_mask = np.ones(shape, np.float32)
    if config.eod_mask_loss:
        loss_mask[tokens == config.eod] = 0.0
    if not config.add_extra_token_to_sequence:  # the last token has no label: it counts for nothing
        loss_mask[:, -1] = 0.0
    found: dict[str, npt.NDArray[Any]] = {"tokens": tokens, "labels": samples.labels, "loss_mask": loss_mask}
    after_eod = _after(tokens, config.eod) if config.needs_eod and config.eod is not None else None
    positions_from = after_eod if config.reset_position_ids else None
    if config.inter_document_masking:
        assert samples.begins is not None
        positions_from = np.ascontiguousarray(samples.begins[:, : shape[1]])
        found["cu_seqlens"] = np.empty((shape[0], shape[1] + 1), np.int32)
        found["max_seqlen"] = np.empty(shape[0], np.int32)
        document_ends(positions_from, found["cu_seqlens"], found["max_seqlen"])
    found["position_ids"] = positions = np.empty(shape, np.int64)
    if positions_from is None:
        positions[:] = _counted(shape[1])
    else:
        count_positions(positions_from, positions)
    if config.create_attention_mask:
        barred_before = (
            after_eod if config.reset_attention_mask and after_eod is not None else np.zeros(shape, np.bool_)
        )
        found["attention_mask"] = np.empty((shape[0], 1, shape[1], shape[1]), np.bool_)
        fill_causal_mask(barred_before, found["attention_mask"])
    found["dataset_id"] = samples.sources.astype(np.int64)
    batch: dict[str, Any] = {name: torch.from_numpy(array) for name, array in found.items()}
    if samples.extra:
        batch["extra"] = {name: torch.from_numpy(_signed(array)) for name, array in samples.extra.items()}
    return batch


def sample_dict(config: Config, samples: Samples) -> dict[str, Any]:
    """The first of the samples, as GPTDataset gives it: without the first dimension, dataset_id an int."""
    return sample_of(batch_dict(config, samples), 0)


def _signed(numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Torch knows little of unsigned numbers of more than 8 bits: they become the next wider signed ones."""
    wider = {"uint16": np.int32, "uint32": np.int64}.get(numbers.dtype.name)
    return numbers if wider is None else numbers.astype(wider)


@cache
def _counted(length: int) -> npt.NDArray[np.int64]:
    """0, 1, 2, ...: the positions of a sample; there is one length a run."""
    return np.arange(length)


def _after(tokens: npt.NDArray[np.int64], eod: int) -> npt.NDArray[np.bool_]:
    """Where the token before is `eod`: bool, like `tokens` [n, length]."""
    after = np.zeros(tokens.shape, np.bool_)
    after[:, 1:] = tokens[:, :-1] == eod
    return after
