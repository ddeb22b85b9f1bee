"""The three indices of a small dataset, computed by one kernel call."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megablend.exact.samples import FAR, SHORT, end_row
from megablend.exact.shuffle import Generator
from megablend.kernels.exact.small_dataset import fill_dataset

MAX_DOCUMENTS = FAR // 4
"""The most documents per epoch: their lengths fit in a core's own caches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """How a dataset is shuffled and split into samples."""

    length: int
    """Tokens from one sample's start to the next one's."""
    extra: int
    """add_extra_token_to_sequence, 0 or 1."""
    keep_tail: bool
    """Whether samples may end after the documents."""
    samples_before_final: int | None
    """Samples of all epochs but the last, if the last one is shuffled separately; otherwise None."""


def fill_small_dataset(
    lengths: npt.NDArray[np.int32],
    begin: int,
    seed: int,
    plan: EpochPlan,
    documents: npt.NDArray[np.int32],
    rows: npt.NDArray[np.int32],
    samples: npt.NDArray[np.uint32],
) -> None:
    """Compute what document_index, sample_index and shuffle_index return when called one after another.

    Args:
        lengths: int32 [n], tokens of documents `begin` to `begin` + n; n is 1 to MAX_DOCUMENTS.
        seed: seed of the generator.
        documents: int32 [epochs * n], filled.
        rows: int32 [len(samples) + 1, 2], filled.
        samples: uint32 [num_samples], filled; at least plan.samples_before_final.

    Raises: PlanError as sample_index does.
    """
    generator, last_epoch = Generator(seed), 0 if plan.samples_before_final is None else len(lengths)
    filled = fill_dataset(
        lengths,
        begin,
        len(documents) - last_epoch,
        generator.key,
        generator.position,
        plan.length,
        plan.extra,
        len(documents) >= SHORT * len(samples),
        len(samples) if plan.samples_before_final is None else plan.samples_before_final,
        documents,
        rows,
        samples,
    )
    if filled < len(rows):
        last = int(lengths[documents[-1] - begin])
        rows[filled:] = end_row(last, len(documents), filled, len(samples), extra=plan.extra, keep_tail=plan.keep_tail)
