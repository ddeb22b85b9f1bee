"""Remedies in messages about loaders, their options, memory and transforms: the loader is made as the message says, and reads."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import megablend
from megablend.errors import ConfigError, MegablendError
from tests.runs import documents, make_config, write_source

Config = dict[str, Any]
ALONE: dict[str, Any] = {"data_parallel_rank": 0, "data_parallel_size": 1}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("loaders")
    given = make_config(
        folder, [write_source(folder, 0, "arrow", documents(0, 150, 60, 5)) | {"weight": 1}], samples=80
    )
    megablend.build(given)
    megablend.build(given | {"order": "document", "run": "document"})
    return given


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
Call = Callable[[Config], Any]


class Case(NamedTuple):
    call: Call
    says: str
    instead: list[Call]


CASES: dict[str, Case] = {
    "batch_size": Case(
        lambda config: load(config, batch_size=8),
        "batch_size: found 8, but a Loader does not take this option: give (micro_batch_size)=",
        [lambda config: load(config, micro_batch_size=8)],
    ),
    "sampler": Case(
        lambda config: load(config, sampler=range(80)),
        "the run's plan decides which samples come next; PretrainingSampler is for a DataLoader of your own",
        [lambda config: own_loader(config)],
    ),
    "shuffle": Case(
        lambda config: load(config, shuffle=True),
        "does not take this option: the config's `order` and `seed` decide the order",
        [lambda config: load(config, SINGLE)],
    ),
    "ragged samples": Case(
        lambda config: load(config, transform=ragged),
        "cannot be collated .*; return tensors of the same shapes for every sample, or pass the loader a collate_fn",
        [lambda config: load(config, transform=first), lambda config: load(config, transform=ragged, collate_fn=list)],
    ),
    "little memory": Case(
        lambda config: load(config, SINGLE | {"memory": LITTLE}, micro_batch_size=12),
        "the blocks of a step of 12 samples take .*; raise memory, or lower micro_batch_size or the sources' block sizes",
        [
            lambda config: load(config, SINGLE | {"memory": 80_000}, micro_batch_size=12),
            lambda config: load(config, SINGLE | {"memory": LITTLE}, micro_batch_size=1),
            lambda config: load(with_smaller_blocks(config), {"memory": LITTLE}, micro_batch_size=12),
        ],
    ),
}
if not torch.cuda.is_available():
    CASES["pin_memory"] = Case(
        lambda config: load(config, pin_memory=True),
        "pin_memory: found True, but torch finds no CUDA device; remove the option",
        [load],
    )


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


@pytest.mark.parametrize("name", CASES)
def test_a_loader(config: Config, name: str) -> None:
    case = CASES[name]
    with pytest.raises(MegablendError) as caught:
        case.call(config)
    assert re.search(case.says, str(caught.value)), str(caught.value)
    for instead in case.instead:
        assert instead(config)


@pytest.mark.parametrize(
    "shuffle",
    [
        lambda dataset: next(iter(DataLoader(dataset, batch_size=4, shuffle=True))),
        lambda dataset: next(iter(DistributedSampler(dataset, num_replicas=2, rank=0, shuffle=True))),
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
            assert torch.equal(torch.cat([batch["tokens"] for batch in batches]), torch.stack(expected))


def test_a_refused_option_names_no_other(config: Config) -> None:
    with pytest.raises(ConfigError, match=r"micro_batch_sise: .*did you mean 'micro_batch_size'"):
        load(config, micro_batch_sise=2)
    assert load(config, micro_batch_size=2)
