"""How many epochs and samples a dataset of Megatron's has, and its arrays' types: its arithmetic, its roundings included.

Throughout, a sample is `length` + `extra` tokens, extra being add_extra_token_to_sequence (0 or 1), and begins `length` tokens
after the one before.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megablend.errors import PlanError

_INT32, _UINT32, _INT64 = np.dtype(np.int32), np.dtype(np.uint32), np.dtype(np.int64)
_THRESHOLD = 0.80  # of an epoch's samples: a final epoch that gives fewer is shuffled by itself


def num_epochs(tokens: int, samples: int | None, length: int, extra: int) -> int:
    """Epochs of `tokens` tokens that hold `samples` samples; one if None are requested.

    Raises: PlanError where tokens are needed and an epoch has none: no number of epochs is enough.

    Source: GPTDataset._get_num_epochs.
    """
    needed = 0 if samples is None else samples * length + extra
    if needed <= tokens:
        return 1
    if tokens < 1:
        raise PlanError(
            f"a split contains {tokens} tokens; expected at least one: give it a larger part of the data, or none"
        )
    return -(-needed // tokens)


def num_samples(tokens: int, epochs: int, length: int, extra: int, keep_tail: bool) -> int:
    """Samples in `epochs` epochs of `tokens` tokens; below 0 where there are no tokens and `length` and `extra` are 1.

    A kept last, partial sample is counted in single precision, as Megatron does: above 2^24 samples this loses some or adds some.

    Source: helpers.build_sample_idx.
    """
    total = epochs * tokens - extra
    if keep_tail:
        return int(np.ceil(np.float32(total) / np.float32(length)))
    return total // length if total >= 0 else -(-total // length)  # towards zero, as C++ divides


def samples_before_final_epoch(tokens: int, epochs: int, samples: int | None, length: int, extra: int) -> int | None:
    """Samples of all epochs but the last where the last is shuffled by itself; None where it is not.

    Source: GPTDataset._build_document_sample_shuffle_indices.
    """
    if samples is None or epochs == 1:
        return None
    before = ((epochs - 1) * tokens - extra) // length
    in_an_epoch = (tokens - extra) // length
    return before if samples - before < int(_THRESHOLD * in_an_epoch) else None


def sample_dtype(num_documents: int) -> np.dtype[Any]:
    """Type of the sample index over a document index of so many entries; their lengths, int32, always fit.

    Source: helpers.build_sample_idx.
    """
    return _INT32 if num_documents < 1 << 31 else _INT64


def shuffle_dtype(samples: int) -> np.dtype[Any]:
    """Type of the shuffle index of so many samples.

    Source: gpt_dataset._build_shuffle_index.
    """
    return _INT64 if samples >= (1 << 32) - 2 else _UINT32
