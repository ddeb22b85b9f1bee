"""Remedies in messages about loaders, their options, memory and transforms: the loader is made as the message says, and reads."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import megablend
from tests.behaviour.remedies.driver import Bench, Step, misuse, table
from tests.runs import documents, make_config, write_source

Config = dict[str, Any]
ALONE: dict[str, Any] = {"data_parallel_rank": 0, "data_parallel_size": 1}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("loaders")
    given = make_config(
        folder,
        [write_source(folder, 0, "arrow", documents(0, 150, 60, 5)) | {"weight": 1}],
        samples=80,
    )
    megablend.build(given)
    megablend.build(given | {"order": "document", "run": "document"})
    return given


class Shared(Bench):
    def __init__(self, config: Config) -> None:
        self.config = config


@pytest.fixture
def bench(config: Config) -> Shared:
    return Shared(config)


def load(config: Config, settings: Config | None = None, **options: Any) -> list[Any]:
    dataset = megablend.open(config | (settings or {}))
    return list(megablend.Loader(dataset, **{"micro_batch_size": 4, **options}))


def ragged(sample: Config) -> torch.Tensor:
    tokens: torch.Tensor = sample["tokens"]
    return tokens[: 1 + int(tokens[0]) % 3]


def first(sample: Config) -> torch.Tensor:
    tokens: torch.Tensor = sample["tokens"]
    return tokens[:1]


LITTLE = 32_000
SINGLE = {"order": "document", "run": "document"}


def own_loader(config: Config) -> list[Any]:
    dataset = megablend.open(config)
    sampler = megablend.PretrainingSampler(dataset, micro_batch_size=4, **ALONE)
    return list(DataLoader(dataset, batch_sampler=sampler))


def with_smaller_blocks(config: Config) -> Config:
    """The same data, written again with fewer tokens in a batch."""
    path = Path(config["cache"]).parent / "smaller" / "0.arrow"
    if not path.exists():
        path.parent.mkdir()
        tokens = pa.array([row for row in documents(0, 150, 60, 5) if row], pa.list_(pa.int32()))
        table = pa.table({config["sources"][0]["column"]: tokens})
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=1)
    source = config["sources"][0] | {"path": str(path)}
    smaller: Config = config | SINGLE | {"sources": [source], "run": "smaller"}
    megablend.build(smaller)
    return smaller


def loading(settings: Config | None = None, **options: Any) -> Step:
    def call(bench: Shared) -> None:
        assert load(bench.config, settings, **options)

    return call


NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="torch finds a CUDA device")

# fmt: off
test_loaders = table(
    misuse(loading(batch_size=8), "batch_size: found 8, but a Loader does not take this option: pass (micro_batch_size)=",
           loading(micro_batch_size=8), name="batch_size"),
    misuse(loading(sampler=range(80)),
           "the run's plan decides which samples come next; PretrainingSampler is for a DataLoader of your own",
           lambda bench: own_loader(bench.config), name="sampler"),
    misuse(loading(shuffle=True), "does not take this option: the config's `order` and `seed` decide the order", loading(SINGLE),
           name="shuffle"),
    misuse(loading(transform=ragged),
           "cannot be collated .*; return tensors of the same shapes for every sample, or pass the loader a collate_fn",
           loading(transform=first), loading(transform=ragged, collate_fn=list), name="ragged samples"),
    misuse(loading(SINGLE | {"memory": LITTLE}, micro_batch_size=12),
           "blocks of a step of 12 samples: .*; raise `memory`, or lower `micro_batch_size`",
           loading(SINGLE | {"memory": 80_000}, micro_batch_size=12), loading(SINGLE | {"memory": LITTLE}, micro_batch_size=1),
           lambda bench: load(with_smaller_blocks(bench.config), {"memory": LITTLE}, micro_batch_size=12), name="little memory"),
    misuse(loading(pin_memory=True), "pin_memory: found True, but torch finds no CUDA device; remove the option", loading(),
           name="pin_memory", marks=[NO_GPU]),
    misuse(loading(micro_batch_sise=2), "micro_batch_sise: .*did you mean '(micro_batch_size)'",
           loading(micro_batch_size=2), name="a slip"),
)
# fmt: on


@pytest.mark.parametrize(
    "shuffle",
    [
        lambda dataset: next(iter(DataLoader(dataset, batch_size=4, shuffle=True))),
        lambda dataset: next(
            iter(DistributedSampler(dataset, num_replicas=2, rank=0, shuffle=True))
        ),
    ],
    ids=["DataLoader", "DistributedSampler"],
)
def test_another_shuffle(config: Config, shuffle: Callable[[megablend.Dataset], Any]) -> None:
    dataset = megablend.open(config)
    says = r"use megablend.Loader, or a DataLoader with batch_sampler=megablend.PretrainingSampler\(...\)"
    with pytest.warns(RuntimeWarning, match=f"shuffles a megablend dataset .*{says}"):
        shuffle(dataset)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = [dataset[k]["tokens"] for k in range(80)]
        for batches in (load(config), own_loader(config)):
            assert torch.equal(
                torch.cat([batch["tokens"] for batch in batches]), torch.stack(expected)
            )
