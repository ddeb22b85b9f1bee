"""A process of a job of two, started by torchrun: what messages about ranks and other libraries advise, as JSON on stdout.

Arguments: a config's path, a folder for Megatron's cache, and the prefix of a `.bin/.idx` pair.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed
from torch.utils.data import DataLoader

import megablend
from megablend.megatron import prepare


def fill(cache: str, prefix: str) -> int:
    """Build Megatron's cache, and return the number of its arrays."""
    config: Any = SimpleNamespace(
        random_seed=7,
        sequence_length=16,
        blend=([prefix], None),
        blend_per_split=None,
        split="8,1,1",
        path_to_cache=cache,
        tokenizer=SimpleNamespace(unique_identifiers={"class": "T"}),
        mock=False,
        mid_level_dataset_surplus=0.005,
        drop_last_partial_validation_sequence=True,
        add_extra_token_to_sequence=True,
    )
    prepare(config, (100, 10, 10))
    return len(list(Path(cache).glob("*.npy")))


def main() -> None:
    """Every message first, then what it advises."""
    warnings.simplefilter("ignore")
    path, cache, prefix = sys.argv[1:]
    dataset = megablend.open(path)
    found: dict[str, Any] = {}

    def attempt(name: str, action: Callable[[], Any]) -> None:
        try:
            found[name] = action()
        except megablend.MegablendError as error:
            found[name] = str(error)

    def read(batches: Any) -> list[list[int]]:
        return [batch["tokens"][:, 0].tolist() for batch in batches]

    attempt("cache before", lambda: fill(cache, prefix))
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=100))
    attempt("cache after", lambda: fill(cache, prefix))
    attempt("no rank", lambda: read(megablend.Loader(dataset, micro_batch_size=4)))
    ranks: dict[str, Any] = {
        "data_parallel_rank": torch.distributed.get_rank(),
        "data_parallel_size": torch.distributed.get_world_size(),
    }
    attempt("ranks", lambda: read(megablend.Loader(dataset, micro_batch_size=4, **ranks)))
    group: Any = torch.distributed.group.WORLD
    attempt(
        "group",
        lambda: read(megablend.Loader(dataset, micro_batch_size=4, data_parallel_group=group)),
    )

    def sampled() -> DataLoader[Any]:
        return DataLoader(
            dataset,
            batch_sampler=megablend.PretrainingSampler(dataset, micro_batch_size=4, **ranks),
        )

    accelerator = importlib.import_module("accelerate").Accelerator(cpu=True)
    attempt("prepared sampler", lambda: read(accelerator.prepare(sampled())))
    attempt(
        "prepared loader",
        lambda: read(accelerator.prepare(megablend.Loader(dataset, micro_batch_size=4, **ranks))),
    )
    attempt("sampler", lambda: read(sampled()))
    torch.distributed.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
