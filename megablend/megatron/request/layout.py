"""Determine which datasets each split consists of, and how many samples of each dataset Megatron's
builder requests. This reads no file.

    one prefix, no weights      one dataset, with as many samples as the split
                                (a per-split blend of one prefix: also with weights)
    prefixes with weights       ceil(size * w) of each, built with the surplus on top; the blend is
                                their sum
    prefixes without weights    one epoch of each; the blend takes the split's size, or all
    multiple validation sets    each prefix of valid by itself, no blend

Source: BlendedMegatronDatasetBuilder._build_blended_dataset_splits,
    _get_size_per_split_per_dataset.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megablend.errors import ConfigError
from megablend.megatron.request.request import SPLITS, Blend, CacheRequest

Matrix = list[tuple[float, float] | None]
"""For each split, the fraction of the sequences that belongs to it, as (begin, end); None if the
split is empty."""
_WHOLE = (0.0, 1.0)


def split_matrix(split: str) -> Matrix:
    """Return the matrix that Megatron computes from a split string such as "969,30,1". The matrix
    is printed in descriptions, so even the types of its numbers matter: the first zero is an int.

    Raises: ConfigError if the string has more than three parts, no part above 0, or a part that
        Megatron would misread.
    Source: parse_and_normalize_split, convert_split_vector_to_split_matrix.
    """
    if re.search(r"[0-9.]\s*[eE+-]|[eE+-]\s*[0-9.]", split):
        raise ConfigError(
            f"split {split!r}: Megatron reads digits and decimal points only; write the proportions without signs or exponents"
        )
    try:
        parts = [float(part) for part in re.findall(r"[.0-9]+", split)]
    except ValueError as error:
        raise ConfigError(
            f"split {split!r}: {error}; expected up to three numbers such as 969,30,1"
        ) from None
    if len(parts) > len(SPLITS) or not sum(parts) > 0:
        raise ConfigError(
            f"split {split!r}: expected up to three numbers, at least one of them above 0, such as 969,30,1"
        )
    edges: list[float] = [0]
    for part in normalized(parts + [0.0] * (len(SPLITS) - len(parts))):
        edges.append(edges[-1] + part)
    return [None if end <= begin else (begin, end) for begin, end in itertools.pairwise(edges)]


def normalized(weights: list[float] | list[int]) -> list[float]:
    """Return the weights divided by their sum, rounded as Megatron's are. Source:
    megatron.core.datasets.utils.normalize."""
    array = np.array(weights, np.float64)
    result: list[float] = (array / np.sum(array)).tolist()
    return result


def sequence_range(span: tuple[float, float], num_sequences: int) -> tuple[int, int]:
    """Return the range [begin, end) of a file's sequences that belongs to a split.

    Source: BlendedMegatronDatasetBuilder._build_megatron_dataset_splits.
    """
    begin, end = (round(edge * float(num_sequences)) for edge in span)
    return begin, end


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetPart:
    """A dataset: the part of the documents of one prefix that belongs to one split."""

    prefix: str
    split: int
    span: tuple[float, float]
    """The fraction of the prefix's sequences, as (begin, end), from the split matrix."""
    num_samples: int | None
    """Minimum number of samples to build; None for the samples of one epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLayout:
    """The datasets of one split."""

    split: int
    parts: tuple[DatasetPart, ...]
    blended: bool
    weights: tuple[float, ...] | None = None
    """The normalized weights of the datasets; None if the datasets are weighted by their
    lengths."""
    targets: tuple[int, ...] | None = None
    """The number of samples that the blend needs of each dataset, without the surplus; None if no
    weights are given."""
    size: int | None = None
    """The requested number of samples of the split; None for one epoch."""

    @property
    def name(self) -> str:
        """Name of the split: train, valid or test."""
        return SPLITS[self.split]


def matrix_of(request: CacheRequest) -> Matrix | None:
    """Return the split matrix of a request; None if the request has a blend for each split."""
    return None if request.split is None else split_matrix(request.split)


def layouts(request: CacheRequest) -> list[SplitLayout]:
    """Return the layouts of the splits that have data, in order.

    Raises: ConfigError if the split string is invalid, or a weight that is used is not above 0
        after normalization.
    """
    matrix = matrix_of(request) or [_WHOLE] * len(SPLITS)
    result = []
    for split, span in enumerate(matrix):
        blend = request.blend_of(split)
        if span is not None and blend is not None:
            result.append(_split_layout(request, split, span, blend))
    return result


def _split_layout(
    request: CacheRequest, split: int, span: tuple[float, float], blend: Blend
) -> SplitLayout:
    size = request.sizes[split]
    is_per_split = request.blend_per_split is not None
    is_single = len(blend.prefixes) == 1 and (is_per_split or blend.weights is None)
    are_sets = is_per_split and request.multiple_validation_sets and SPLITS[split] == "valid"
    is_blended = not (is_single or are_sets)
    targets = weights = None
    counts: list[int | None]
    if not is_blended:
        counts = [size] * len(blend.prefixes)
    elif blend.weights is None:
        counts = [None] * len(blend.prefixes)
    else:
        assert size is not None  # refused by CacheRequest
        weights = _shares(blend.prefixes, blend.weights)
        targets = tuple(math.ceil(size * weight) for weight in weights)
        counts = [math.ceil(target * (1 + request.mid_level_dataset_surplus)) for target in targets]
    parts = tuple(
        DatasetPart(prefix=prefix, split=split, span=span, num_samples=num_samples)
        for prefix, num_samples in zip(blend.prefixes, counts, strict=True)
    )
    return SplitLayout(
        split=split,
        parts=parts,
        blended=is_blended,
        weights=weights,
        targets=targets,
        size=size,
    )


def _shares(prefixes: Sequence[str], weights: Sequence[float]) -> tuple[float, ...]:
    """Return the weights divided by their sum. Raises: ConfigError if a result is not above 0,
    since Megatron then fails without a message."""
    with np.errstate(all="ignore"):
        shares = normalized(list(weights))
    if all(share > 0 for share in shares):  # also where all weights are negative
        return tuple(shares)
    for prefix, weight in zip(prefixes, weights, strict=True):
        if not (math.isfinite(weight) and weight > 0):
            raise ConfigError(
                f"{prefix} has weight {weight}; expected a number above 0, or leave the prefix out"
            )
    prefix, weight, share = next(
        entry for entry in zip(prefixes, weights, shares, strict=True) if not entry[2] > 0
    )
    raise ConfigError(
        f"{prefix}: weight {weight} of a total of {sum(weights)} gives a share that rounds to {share}; use "
        "weights of similar magnitude, or leave the prefix out"
    )
