"""Compute the numbers of epochs and samples of a Megatron dataset, and the dtypes of its arrays,
with Megatron's own arithmetic and rounding.

In all functions, a sample has `length` + `extra` tokens, where `extra` is Megatron's setting
add_extra_token_to_sequence (0 or 1). Each sample begins `length` tokens after the previous one.
"""

from __future__ import annotations

import numpy as np

from megablend.errors import PlanError

_THRESHOLD = 0.80
"""A final epoch is shuffled separately if less than this fraction of its samples is used."""


def num_epochs(tokens: int, samples: int | None, length: int, extra: int) -> int:
    """Return the number of epochs that are needed for `samples` samples; 1 if `samples` is None.

    Args:
        tokens: number of tokens in one epoch.

    Raises: PlanError if samples are requested and an epoch has no tokens.

    Source: GPTDataset._get_num_epochs.
    """
    needed = 0 if samples is None else samples * length + extra
    if needed <= tokens:
        return 1
    if tokens < 1:
        raise PlanError(
            f"a split contains {tokens} tokens; expected at least one: give it a larger share of the data, or a share of 0"
        )
    return -(-needed // tokens)


def num_samples(tokens: int, epochs: int, length: int, extra: int, keep_tail: bool) -> int:
    """Return the number of samples in `epochs` epochs of `tokens` tokens each. As in Megatron, the
    result is negative if there are no tokens and `length` and `extra` are 1.

    With `keep_tail`, a partial last sample is counted. The number is then computed in single
    precision, as in Megatron, so it may be too low or too high above 2^24 samples.

    Source: helpers.build_sample_idx.
    """
    total = epochs * tokens - extra
    if keep_tail:
        return int(np.ceil(np.float32(total) / np.float32(length)))
    # Rounded towards zero, as in C++
    return total // length if total >= 0 else -(-total // length)


def samples_before_final_epoch(
    tokens: int, epochs: int, samples: int | None, length: int, extra: int
) -> int | None:
    """Return the number of samples of all epochs but the last, if the last epoch is shuffled
    separately; otherwise None.

    Source: GPTDataset._build_document_sample_shuffle_indices.
    """
    if samples is None or epochs == 1:
        return None
    before = ((epochs - 1) * tokens - extra) // length
    per_epoch = (tokens - extra) // length
    is_separate = samples - before < int(_THRESHOLD * per_epoch)
    return before if is_separate else None


def sample_dtype(num_documents: int) -> str:
    """Return the name of the dtype of the sample index for a document index of `num_documents`
    entries. (Document lengths, which are int32, always fit.)

    Source: helpers.build_sample_idx.
    """
    return "int32" if num_documents < 1 << 31 else "int64"


def shuffle_dtype(samples: int) -> str:
    """Return the name of the dtype of a shuffle index of `samples` samples.

    Source: gpt_dataset._build_shuffle_index.
    """
    return "int64" if samples >= (1 << 32) - 2 else "uint32"
