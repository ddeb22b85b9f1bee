"""Descriptions: JSON texts that identify datasets. Megatron names the files of a dataset by the
hash of its description, so every byte of the text matters.

Source: MegatronDataset.__init__, BlendedDataset.__init__.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from megablend.megatron.request.layout import DatasetPart, matrix_of
from megablend.megatron.request.request import SPLITS, CacheRequest

BLEND_CLASS = "BlendedDataset"


def shared_members(request: CacheRequest, split: int) -> str:
    """Return the last lines of a description, which are the same for all datasets of a split."""
    return _members(
        {
            "index_split": SPLITS[split],
            "random_seed": request.random_seed,
            "sequence_length": request.sequence_length,
            "split": request.split,
            "split_matrix": matrix_of(request),
            "tokenizer": request.tokenizer,
        }
    )


def dataset_description(request: CacheRequest, part: DatasetPart, shared: str) -> str:
    """Return the text of a dataset's description.txt, in ASCII.

    Args:
        shared: the result of shared_members for the dataset's split. It is most of the text, and is
            formatted once for thousands of datasets.
    """
    # Formatted by hand: json.dumps takes ten times as long if it indents
    num_samples = "null" if part.num_samples is None else part.num_samples
    return _object(
        [
            f'    "class": {json.dumps(request.dataset_class)}',
            f'    "dataset_path": {json.dumps(part.prefix)}',
            f'    "num_samples": {num_samples}',
            shared,
        ]
    )


def blend_description(
    request: CacheRequest,
    split: int,
    datasets: Sequence[str],
    weights: Sequence[float] | Sequence[int],
    size: int | None,
) -> str:
    """Return the text of a blend's description.txt, in ASCII: the descriptions of its datasets, its
    weights and its size."""
    # Every line break separates two members: JSON escapes line breaks in strings
    indented = ",\n".join(datasets).replace("\n", "\n" + 8 * " ")
    return _object(
        [
            _members({"class": BLEND_CLASS}),
            f'    "datasets": [\n{8 * " "}{indented}\n    ]',
            _members({"split": SPLITS[split], "weights": list(weights), "size": size}),
        ]
    )


def base_name(text: str, class_name: str, split: int) -> str:
    """Return the common prefix of the names of an artefact's files: <md5 of the
    description>-<class>-<split>."""
    digest = hashlib.md5(text.encode("utf-8"), usedforsecurity=False).hexdigest()
    return f"{digest}-{class_name}-{SPLITS[split]}"


def _members(values: Mapping[str, Any]) -> str:
    """Return the members of a JSON object as indented lines, without the object's braces."""
    return json.dumps(values, indent=4)[2:-2]


def _object(members: Sequence[str]) -> str:
    return "{\n" + ",\n".join(members) + "\n}"
