"""Tiny pairs of `.bin/.idx`, and what is built of them to compare an installed megatron-core with what the plugin expects."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Case = tuple[dict[str, Any], list[int | None]]
"""Options of a config, and sizes."""
_EOD = 0
_LENGTHS = ([5, 0, 1, 9, 3, 7, 30, 2, 8, 4, 6, 1], [12, 6, 3, 25, 8, 11, 16, 9])


class ProbeTokenizer:
    """What GPTDataset asks of a tokenizer; no two special tokens are the same."""

    vocab_size = 300
    pad, eod, eos = 299, _EOD, 298

    def __init__(self) -> None:
        self.unique_identifiers = OrderedDict([("class", "megablend.ProbeTokenizer"), ("words", ["ö"])])


def write_pairs(folder: Path) -> list[str]:
    """Write the pairs; returns their prefixes."""
    return [_write_pair(folder / f"pair{number}", lengths) for number, lengths in enumerate(_LENGTHS)]


def _write_pair(prefix: Path, lengths: list[int]) -> str:
    sizes = np.array(lengths, "<i4")
    tokens = np.arange(sizes.sum(), dtype="<u2") % 23  # end-of-document tokens among them
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(sizes), len(sizes) + 1)
    pointers, documents = 2 * (np.cumsum(sizes, dtype="<i8") - sizes), np.arange(len(sizes) + 1, dtype="<i8")
    prefix.with_suffix(".bin").write_bytes(tokens.tobytes())
    prefix.with_suffix(".idx").write_bytes(header + sizes.tobytes() + pointers.tobytes() + documents.tobytes())
    return str(prefix)


def several_epochs(prefixes: list[str]) -> Case:
    """A blend by weights, its last epochs shuffled by themselves."""
    return {"blend": (prefixes, [0.3, 0.7]), "split": "6,2,2", "mid_level_dataset_surplus": 0.5}, [60, 9, 0]


def by_length(prefixes: list[str]) -> Case:
    """Blends without weights: of a whole epoch, and of a part."""
    return {"blend": (prefixes, None), "split": "1,1,0"}, [None, 4, 0]


def alone(prefixes: list[str]) -> Case:
    """A prefix by itself in each split; partial sequences are kept."""
    partial = {"drop_last_partial_validation_sequence": False, "add_extra_token_to_sequence": False}
    blends = {"blend_per_split": [(prefixes[:1], None), (prefixes[1:], [1.0]), None]}
    return {**blends, **partial, "create_attention_mask": True}, [40, 15, 0]


def validation_sets(prefixes: list[str]) -> Case:
    """Several validation sets, each used as a whole."""
    several = {"multiple_validation_sets": True, "full_validation": True}
    kept = {"drop_last_partial_validation_sequence": False}
    return {"blend_per_split": [(prefixes, [2.0, 1.0]), (prefixes, None), None], **several, **kept}, [20, None, 0]


CASES: tuple[Callable[[list[str]], Case], ...] = (several_epochs, by_length, alone, validation_sets)
"""Functions that make a case from prefixes."""
