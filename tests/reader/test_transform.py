"""A function of the user's on each sample: the same wherever it runs, last of all, and blamed by the sample's number."""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

import megablend
from megablend.errors import ChangedFileError, ConfigError, TransformError
from megablend.reader.transform import apply_to_batch
from tests.reader.loader_threads import LoaderThreads
from tests.runs import documents, make_config, write_source


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    source = write_source(tmp_path, 0, "parquet", documents(0, 80, 30, 2))
    config = make_config(tmp_path, [source], samples=99)
    megablend.build(config)
    return config


def doubled(sample: dict[str, Any]) -> dict[str, Any]:
    assert isinstance(sample["dataset_id"], int)
    first = int(sample["tokens"][0])
    return {
        "twice": sample["tokens"] * 2,
        "first": first,
        "name": f"sample {first}",
        "pair": (first, sample["labels"]),
    }


def picky(sample: dict[str, Any], *, bad: int) -> dict[str, Any]:
    if int(sample["tokens"][0]) == bad:
        raise ZeroDivisionError("nothing to divide by")
    return sample


def ragged(sample: dict[str, Any]) -> torch.Tensor:
    tokens: torch.Tensor = sample["tokens"]
    return tokens[: 1 + int(tokens[0]) % 3]


WAYS: list[dict[str, Any]] = [{}, {"num_workers": 2}, {"collate_fn": default_collate}]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_results_are_collated_as_torch_does(
    config: dict[str, Any], way: dict[str, Any], drop_last: bool
) -> None:
    plain = megablend.open(config)
    found = list(
        megablend.Loader(plain, micro_batch_size=4, transform=doubled, drop_last=drop_last, **way)
    )
    assert len(found) == (24 if drop_last else 25)
    for step, batch in enumerate(found):
        expected = default_collate(
            [doubled(plain[k]) for k in range(4 * step, min(4 * step + 4, 99))]
        )
        assert torch.equal(batch["twice"], expected["twice"])
        assert torch.equal(batch["pair"][1], expected["pair"][1])
        assert (batch["first"].tolist(), list(batch["name"])) == (
            expected["first"].tolist(),
            list(expected["name"]),
        )


def test_a_dataset_has_it_too(config: dict[str, Any]) -> None:
    dataset = megablend.open(config, transform=doubled)
    assert torch.equal(dataset[5]["twice"], 2 * megablend.open(config)[5]["tokens"])
    batch = next(iter(megablend.Loader(dataset, micro_batch_size=3)))
    assert torch.equal(batch["twice"], torch.stack([dataset[k]["twice"] for k in range(3)]))
    with pytest.raises(ConfigError, match="both the dataset and the loader have one"):
        megablend.Loader(dataset, micro_batch_size=3, transform=doubled)


def test_spawned_workers_get_it_pickled(config: dict[str, Any]) -> None:
    loader = megablend.Loader(
        megablend.open(config),
        micro_batch_size=9,
        transform=doubled,
        num_workers=1,
        multiprocessing_context="spawn",
    )
    plain = megablend.open(config)
    assert torch.equal(
        next(iter(loader))["twice"], torch.stack([2 * plain[k]["tokens"] for k in range(9)])
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_an_error_names_the_sample(config: dict[str, Any], way: dict[str, Any]) -> None:
    dataset = megablend.open(config)
    transform = partial(picky, bad=int(dataset[22]["tokens"][0]))
    batches = iter(megablend.Loader(dataset, micro_batch_size=4, transform=transform, **way))
    assert len([next(batches) for _ in range(5)]) == 5
    with pytest.raises(
        TransformError,
        match="transform failed on sample 22: ZeroDivisionError: nothing to divide by",
    ):
        next(batches)
    with pytest.raises(TransformError, match="sample 22: ZeroDivisionError"):
        dataset.with_transform(transform)[22]


def test_what_cannot_be_collated_is_said(config: dict[str, Any]) -> None:
    with pytest.raises(
        TransformError,
        match=r"the transformed samples 0 to 3 cannot be collated .*tensors of the same shapes",
    ):
        list(megablend.Loader(megablend.open(config), micro_batch_size=4, transform=ragged))


def test_it_runs_in_threads_ahead_of_the_loop_and_leaves_none(
    config: dict[str, Any], threads: LoaderThreads
) -> None:
    names = set[str]()
    numbers = list[int]()

    def watched(sample: dict[str, Any]) -> dict[str, Any]:
        names.add(threading.current_thread().name)
        numbers.append(int(sample["tokens"][0]))
        return sample

    loader = megablend.Loader(megablend.open(config), micro_batch_size=1, transform=watched)
    batches = iter(loader)
    next(batches)
    assert all(name.startswith("megablend-transform") for name in names)
    assert loader.state_dict()["consumed_samples"] == 1
    del batches
    loader.close()
    threads.await_end()
    rest = list(loader)
    assert len(rest) == 98  # what was read ahead and not handed out comes again
    assert torch.equal(rest[0]["tokens"][0], megablend.open(config)[1]["tokens"])


def test_reading_fails_where_the_batch_is_due(config: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "source0" / "0.parquet"
    loader = megablend.Loader(megablend.open(config), micro_batch_size=1, transform=doubled)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ChangedFileError, match=r"0\.parquet"):
        list(loader)
    plain = megablend.Loader(megablend.open(config), micro_batch_size=1)
    with pytest.raises(ChangedFileError, match=r"0\.parquet"):
        list(plain)
    assert loader.consumed_samples == plain.consumed_samples


def test_numbers_become_tensors_on_the_cpu_whatever_the_default_device() -> None:
    batch = {"tokens": torch.ones(2, 3), "labels": torch.ones(2, 3), "dataset_id": torch.ones(2)}
    with torch.device("meta"):
        found = apply_to_batch(doubled, batch, [0, 1])
    assert found["first"].tolist() == [1, 1]


def test_a_padded_step_goes_through_it(config: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {
        "micro_batch_size": 4,
        "data_parallel_rank": 1,
        "data_parallel_size": 2,
        "consumed_samples": 96,
    }
    dataset = megablend.open(config)
    (batch,) = list(megablend.Loader(dataset, transform=doubled, drop_last=False, **sizes))
    assert batch["twice"].shape == (1, 8)
    with torch.device("meta"):  # a trainer may have set a default device; batches are on the CPU
        (same,) = list(megablend.Loader(dataset, transform=doubled, drop_last=False, **sizes))
    assert torch.equal(same["first"], batch["first"])
    failing = partial(picky, bad=int(dataset[0]["tokens"][0]))
    with pytest.raises(
        TransformError, match="transform failed on the sample that pads a short step: ZeroDivision"
    ):
        list(megablend.Loader(dataset, transform=failing, drop_last=False, **sizes))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_goes_on_in_the_middle(config: dict[str, Any]) -> None:
    loader = megablend.Loader(megablend.open(config), micro_batch_size=4, transform=doubled)
    batches = iter(loader)
    expected = [
        batch["first"]
        for batch in megablend.Loader(megablend.open(config), micro_batch_size=4, transform=doubled)
    ]
    next(batches)
    child = os.fork()
    if child == 0:  # no assertion leaves it
        try:
            found = [batch["first"] for batch in batches]
            os._exit(0 if all(map(torch.equal, found, expected[1:])) and len(found) == 23 else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert [batch["first"].tolist() for batch in batches] == [
        first.tolist() for first in expected[1:]
    ]


def test_a_loader_closed_in_the_middle_goes_on_where_it_was(
    config: dict[str, Any], threads: LoaderThreads
) -> None:
    loader = megablend.Loader(megablend.open(config), micro_batch_size=4, transform=doubled)
    batches = iter(loader)
    found = [next(batches)["first"].tolist() for _ in range(3)]
    loader.close()
    threads.await_end()
    found += [batch["first"].tolist() for batch in batches]
    again = megablend.Loader(megablend.open(config, transform=doubled), micro_batch_size=4)
    assert found == [batch["first"].tolist() for batch in again]


def test_what_cannot_be_called_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError,
        match="transform: found 'lower', expected a function that takes and returns a sample",
    ):
        megablend.open(config, transform="lower")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="transform: found 3, expected a function"):
        megablend.Loader(megablend.open(config), micro_batch_size=1, transform=3)  # type: ignore[arg-type]
