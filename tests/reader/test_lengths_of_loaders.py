"""`len` of a Loader: what its next iteration yields, and during one what that yields in all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import megablend
from tests.runs import documents, make_config, write_source

BATCH = 4
BATCHES = 12


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    source = write_source(tmp_path, 0, "parquet", documents(0, 90, 40, 3)) | {"weight": 1}
    given = make_config(tmp_path, [source], samples=BATCHES * BATCH) | {"split": "80,20,0"}
    megablend.build(given)
    return given


def make_loader(config: dict[str, Any], split: str = "train", **options: Any) -> megablend.Loader:
    dataset = megablend.open(config, split)
    return megablend.Loader(
        dataset, micro_batch_size=BATCH, data_parallel_rank=0, data_parallel_size=1, **options
    )


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}])
def test_it_is_what_an_iteration_yields_in_all(
    config: dict[str, Any], options: dict[str, Any]
) -> None:
    loader = make_loader(config, **options)
    iterator = iter(loader)
    assert [len(loader) for _ in iterator] == [BATCHES] * BATCHES
    assert (len(loader), loader.batches_total) == (0, BATCHES)
    with pytest.warns(RuntimeWarning, match="the run is read"):
        assert list(loader) == []


def test_an_iteration_that_is_left_leaves_the_rest(config: dict[str, Any]) -> None:
    loader = make_loader(config)
    for number, _ in enumerate(loader):
        if number == 4:
            break
    assert (len(loader), loader.batches_total) == (BATCHES - 5, BATCHES)
    iterator = iter(loader)
    assert len(loader) == BATCHES - 5
    next(iterator)
    assert len(loader) == BATCHES - 5
    assert len(list(iterator)) == BATCHES - 6


def test_an_older_iterator_that_ends_changes_nothing(config: dict[str, Any]) -> None:
    loader = make_loader(config)
    older = iter(loader)
    next(older)
    current = iter(loader)
    next(current)
    del older
    assert len(loader) == BATCHES - 1


def test_a_state_leaves_the_rest(config: dict[str, Any]) -> None:
    loader = make_loader(config)
    next(iter(loader))
    loader.load_state_dict({**loader.state_dict(), "consumed_samples": 5 * BATCH})
    assert (len(loader), loader.batches_total) == (BATCHES - 5, BATCHES)
    assert len(list(loader)) == BATCHES - 5


def test_a_validation_loader_that_is_through_has_a_full_pass(config: dict[str, Any]) -> None:
    loader = make_loader(config, "valid")
    total = len(loader)
    assert total == loader.batches_total > 1
    for _ in range(3):
        assert len(loader) == total
        assert len(list(loader)) == total
    assert len(loader.sampler) == total
    assert len(list(loader.sampler)) == total
