"""Megatron's own builder, and cases for it and for ours, drawn from a seed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from tests.pairs import write_pair


class Tokenizer:
    """What GPTDataset asks of a tokenizer."""

    vocab_size = 50_000
    pad = 49_999
    eod = 0
    eos = 0

    def __init__(self) -> None:
        self.unique_identifiers = OrderedDict(
            [("class", "tests.Tokenizer"), ("tokenizer_path", ["/tök", "b"]), ("legacy", "False")]
        )


@contextmanager
def process_group(folder: Path) -> Iterator[None]:
    """One process of torch.distributed: Megatron asks it for a rank before it builds a blend."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def config_of(cache: Path, **options: Any) -> GPTDatasetConfig:
    """Megatron's config with what a test does not care about filled in."""
    filled = {
        "random_seed": 1234,
        "sequence_length": 16,
        "path_to_cache": str(cache),
        "tokenizer": Tokenizer(),
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "create_attention_mask": False,
    }
    return GPTDatasetConfig(**{**filled, **options})


def megatron_build(config: GPTDatasetConfig, sizes: Sequence[int | None]) -> list[Any]:
    """What Megatron's builder makes of a config."""
    built: list[Any] = BlendedMegatronDatasetBuilder(
        GPTDataset, list(sizes), lambda: True, config
    ).build()
    return built


Words = tuple[list[str], list[float] | None]
"""A blend, as Megatron's config takes it."""


@dataclass(frozen=True)
class Case:
    """Options of a config, and sizes."""

    options: dict[str, Any]
    sizes: list[int | None]


def draw_case(folder: Path, seed: int) -> Case:
    """A case that Megatron builds, with its data in `folder`."""
    rng = np.random.default_rng(seed)
    length = int(rng.choice([1, 2, 7, 16, 64]))
    options: dict[str, Any] = {"random_seed": int(rng.integers(0, 5000)), "sequence_length": length}
    if rng.random() < 0.3:
        options["add_extra_token_to_sequence"] = False
    if rng.random() < 0.2:
        options["mid_level_dataset_surplus"] = float(rng.choice([0.1, 0.5]))
    per_split = rng.random() < 0.4
    if not per_split:
        blend = _draw_blend(rng, folder / "all", length)
        options |= {
            "blend": blend,
            "split": str(rng.choice(["8, 1, 1", "1,1,1", "90,10,0", "100,0,0", "0.5,0,.5", "0,1"])),
        }
        blends: list[Words | None] = [blend] * 3
    else:
        kept = rng.random() < 0.4
        blends = [
            _draw_blend(rng, folder / name, length, least=int(kept and name == "valid"))
            if rng.random() < 0.8
            else None
            for name in ("train", "valid", "test")
        ]
        blends[0] = blends[0] or _draw_blend(rng, folder / "train", length)
        if kept:
            options["drop_last_partial_validation_sequence"] = False
        options["blend_per_split"] = blends
        options["multiple_validation_sets"] = bool(rng.random() < 0.3)
    sizes = [
        _draw_size(rng, blend, epochs) for blend, epochs in zip(blends, (40, 6, 2), strict=True)
    ]
    if (
        options.get("multiple_validation_sets")
        and rng.random() < 0.5
        and blends[1]
        and blends[1][1] is None
    ):
        options["full_validation"] = True
        sizes[1] = None
    return Case(options, sizes)


def _draw_blend(rng: np.random.Generator, folder: Path, length: int, least: int = 0) -> Words:
    """A blend; its documents have `least` tokens: Megatron cannot keep a tail after an empty one."""
    num_datasets = int(rng.choice([1, 1, 2, 3, 5, 40]))
    prefixes = [
        write_pair(folder / f"{i}_text", np.maximum(least, _draw_lengths(rng, length)))
        for i in range(num_datasets)
    ]
    weights: dict[str, list[float] | None] = {
        "none": None,
        "equal": [1.0] * num_datasets,
        "integers": rng.integers(1, 100, num_datasets).tolist(),
        "unnormalised": (rng.random(num_datasets) * 1e5 + 1).tolist(),
        "tiny": np.where(rng.random(num_datasets) < 0.5, 1e-9, 0.3).tolist(),
        "ties": rng.choice([0.1, 0.2], num_datasets).tolist(),
    }
    return prefixes, weights[str(rng.choice(list(weights)))]


def _draw_lengths(rng: np.random.Generator, length: int) -> list[int]:
    """Documents of length 0 and 1, around a sample's length, and of many samples; any four neighbours have tokens."""
    num_documents = int(rng.integers(40, 400))
    kinds = rng.integers(0, 5, num_documents)
    around = np.maximum(0, length + rng.integers(-2, 3, num_documents))
    short = rng.integers(0, 3, num_documents)
    long = rng.integers(1, 12 * length + 2, num_documents)
    lengths = np.choose(kinds, [np.zeros(num_documents, int), short, around, long, 1 + around])
    lengths[::4] = np.maximum(1, lengths[::4])
    result: list[int] = lengths.tolist()
    return result


def _draw_size(rng: np.random.Generator, blend: Words | None, epochs: int) -> int | None:
    if blend is None:
        return 0
    if blend[1] is None and rng.random() < 0.3:
        return None
    return int(rng.integers(0, [1, 2, 200, 40 * epochs, 400 * epochs][rng.integers(5)]))
