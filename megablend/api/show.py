"""show: exactly what a sample is made of, without a cluster."""

from __future__ import annotations

from typing import Any

import numpy as np

from megablend.api.open import open_dataset
from megablend.api.runs import ConfigLike
from megablend.config.numbers import whole_number
from megablend.errors import ConfigError
from megablend.system.failures import translating


@translating("show")
def show(config: ConfigLike, sample: int, split: str = "train", *, cache: str | None = None) -> dict[str, Any]:
    """What sample k holds and where it comes from, as a JSON-able dict.

    Returns: sample, split, source, ordinal, epochs, pieces (file, block, first and last token within the block, epoch, byte
        offset), document_starts, tokens, and extra: of each extra column a number a token.
    Raises: as `open_dataset`; ConfigError for a sample outside the run.
    """
    dataset = open_dataset(config, split, cache=cache)
    sample = whole_number("sample", sample)
    if not 0 <= sample < len(dataset):
        raise ConfigError(
            f"found sample {sample}, expected 0 to {len(dataset) - 1}: {split} has {len(dataset):,} samples"
        )
    generation, store = dataset.run.store.generation, dataset.run.store
    found = dataset.sample(sample)
    _, epochs, blocks, starts, stops = found.stretches
    offsets, files = generation.blocks(blocks)["offset"], generation.file_of(blocks)
    pieces = [
        {
            "file": generation.path(int(file), store.roots),
            "block": int(block),
            "byte_offset": int(offset),
            "first_token": int(start),
            "stop_token": int(stop),
            "epoch": int(epoch),
        }
        for file, block, offset, start, stop, epoch in zip(files, blocks, offsets, starts, stops, epochs, strict=True)
    ]
    return {
        "sample": sample,
        "split": split,
        "source": dataset.run.sources[found.source].name,
        "ordinal": found.ordinal,
        "epochs": np.unique(epochs).tolist(),
        "pieces": pieces,
        "document_starts": found.starts.tolist(),
        "tokens": found.tokens.tolist(),
        "extra": {name: numbers.tolist() for name, numbers in found.extra.items()},
    }
