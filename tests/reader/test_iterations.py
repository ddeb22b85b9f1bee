"""Iterations of one Loader share its position: each sample comes once, whoever asks, and the state is of what was yielded."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import megablend
from tests.reader.test_lengths_of_loaders import BATCH, BATCHES, config, make_loader

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)
__all__ = ["config"]  # the fixture

WORKERS: dict[str, dict[str, Any]] = {
    "none": {},
    "workers": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
}
OPTIONS: dict[str, dict[str, Any]] = WORKERS | {
    "transform": {"transform": lambda sample: sample},
    "collate_fn": {"collate_fn": torch.utils.data.default_collate},
}
COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda loader: pickle.loads(pickle.dumps(loader)),
}


class Numbers:
    """Numbers of the batches of a split, by their tokens."""

    def __init__(self, config: dict[str, Any], split: str = "train") -> None:
        dataset = megablend.open(config, split)
        self._tokens = [
            dataset[k]["tokens"].tolist() for k in range(0, len(dataset) - BATCH + 1, BATCH)
        ]

    def of(self, batches: Any) -> list[int]:
        return [self._tokens.index(batch["tokens"][0].tolist()) for batch in batches]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_state_that_is_loaded_in_a_loop_is_where_the_loop_goes_on(
    config: dict[str, Any], options: dict[str, Any]
) -> None:
    """As after a loss spike: back to the last checkpoint, without another iterator."""
    numbers = Numbers(config)
    loader = make_loader(config, **options)
    saved: dict[str, Any] = {}
    seen = list[int]()
    for batch in loader:
        seen += numbers.of([batch])
        assert loader.state_dict()["consumed_samples"] == (seen[-1] + 1) * BATCH
        if len(seen) == 2:
            saved = loader.state_dict()
        if len(seen) in (5, 15):  # the second time after the last batch
            loader.load_state_dict(saved)
            assert len(loader) == BATCHES - 2
    assert seen == [*range(5), *range(2, BATCHES), *range(2, BATCHES)]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_iterators_of_one_loader_share_its_position(
    config: dict[str, Any], options: dict[str, Any]
) -> None:
    numbers = Numbers(config)
    loader = make_loader(config, **options)
    first = iter(loader)
    second = iter(loader)
    taken = [next(iterator) for iterator in (first, second, first, first, second, second, first)]
    assert numbers.of(taken) == list(range(7))
    assert loader.state_dict()["consumed_samples"] == 7 * BATCH
    del first
    assert numbers.of(second) == list(range(7, BATCHES))


def test_an_older_iterator_does_not_begin_another_pass(config: dict[str, Any]) -> None:
    loader = make_loader(config, "valid")
    older = iter(loader)
    next(older)
    assert len(list(loader)) == len(loader) - 1
    assert list(older) == []


@pytest.mark.parametrize("options", WORKERS.values(), ids=WORKERS)
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_that_is_made_in_an_iteration_goes_on_by_itself(
    config: dict[str, Any], copied: Callable[[Any], Any], options: dict[str, Any]
) -> None:
    numbers = Numbers(config)
    loader = make_loader(config, **options)
    iterator = iter(loader)
    assert numbers.of(islice(iterator, 3)) == [0, 1, 2]
    other = copied(loader)
    assert (len(other), len(loader)) == (BATCHES - 3, BATCHES)
    assert numbers.of(other) == list(range(3, BATCHES))
    assert loader.state_dict()["consumed_samples"] == 3 * BATCH
    assert numbers.of(iterator) == list(range(3, BATCHES))


def test_an_iteration_after_the_end_of_a_run_is_warned_of(config: dict[str, Any]) -> None:
    loader = make_loader(config)
    assert len(list(loader)) == BATCHES
    with pytest.warns(RuntimeWarning, match=r"48 of its 48 samples.*yields no batch.*`samples`"):
        assert list(loader) == []


def test_a_loop_that_never_ends_is_ended(config: dict[str, Any]) -> None:
    """Composer, for instance, begins epoch after epoch until it has its number of batches."""
    loader = make_loader(config)
    seen = list[Any]()

    def train(num_steps: int) -> None:
        while len(seen) < num_steps:
            seen.extend(loader)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(megablend.StateError, match=r"1000 times.*end"):
            train(BATCHES + 1)
    assert len(seen) == BATCHES
    loader.load_state_dict({**loader.state_dict(), "consumed_samples": 0})
    assert len(list(loader)) == BATCHES


def test_so_is_a_loop_over_a_run_shorter_than_a_step(config: dict[str, Any]) -> None:
    config |= {"run": "short", "samples": BATCH - 1}
    megablend.build(config)
    with pytest.warns(RuntimeWarning, match="the sampler yields no batches"):
        loader = make_loader(config)
    for _ in range(999):
        assert list(loader) == []
    with pytest.raises(megablend.StateError, match=r"1000 times.*end"):
        list(loader)


class Whole(IterableDataset[Any]):
    """A Loader as an IterableDataset, as users write it."""

    def __init__(self, loader: megablend.Loader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader


@pytest.mark.parametrize(
    ("context", "workers", "told"),
    [
        ("fork", 1, "state.* does not advance"),
        ("spawn", 1, "state.* does not advance"),
        ("fork", 2, "each of the 2 workers yields the same batches"),
    ],
)
def test_a_loader_in_workers_of_another_is_warned_of(
    config: dict[str, Any], context: str, workers: int, told: str
) -> None:
    batches = DataLoader(
        Whole(make_loader(config)),
        batch_size=None,
        num_workers=workers,
        multiprocessing_context=context,
        worker_init_fn=_raise_warnings,
    )
    with pytest.raises(RuntimeWarning, match=told):
        next(iter(batches))


def _raise_warnings(_: int) -> None:
    warnings.simplefilter("error")


def test_a_loader_that_a_worker_makes_itself_is_its_own(config: dict[str, Any]) -> None:
    config |= {"run": "lanes", "lanes": 2 * BATCH}
    megablend.build(config)

    class Own(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            worker = torch.utils.data.get_worker_info()
            assert worker is not None
            yield from megablend.Loader(
                megablend.open(config),
                micro_batch_size=BATCH,
                data_parallel_rank=worker.id,
                data_parallel_size=worker.num_workers,
            )

    batches = DataLoader(Own(), batch_size=None, num_workers=2, worker_init_fn=_raise_warnings)
    assert sorted(Numbers(config).of(batches)) == list(range(BATCHES))


def test_a_samplers_position_is_not_that_of_batches_which_workers_took_ahead(
    config: dict[str, Any],
) -> None:
    dataset = megablend.open(config)
    sampler = megablend.PretrainingSampler(
        dataset, micro_batch_size=BATCH, data_parallel_rank=0, data_parallel_size=1
    )
    next(iter(DataLoader(dataset, batch_sampler=sampler, num_workers=0)))
    assert sampler.state_dict()["consumed_samples"] == BATCH
    batches = DataLoader(dataset, batch_sampler=sampler, num_workers=2)
    running = iter(batches)
    next(running)
    told = r"workers have taken batches ahead.*dataset\.state_dict\(dataset\.position\(trained\)\)"
    with pytest.raises(megablend.StateError, match=told):
        sampler.state_dict()
    with pytest.raises(megablend.StateError, match=told):
        next(iter(batches))  # which would leave out what the workers had
    sampler.load_state_dict(dataset.state_dict(2 * BATCH))
    assert sampler.state_dict()["consumed_samples"] == 2 * BATCH
    assert Numbers(config).of(batches) == list(range(2, BATCHES))
    with pytest.warns(RuntimeWarning, match=told):  # they may all have arrived
        assert sampler.state_dict()["consumed_samples"] == BATCHES * BATCH
    assert list(batches) == []


def test_a_loaders_own_sampler_knows_that_workers_are_ahead(
    config: dict[str, Any],
) -> None:
    loader = make_loader(config, num_workers=2)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(megablend.StateError, match="workers have taken batches ahead"):
        loader.sampler.state_dict()
    assert loader.state_dict()["consumed_samples"] == BATCH
    del iterator
    assert Numbers(config).of(loader) == list(range(1, BATCHES))
