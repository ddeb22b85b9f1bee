"""Descriptions: the JSON by which Megatron names a dataset's files. Its bytes are hashed, so every one of them counts.

Source: MegatronDataset.__init__, BlendedDataset.__init__.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from megablend.megatron.layout import DatasetPart, matrix_of
from megablend.megatron.request import GREEDY, LARGEST_REMAINDER, SPLITS, CacheRequest

BLEND_CLASSES = {GREEDY: "BlendedDataset", LARGEST_REMAINDER: "MegablendLargestRemainderDataset"}


def dataset_identifiers(request: CacheRequest, part: DatasetPart) -> dict[str, Any]:
    """What tells a dataset from others, in Megatron's order."""
    return {
        "class": request.dataset_class,
        "dataset_path": part.prefix,
        "num_samples": part.num_samples,
        "index_split": SPLITS[part.split],
        "random_seed": request.random_seed,
        "sequence_length": request.sequence_length,
        "split": request.split,
        "split_matrix": matrix_of(request),
        "tokenizer": request.tokenizer,
    }


def blend_identifiers(
    request: CacheRequest,
    split: int,
    datasets: Sequence[Mapping[str, Any]],
    weights: Sequence[float] | Sequence[int],
    size: int | None,
) -> dict[str, Any]:
    """What tells a blend from others: the identifiers of its datasets, its weights and its size."""
    return {
        "class": BLEND_CLASSES[request.interleaving],
        "datasets": list(datasets),
        "split": SPLITS[split],
        "weights": list(weights),
        "size": size,
    }


def description(identifiers: Mapping[str, Any]) -> str:
    """The text of description.txt; ASCII."""
    return json.dumps(identifiers, indent=4)


def base_name(identifiers: Mapping[str, Any], split: int) -> str:
    """How the names of an artefact's files begin: <md5 of the description>-<class>-<split>."""
    digest = hashlib.md5(description(identifiers).encode("utf-8"), usedforsecurity=False).hexdigest()
    return f"{digest}-{identifiers['class']}-{SPLITS[split]}"
