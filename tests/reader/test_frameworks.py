"""Ray Train, Composer and Lightning around a Loader, played by functions in modules of their names."""

from __future__ import annotations

import types
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import megablend
from tests.reader.test_iterations import Numbers
from tests.reader.test_lengths_of_loaders import BATCH, BATCHES, config, make_loader

__all__ = ["config"]  # the fixture


def within(module: str) -> Callable[[Callable[..., Any]], Any]:
    """Have a function run as one of this module."""

    def moved(function: Callable[..., Any]) -> Callable[..., Any]:
        assert isinstance(function, types.FunctionType)
        return types.FunctionType(
            function.__code__, {**globals(), "__name__": module}, None, function.__defaults__
        )

    return moved


@within("ray.train.torch.train_loop_utils")
def with_sampler(loader: Any) -> Any:
    """As the function of this name in Ray's prepare_data_loader."""
    sampler: Any = DistributedSampler(loader.dataset, num_replicas=2, rank=0, shuffle=False)
    return DataLoader(loader.dataset, batch_size=loader.batch_size, sampler=sampler)


@within("ray.train.torch.train_loop_utils")
def take_ahead(loader: Any) -> Any:
    """As Ray's _WrappedDataLoader, which has a batch more than it has handed out."""
    return next(iter(loader))


class Trainer:
    """As Composer's class of this name: it begins an epoch, and leaves out batches that it has counted."""

    def __init__(self, batch_in_epoch: int, *, spin: bool = True) -> None:
        self.spin_dataloaders = spin
        timestamp = types.SimpleNamespace(batch_in_epoch=batch_in_epoch)
        self.state = types.SimpleNamespace(timestamp=timestamp, dataset_resumption={})

    @within("composer.trainer.trainer")
    def train(self, loader: Any) -> Any:
        first = self.state.timestamp.batch_in_epoch if self.spin_dataloaders else 0
        for number, batch in enumerate(loader):
            if number >= first:
                return batch
        return None


@within("composer.core.state")
def save_state(dataset: Any) -> Any:
    """As Composer saves the state of the dataset of a DataLoader."""
    return dataset.state_dict(48, True)


def evaluate(loader: Any) -> list[Any]:
    return list(islice(loader, 2))


def length(loader: Any) -> int:
    return len(loader)


def make_sampler(dataset: Any) -> megablend.PretrainingSampler:
    return megablend.PretrainingSampler(
        dataset, micro_batch_size=BATCH, data_parallel_rank=0, data_parallel_size=1
    )


def test_ray_does_not_replace_what_shares_the_samples_out(config: dict[str, Any]) -> None:
    dataset = megablend.open(config)
    refused = r"prepare_data_loader would replace.*use the Loader as it is"
    with pytest.raises(megablend.ConfigError, match=refused):
        with_sampler(make_loader(config))
    with pytest.raises(megablend.ConfigError, match=refused):
        with_sampler(DataLoader(dataset, batch_sampler=make_sampler(dataset)))
    assert len(with_sampler(DataLoader(dataset, batch_size=BATCH))) == BATCHES // 2


def test_ray_takes_a_batch_ahead_of_the_state(config: dict[str, Any]) -> None:
    with pytest.warns(RuntimeWarning, match="prepare_data_loader takes a batch ahead"):
        take_ahead(make_loader(config))
    take_ahead(make_loader(config, "valid"))


def test_composer_leaves_out_what_a_state_has_passed(config: dict[str, Any]) -> None:
    numbers = Numbers(config)
    loader = make_loader(config)
    assert numbers.of([Trainer(3).train(loader)]) == [3]
    with pytest.warns(
        RuntimeWarning, match=r"skips 4 batches, .* at sample 16, .*spin_dataloaders=False"
    ):
        assert numbers.of([Trainer(4).train(loader)]) == [8]
    loader.load_state_dict(loader.dataset.state_dict(2 * BATCH))
    assert numbers.of([Trainer(4, spin=False).train(loader)]) == [2]


def test_composer_is_not_given_the_state_of_a_dataset(config: dict[str, Any]) -> None:
    with pytest.raises(megablend.StateError, match=r"train_dataloader=megablend\.Loader"):
        save_state(megablend.open(config))


@pytest.mark.parametrize(
    "module",
    [
        "lightning.pytorch.utilities.combined_loader",
        "pytorch_lightning",
        "composer.trainer.trainer",
    ],
)
def test_validation_begins_at_its_first_sample_where_a_trainer_begins_it(
    config: dict[str, Any], module: str
) -> None:
    """Sanity checks and limits of batches leave a pass before its end; the next one is not of what they left."""
    numbers = Numbers(config, "valid")
    loader = make_loader(config, "valid")
    run = within(module)(evaluate)
    assert [numbers.of(run(loader)) for _ in range(3)] == [[0, 1]] * 3
    assert within(module)(length)(loader) == loader.batches_total
    assert length(loader) == loader.batches_total - 2
    assert numbers.of(evaluate(loader)) == [2, 3]
    train = make_loader(config)
    assert [Numbers(config).of(run(train)) for _ in range(2)] == [[0, 1], [2, 3]]
