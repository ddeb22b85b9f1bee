"""Descriptions: the JSON by which Megatron names a dataset's files. Its bytes are hashed, so every
one of them counts.

Source: MegatronDataset.__init__, BlendedDataset.__init__.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from megablend.megatron.request.layout import DatasetPart, matrix_of
from megablend.megatron.request.request import GREEDY, LARGEST_REMAINDER, SPLITS, CacheRequest

BLEND_CLASSES = {GREEDY: "BlendedDataset", LARGEST_REMAINDER: "MegablendLargestRemainderDataset"}


def shared_members(request: CacheRequest, split: int) -> str:
    """The end of the descriptions of all datasets of a split."""
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
    """The description.txt of a dataset; ASCII.

    Args:
        shared: shared_members of its split: most of the text, written once for thousands of
            datasets.
    """
    # by hand, for json.dumps takes ten times as long where it indents
    asked = "null" if part.num_samples is None else part.num_samples
    return _object(
        [
            f'    "class": {json.dumps(request.dataset_class)}',
            f'    "dataset_path": {json.dumps(part.prefix)}',
            f'    "num_samples": {asked}',
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
    """The description.txt of a blend: the descriptions of its datasets,
    its weights and its size; ASCII."""
    # No text in JSON holds a line break as such
    inner = ",\n".join(datasets).replace("\n", "\n" + 8 * " ")
    listed = f'    "datasets": [\n{8 * " "}{inner}\n    ]'
    rest = {"split": SPLITS[split], "weights": list(weights), "size": size}
    return _object(
        [_members({"class": BLEND_CLASSES[request.interleaving]}), listed, _members(rest)]
    )


def base_name(text: str, class_name: str, split: int) -> str:
    """How the names of an artefact's files begin: <md5 of the description>-<class>-<split>."""
    digest = hashlib.md5(text.encode("utf-8"), usedforsecurity=False).hexdigest()
    return f"{digest}-{class_name}-{SPLITS[split]}"


def _members(values: Mapping[str, Any]) -> str:
    """The lines of a JSON object between its braces."""
    return json.dumps(values, indent=4)[2:-2]


def _object(members: Sequence[str]) -> str:
    return "{\n" + ",\n".join(members) + "\n}"
