"""show: exactly what a sample, or a rank's part of a step, is made of, without a cluster."""

from __future__ import annotations

from typing import Any

import numpy as np

from megablend.api.committed import open_committed
from megablend.api.runs import ConfigLike
from megablend.config.numbers import whole_number
from megablend.errors import ConfigError
from megablend.plan.skips import Skips, load_skips
from megablend.reader import Dataset
from megablend.system.failures import translating


@translating("show")
def show(
    config: ConfigLike, sample: int, split: str = "train", *, run: str | None = None, cache: str | None = None
) -> dict[str, Any]:
    """What sample k holds and where it comes from, as a JSON-able dict.

    Args:
        config: a config, or a cache's folder (then `run` is needed). Where a config was edited since, the run's ledger decides.
        run: name of a run of the cache, in place of the config's.

    Returns: sample, split, source, ordinal, epochs, pieces (file, block, first and last token within the block, epoch, byte
        offset), document_starts, tokens, and extra: of each extra column a number a token.
    Raises: as `open_dataset`; ConfigError for a sample outside the run.
    """
    dataset = Dataset(open_committed(config, run, split, cache=cache))
    sample = whole_number("sample", sample)
    if not 0 <= sample < len(dataset):
        raise ConfigError(
            f"found sample {sample}, expected 0 to {len(dataset) - 1}: {split} has {len(dataset):,} samples"
        )
    return _describe_sample(dataset, sample)


@translating("show")
def show_step(
    config: ConfigLike,
    step: int,
    *,
    micro_batch_size: int,
    rank: int = 0,
    data_parallel_size: int = 1,
    global_batch_size: int | None = None,
    split: str = "train",
    run: str | None = None,
    cache: str | None = None,
) -> dict[str, Any]:
    """What a data-parallel rank read at a step, as a JSON-able dict.

    A step is `global_batch_size` samples (by default one micro step, micro_batch_size * data_parallel_size), dealt to ranks as
    PretrainingSampler and Megatron do. Batches that grew during a run have no such number: show their samples instead.

    Args:
        config, run: as of `show`.

    Returns: run, split, step, rank, and samples: a dict of `show` each.
    Raises: as `show`; ConfigError for a rank or step that there is not, or a step that is not whole micro steps.
    """
    opened = open_committed(config, run, split, cache=cache)
    skips = load_skips(opened.config.cache, opened.ledger) if split == "train" else Skips()
    dataset = Dataset(opened)
    micro_batch_size = whole_number("micro_batch_size", micro_batch_size, least=1)
    size = whole_number("data_parallel_size", data_parallel_size, least=1)
    rank, micro_step = whole_number("rank", rank), micro_batch_size * size
    batch = micro_step if global_batch_size is None else whole_number("global_batch_size", global_batch_size, least=1)
    if not 0 <= rank < size:
        raise ConfigError(f"found rank {rank}, expected 0 to {size - 1}: there are {size} data-parallel ranks")
    if batch % micro_step:
        raise ConfigError(
            f"found a global batch of {batch} samples, expected a multiple of micro batch {micro_batch_size} x {size} ranks = "
            f"{micro_step}"
        )
    num_steps = skips.count_trained(len(dataset)) // batch
    if not 0 <= whole_number("step", step) < num_steps:
        raise ConfigError(
            f"found step {step}, expected 0 to {num_steps - 1}: {split} has {len(dataset):,} samples, {batch:,} a step"
        )
    first = step * batch + rank * micro_batch_size
    samples = [
        k for start in range(first, (step + 1) * batch, micro_step) for k in range(start, start + micro_batch_size)
    ]
    return {
        "run": dataset.run.ledger.run,
        "split": split,
        "step": step,
        "rank": rank,
        "samples": [_describe_sample(dataset, skips.position(trained)) for trained in samples],
    }


def _describe_sample(dataset: Dataset, sample: int) -> dict[str, Any]:
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
        "split": dataset.run.split,
        "source": dataset.run.sources[found.source].name,
        "ordinal": found.ordinal,
        "epochs": np.unique(epochs).tolist(),
        "pieces": pieces,
        "document_starts": found.starts.tolist(),
        "tokens": found.tokens.tolist(),
        "extra": {name: numbers.tolist() for name, numbers in found.extra.items()},
    }
