"""What a loader, a sampler and `open` are given: taken, or refused by name, with what to give instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import megablend
from megablend.errors import ConfigError
from tests.runs import documents, make_config, write_source

PLAN = "the run's plan decides which samples come"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run that all tests of the module share, and none changes."""
    folder = tmp_path_factory.mktemp("options")
    source = write_source(folder, 0, "arrow", documents(0, 60, 30, seed=4)) | {"weight": 1}
    config = make_config(folder, [source], samples=40)
    megablend.build(config)
    return config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"batch_size": 4},
            "batch_size: found 4, but a Loader does not take this option: pass micro_batch_size=",
        ),
        (
            {"shuffle": True},
            "shuffle: found True, but a Loader does not take this option: the config's `order`",
        ),
        (
            {"shuffle": False},
            "shuffle: found False, but a Loader does not take this option: the config's `order`",
        ),
        (
            {"sampler": [1]},
            rf"sampler: found \[1\], but a Loader does not take this option: {PLAN}",
        ),
        (
            {"batch_sampler": [[1]]},
            rf"batch_sampler: found \[\[1\]\], but a Loader does not take this option: {PLAN}",
        ),
        ({"num_worker": 2}, "num_worker: found 2: did you mean 'num_workers'?"),
        ({"micro_batch": 2}, "micro_batch: found 2: did you mean 'micro_batch_size'?"),
        ({"qqq": 2}, "qqq: found 2: torch.utils.data.DataLoader has no such option"),
        ({"num_workers": "2"}, "found num_workers '2', expected a whole number, 0 or more"),
        ({"num_workers": -1}, "found num_workers -1, expected a whole number, 0 or more"),
        (
            {"num_workers": 1, "prefetch_factor": 0},
            "found prefetch_factor 0, expected a whole number, 1 or more",
        ),
        (
            {"collate_fn": 3},
            "collate_fn: found 3, expected a function that takes a list of samples",
        ),
        ({"in_order": False, "num_workers": 1}, "in_order: found False, expected True"),
        (
            {"micro_batch_size": "4"},
            "found micro_batch_size '4', expected a whole number, 1 or more",
        ),
        ({"micro_batch_size": 0}, "found micro_batch_size 0, expected a whole number, 1 or more"),
        ({"micro_batch_size": -4}, "found micro_batch_size -4, expected a whole number, 1 or more"),
        ({"micro_batch_size": True}, "found micro_batch_size True, expected a whole number"),
        ({"micro_batch_size": 4.0}, r"found micro_batch_size 4\.0, expected a whole number"),
        (
            {"data_parallel_size": 0},
            "found data_parallel_size 0, expected a whole number, 1 or more",
        ),
        ({"data_parallel_rank": "0"}, "found data_parallel_rank '0', expected a whole number"),
        (
            {"data_parallel_rank": 1},
            "found data_parallel_rank 1, expected 0: data_parallel_size is 1",
        ),
        (
            {"data_parallel_rank": -1, "data_parallel_size": 4},
            "found data_parallel_rank -1, expected 0 to 3",
        ),
        ({"consumed_samples": "x"}, "found consumed_samples 'x', expected a whole number"),
        ({"consumed_samples": True}, "found consumed_samples True, expected a whole number"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_by_name(
    config: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        megablend.Loader(megablend.open(config), **({"micro_batch_size": 4} | options))


@pytest.mark.parametrize("more", [{}, {"num_workers": 1}, {"collate_fn": list}], ids=str)
def test_nothing_is_pinned_without_a_device(
    config: dict[str, Any], more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(
        ConfigError,
        match="pin_memory: found True, but torch finds no CUDA device; remove the option",
    ):
        megablend.Loader(megablend.open(config), micro_batch_size=4, pin_memory=True, **more)


def test_numbers_of_other_libraries_are_numbers(config: dict[str, Any]) -> None:
    sizes = {
        "micro_batch_size": np.int64(4),
        "data_parallel_size": torch.tensor(2),
        "consumed_samples": np.uint8(8),
    }
    loader = megablend.Loader(
        megablend.open(config), data_parallel_rank=np.int32(1), collate_fn=None, **sizes
    )
    expected = megablend.Loader(
        megablend.open(config, consumed_samples=8),
        micro_batch_size=4,
        data_parallel_rank=1,
        data_parallel_size=2,
    )
    assert type(loader.state_dict()["consumed_samples"]) is int
    pairs = list(zip(loader, expected, strict=True))
    assert len(pairs) == 4
    assert all(torch.equal(a["tokens"], b["tokens"]) for a, b in pairs)


@pytest.mark.parametrize("make", [megablend.Loader, megablend.PretrainingSampler])
@pytest.mark.parametrize("given", ["config.yaml", torch.utils.data.TensorDataset(torch.zeros(3))])
def test_datasets_of_others_are_refused(make: Callable[..., Any], given: Any) -> None:
    with pytest.raises(
        ConfigError,
        match=r"found (str|TensorDataset), expected a dataset returned by megablend\.open",
    ):
        make(given, micro_batch_size=4)
    with pytest.raises(
        ConfigError,
        match=r"found (str|TensorDataset), expected a dataset returned by megablend\.open",
    ):
        megablend.Loader(given, micro_batch_size=4, transform=dict)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": 3}, "found split 3, expected one of train, valid, test"),
        ({"consumed_samples": "x"}, "found consumed_samples 'x', expected a whole number"),
        ({"consumed_samples": 3.5}, r"found consumed_samples 3\.5, expected a whole number"),
        (
            {"state": []},
            r"not a megablend state: found '\[\]', expected a dict returned by state_dict\(\)",
        ),
        ({"cache": ""}, "found '', expected a path"),
        (
            {"transform": 3},
            "transform: found 3, expected a function that takes and returns a sample",
        ),
    ],
    ids=str,
)
def test_open_refuses_what_it_cannot_use(
    config: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, megablend.StateError), match=message):
        megablend.open(config, **arguments)


@pytest.mark.parametrize("given", [3, None, [], b"config.yaml"], ids=str)
def test_a_config_is_a_path_or_a_dict(given: Any) -> None:
    for function in (megablend.open, megablend.build, megablend.describe):
        with pytest.raises(
            ConfigError,
            match=(
                r"found (int|NoneType|list|bytes), expected a config: the path of a YAML or|found no config, "
                r"expected the path of a YAML or"
            ),
        ):
            function(given)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"micro_batch_size": "3"},
            "found micro_batch_size '3', expected a whole number, 1 or more",
        ),
        ({"micro_batch_size": 0}, "found micro_batch_size 0, expected a whole number, 1 or more"),
        (
            {"data_parallel_size": 0},
            "found data_parallel_size 0, expected a whole number, 1 or more",
        ),
        ({"num_workers": -1}, "found num_workers -1, expected a whole number, 0 or more"),
    ],
    ids=str,
)
def test_describe_refuses_loaders_that_cannot_be(
    config: dict[str, Any], sizes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        megablend.describe(config, **sizes)
