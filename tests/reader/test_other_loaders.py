"""Loaders and samplers of other libraries over our datasets: what works gives the same samples, what does not is said."""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

import megablend
from tests.runs import documents, make_config, write_source

ONE: dict[str, Any] = {"data_parallel_rank": 0, "data_parallel_size": 1}


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    source = write_source(tmp_path, 0, "parquet", documents(0, 80, 30, 2))
    config = make_config(tmp_path, [source], samples=96)
    megablend.build(config)
    return config


def tokens(batches: Any) -> torch.Tensor:
    return torch.cat([batch["tokens"] for batch in batches])


class Skip(BatchSampler):
    """As accelerate's SkipBatchSampler."""

    def __init__(self, sampler: Any, skipped: int) -> None:
        self.batch_sampler = sampler
        self.skipped = skipped

    def __iter__(self) -> Iterator[list[int]]:
        for number, batch in enumerate(self.batch_sampler):
            if number >= self.skipped:
                yield batch

    def __len__(self) -> int:
        return len(self.batch_sampler) - self.skipped


class BatchSamplerShard(BatchSampler):
    """As accelerate's class of this name, which accelerate.prepare puts around a DataLoader's batch sampler."""

    def __init__(self, sampler: Any, num_processes: int) -> None:
        self.batch_sampler = sampler
        self.num_processes = num_processes

    def __len__(self) -> int:
        return len(self.batch_sampler) // self.num_processes

    def __iter__(self) -> Iterator[list[int]]:
        for number, batch in enumerate(self.batch_sampler):
            if number % self.num_processes == 0:
                yield batch


# It is recognised by its module, too.
BatchSamplerShard.__iter__ = types.FunctionType(  # type: ignore[method-assign]
    BatchSamplerShard.__iter__.__code__, {**globals(), "__name__": "accelerate.data_loader"}
)


def test_batches_in_place_of_samples_are_refused(config: dict[str, Any]) -> None:
    dataset = megablend.open(config)
    batches: Any = megablend.PretrainingSampler(dataset, micro_batch_size=4, **ONE)
    with pytest.raises(TypeError, match=r"found a list of sample numbers, .* as batch_sampler="):
        next(iter(DataLoader(dataset, sampler=batches)))


def test_two_loaders_over_one_dataset_do_not_disturb_each_other(config: dict[str, Any]) -> None:
    dataset = megablend.open(config, consumed_samples=8)
    first = megablend.Loader(dataset, micro_batch_size=4, consumed_samples=40)
    second = megablend.Loader(dataset, micro_batch_size=4)
    assert (first.consumed_samples, second.consumed_samples, dataset.consumed_samples) == (40, 8, 8)
    pairs = list(zip(first, second, strict=False))
    assert len(pairs) == 14
    alone = tokens(megablend.Loader(megablend.open(config), micro_batch_size=4))
    assert torch.equal(tokens(a for a, _ in pairs), alone[40:])
    assert torch.equal(tokens(b for _, b in pairs), alone[8:64])
    second.load_state_dict(dataset.state_dict(20))
    assert (first.consumed_samples, second.consumed_samples, dataset.consumed_samples) == (
        96,
        20,
        8,
    )
    sampler = megablend.PretrainingSampler(dataset, micro_batch_size=4)
    sampler.load_state_dict(dataset.state_dict(32))
    assert (next(iter(sampler))[0], dataset.consumed_samples) == (32, 8)


@pytest.mark.parametrize("make", [megablend.Loader, megablend.PretrainingSampler])
def test_a_position_out_of_range_is_refused_by_loaders_too(
    config: dict[str, Any], make: Any
) -> None:
    dataset = megablend.open(config)
    with pytest.raises(
        megablend.StateError, match="consumed_samples is 97; expected 0 to 96, the samples"
    ):
        make(dataset, micro_batch_size=4, consumed_samples=97)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_loaders_parts_make_a_loader_that_skips(config: dict[str, Any], workers: int) -> None:
    """What accelerate.skip_first_batches does with a DataLoader, and Hugging Face's Trainer when it resumes."""
    whole = tokens(megablend.Loader(megablend.open(config), micro_batch_size=4))
    loader = megablend.Loader(megablend.open(config), micro_batch_size=4, num_workers=workers)
    settings = {
        name: getattr(loader, name)
        for name in ("num_workers", "collate_fn", "pin_memory", "timeout", "generator")
    }
    assert (settings["num_workers"], loader.batch_size, loader.drop_last) == (workers, 4, True)
    skipping = DataLoader(loader.dataset, batch_sampler=Skip(loader.batch_sampler, 5), **settings)
    assert len(skipping) == 19
    batches = iter(skipping)
    assert torch.equal(next(batches)["tokens"], whole[20:24])
    if workers:
        with pytest.raises(
            megablend.StateError,
            match=r"another DataLoader with workers took.*ignore_data_skip=True",
        ):
            loader.state_dict()
    else:
        assert loader.state_dict()["consumed_samples"] == 24
    assert torch.equal(tokens(batches), whole[24:])
    assert len(skipping) == 19
    loader.load_state_dict(loader.dataset.state_dict(12))
    assert loader.state_dict()["consumed_samples"] == 12
    assert torch.equal(tokens(loader), whole[12:])


def test_a_loader_has_no_other_attributes(config: dict[str, Any]) -> None:
    loader = megablend.Loader(megablend.open(config), micro_batch_size=4, collate_fn=list)
    assert loader.collate_fn is list
    with pytest.raises(AttributeError, match="'Loader' object has no attribute 'iterations'"):
        _ = loader.iterations


def test_accelerate_skips_and_leaves_a_loader_alone(config: dict[str, Any]) -> None:
    accelerate = pytest.importorskip("accelerate")
    loader = megablend.Loader(megablend.open(config), micro_batch_size=4)
    assert accelerate.Accelerator(cpu=True).prepare(loader) is loader
    whole = tokens(megablend.Loader(megablend.open(config), micro_batch_size=4))
    assert torch.equal(tokens(accelerate.skip_first_batches(loader, 7)), whole[28:])


def test_skipping_batches_after_a_state_was_loaded_is_warned_of(config: dict[str, Any]) -> None:
    """Trainer and accelerate skip what the state's position has passed already."""
    accelerate = pytest.importorskip("accelerate")
    dataset = megablend.open(config)
    loader = megablend.Loader(dataset, micro_batch_size=4)
    sampler = megablend.PretrainingSampler(dataset, micro_batch_size=4, **ONE)
    for resumed, whole in (
        (loader, loader),
        (sampler, DataLoader(dataset, batch_sampler=sampler)),
    ):
        resumed.load_state_dict(dataset.state_dict(12))
        with pytest.warns(
            RuntimeWarning, match="skips 3 batches, .* at sample 12, .*do not skip batches"
        ):
            next(iter(accelerate.skip_first_batches(whole, 3)))
        resumed.load_state_dict(dataset.state_dict(0))
        next(iter(accelerate.skip_first_batches(whole, 3)))
    opened = megablend.open(config, consumed_samples=12)
    with pytest.warns(
        RuntimeWarning, match="skips 3 batches, .* at sample 12, .*do not skip batches"
    ):
        next(iter(accelerate.skip_first_batches(megablend.Loader(opened, micro_batch_size=4), 3)))


@pytest.mark.parametrize(
    "around", [lambda sampler: sampler, lambda sampler: Skip(sampler, 2)], ids=["bare", "skipped"]
)
def test_a_sampler_is_not_split_twice(config: dict[str, Any], around: Any) -> None:
    sampler = megablend.PretrainingSampler(
        megablend.open(config), micro_batch_size=4, data_parallel_rank=1, data_parallel_size=2
    )
    assert len(list(BatchSamplerShard(around(sampler), 1))) > 0
    sampler.consumed_samples = 0
    with pytest.raises(
        megablend.ConfigError,
        match=r"splits .* among 2 processes.* 1 of 2 batches would be dropped; use megablend.Loader",
    ):
        next(iter(BatchSamplerShard(around(sampler), 2)))


def test_accelerates_own_shard_is_refused(config: dict[str, Any]) -> None:
    data_loader = pytest.importorskip("accelerate.data_loader")
    sampler = megablend.PretrainingSampler(megablend.open(config), micro_batch_size=4, **ONE)
    with pytest.raises(
        megablend.ConfigError, match=r"accelerate\.prepare splits this DataLoader's batches"
    ):
        next(iter(data_loader.BatchSamplerShard(sampler, num_processes=2, even_batches=False)))


def test_another_shuffle_is_warned_of(config: dict[str, Any]) -> None:
    with pytest.warns(RuntimeWarning, match="RandomSampler shuffles a megablend dataset") as caught:
        DataLoader(megablend.open(config), batch_size=4, shuffle=True)
    assert len(caught) == 1
    distributed: DistributedSampler[Any] = DistributedSampler(
        megablend.open(config), num_replicas=2, rank=0, shuffle=True
    )
    with pytest.warns(RuntimeWarning, match="DistributedSampler shuffles a megablend dataset"):
        next(iter(distributed))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(
            iter(DistributedSampler(megablend.open(config), num_replicas=2, rank=0, shuffle=False))
        )
        assert len(list(DataLoader(megablend.open(config), batch_size=4))) == 24


@pytest.mark.parametrize(
    ("sizes", "fits"),
    [
        ({"micro_batch_size": 4, "data_parallel_rank": 0, "data_parallel_size": 2}, 8),
        ({"micro_batch_size": 3, "data_parallel_rank": 0, "data_parallel_size": 2}, 6),
        ({"micro_batch_size": 4, "num_workers": 2}, 8),
    ],
    ids=str,
)
def test_lanes_that_do_not_fit_are_warned_of_with_those_that_do(
    config: dict[str, Any], sizes: dict[str, Any], fits: int
) -> None:
    dataset = megablend.open(config)
    with pytest.warns(
        RuntimeWarning, match=rf"lanes: 4 is not a multiple of .*; lanes: {fits} fits"
    ):
        megablend.Loader(dataset, **sizes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for fine in (
            {"micro_batch_size": 2} | ONE | {"data_parallel_size": 2},
            {"micro_batch_size": 7},
            {"micro_batch_size": 4},
        ):
            megablend.Loader(dataset, **fine)
        if "data_parallel_rank" in sizes:  # one rank says it for all
            megablend.Loader(dataset, **(sizes | {"data_parallel_rank": 1}))
