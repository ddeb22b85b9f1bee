"""Dividing one dataset into train, valid and test: Megatron's split string, its matrix, and ranges of sequences."""

from __future__ import annotations

import itertools
import re

import numpy as np

from megablend.errors import ConfigError
from megablend.megatron.request.request import SPLITS

Matrix = list[tuple[float, float] | None]
"""For each split the part of the sequences it takes, from and to; None where it takes none."""


def split_matrix(split: str) -> Matrix:
    """The matrix that Megatron makes of a split string such as "969,30,1"; goes into descriptions, down to the type of its zeros.

    Raises: ConfigError where it has more than three parts, no part above 0, or a part that Megatron would misread.
    Source: parse_and_normalize_split, convert_split_vector_to_split_matrix.
    """
    if re.search(r"[0-9.]\s*[eE+-]|[eE+-]\s*[0-9.]", split):
        raise ConfigError(
            f"split {split!r}: Megatron reads digits and points only; write the proportions without signs or exponents"
        )
    try:
        parts = [float(part) for part in re.findall(r"[.0-9]+", split)]
    except ValueError as error:
        raise ConfigError(f"split {split!r}: {error}; expected up to three numbers such as 969,30,1") from None
    if len(parts) > len(SPLITS) or not sum(parts) > 0:
        raise ConfigError(f"split {split!r}: expected up to three numbers such as 969,30,1, one of them above 0")
    edges: list[float] = [0]
    for part in normalized(parts + [0.0] * (len(SPLITS) - len(parts))):
        edges.append(edges[-1] + part)
    return [None if end <= begin else (begin, end) for begin, end in itertools.pairwise(edges)]


def normalized(weights: list[float] | list[int]) -> list[float]:
    """Weights that sum to 1, in the order of rounding that Megatron uses. Source: megatron.core.datasets.utils.normalize."""
    array = np.array(weights, np.float64)
    result: list[float] = (array / np.sum(array)).tolist()
    return result


def sequence_range(span: tuple[float, float], num_sequences: int) -> tuple[int, int]:
    """First sequence and end of a split's part of a file.

    Source: BlendedMegatronDatasetBuilder._build_megatron_dataset_splits.
    """
    begin, end = (round(edge * float(num_sequences)) for edge in span)
    return begin, end
