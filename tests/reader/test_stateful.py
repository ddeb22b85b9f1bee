"""The state goes through the loaders and checkpoints that people use."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torchdata.stateful_dataloader import StatefulDataLoader

import megablend
from tests.runs import EOD, documents, make_config, write_source


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    source = write_source(tmp_path, 0, "parquet", documents(0, 80, 30, 2)) | {"append_eod": EOD}
    config = make_config(tmp_path, [source], samples=96)
    megablend.build(config)
    return config


def loader(config: dict[str, Any], **options: Any) -> megablend.Loader:
    return megablend.Loader(megablend.open(config), micro_batch_size=4, **options)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_state_counts_batches_handed_out_not_those_read_ahead(
    config: dict[str, Any], workers: int
) -> None:
    running = loader(config, num_workers=workers)
    batches = iter(running)
    seen = [next(batches)["tokens"] for _ in range(5)]
    assert running.state_dict()["consumed_samples"] == 20
    assert len(running) == 24
    resumed = loader(config)
    resumed.load_state_dict(json.loads(json.dumps(running.state_dict())))
    rest = [batch["tokens"] for batch in resumed]
    whole = torch.cat([batch["tokens"] for batch in loader(config)])
    assert torch.equal(torch.cat(seen + rest), whole)


def test_a_loop_that_breaks_off_goes_on_where_it_was(config: dict[str, Any]) -> None:
    running = loader(config)
    parts = [
        [batch["tokens"] for _, batch in zip(range(n), running, strict=False)] for n in (3, 2, 50)
    ]
    assert [len(part) for part in parts] == [3, 2, 19]
    with pytest.warns(RuntimeWarning, match="the run is read"):
        assert list(running) == []  # it does not begin again unasked


def test_validation_begins_again(tmp_path: Path, config: dict[str, Any]) -> None:
    split = config | {"split": "50,50,0", "run": "split"}
    megablend.build(split)
    valid = megablend.Loader(megablend.open(split, "valid"), micro_batch_size=2)
    passes = [torch.cat([batch["tokens"] for batch in valid]) for _ in range(2)]
    assert torch.equal(*passes)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_torchdatas_stateful_loader(config: dict[str, Any], workers: int) -> None:
    def stateful() -> StatefulDataLoader[dict[str, Any]]:
        dataset = megablend.open(config)
        sampler = megablend.PretrainingSampler(dataset, micro_batch_size=4)
        return StatefulDataLoader(dataset, batch_sampler=sampler, num_workers=workers)

    whole = torch.cat([batch["tokens"] for batch in loader(config)])
    first = stateful()
    batches = iter(first)
    seen = [next(batches)["tokens"] for _ in range(7)]
    state = first.state_dict()
    second = stateful()
    second.load_state_dict(state)
    rest = [batch["tokens"] for batch in second]
    assert torch.equal(torch.cat(seen + rest), whole)


@pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning"
)
def test_distributed_checkpoint(tmp_path: Path, config: dict[str, Any]) -> None:
    running = loader(config)
    next(iter(running))
    save({"loader": running}, checkpoint_id=tmp_path / "checkpoint")
    resumed = loader(config)
    load({"loader": resumed}, checkpoint_id=tmp_path / "checkpoint")
    assert resumed.state_dict() == running.state_dict()
    assert resumed.consumed_samples == 4


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_ranks_without_samples_in_a_last_short_step_pad(
    config: dict[str, Any], workers: int
) -> None:
    steps = [
        list(
            loader(
                config,
                data_parallel_rank=r,
                data_parallel_size=3,
                drop_last=False,
                consumed_samples=82,
                num_workers=workers,
            )
        )
        for r in range(3)
    ]
    assert [[len(batch["tokens"]) for batch in batches] for batches in steps] == [
        [4, 2],
        [4, 1],
        [4, 1],
    ]
    assert [batches[1]["loss_mask"].sum().item() for batches in steps] == [16, 0, 0]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_an_error_keeps_its_class_on_its_way_from_a_worker(
    tmp_path: Path, config: dict[str, Any], workers: int
) -> None:
    for path in (tmp_path / "source0").iterdir():
        path.unlink()
    with pytest.raises(FileNotFoundError, match=r"source0/.*parquet: no such file") as caught:
        list(loader(config, num_workers=workers))
    assert isinstance(caught.value, megablend.DataError)


def test_ranks_and_sizes_out_of_range(config: dict[str, Any]) -> None:
    dataset = megablend.open(config)
    with pytest.raises(megablend.ConfigError, match="found data_parallel_rank 2, expected 0 to 1"):
        megablend.PretrainingSampler(
            dataset, micro_batch_size=4, data_parallel_rank=2, data_parallel_size=2
        )
    with pytest.raises(
        megablend.ConfigError, match="found micro_batch_size 0, expected a whole number, 1 or more"
    ):
        megablend.PretrainingSampler(dataset, micro_batch_size=0)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("drop_last", [True, False])
def test_steps_are_megatrons(config: dict[str, Any], size: int, drop_last: bool) -> None:
    """Against Megatron's rule, spelled out: fill a step, take one's own part of it."""
    dataset = megablend.open(config)
    micro_batch = 5
    consumed = 7
    for rank in range(size):
        step = list[int]()
        expected = []
        for k in range(consumed, len(dataset)):
            step.append(k)
            if len(step) == micro_batch * size:
                expected.append(step[rank * micro_batch : (rank + 1) * micro_batch])
                step = []
        if step and not drop_last:
            expected.append(step[rank * micro_batch : (rank + 1) * micro_batch])
        sampler = megablend.PretrainingSampler(
            dataset,
            micro_batch_size=micro_batch,
            data_parallel_rank=rank,
            data_parallel_size=size,
            consumed_samples=consumed,
            drop_last=drop_last,
        )
        assert len(sampler) == len(expected)
        assert list(sampler) == expected
