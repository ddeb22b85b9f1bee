"""pin_memory, as torch's DataLoader has it: every tensor of a batch is pinned, whichever way the batches come."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import megablend
from tests.runs import documents, make_config, write_source


@pytest.fixture
def dataset(tmp_path: Path) -> megablend.Dataset:
    source = write_source(tmp_path, 0, "parquet", documents(0, 60, 30, seed=4)) | {"weight": 1}
    config = make_config(tmp_path, [source], samples=40)
    megablend.build(config)
    return megablend.open(config)


@pytest.mark.parametrize("pinned", [False, True, None])
def test_in_the_process_itself(
    dataset: megablend.Dataset, pinned: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without CUDA nothing can be pinned: what would be is counted."""
    seen: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.clone())
        return seen[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options: dict[str, Any] = {} if pinned is None else {"pin_memory": pinned}
    batches = list(megablend.Loader(dataset, micro_batch_size=4, **options))
    expected = (
        [tensor for batch in batches for tensor in batch.values()] if pinned is not False else []
    )
    assert len(seen) == len(expected)
    assert all(a is b for a, b in zip(seen, expected, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_with_cuda(dataset: megablend.Dataset, num_workers: int) -> None:
    options: dict[str, Any] = {"num_workers": num_workers}
    if num_workers:
        options["multiprocessing_context"] = "spawn"
    plain = list(megablend.Loader(dataset, micro_batch_size=4, pin_memory=False))
    for pinned, batch in zip(
        megablend.Loader(dataset, micro_batch_size=4, **options), plain, strict=True
    ):
        for name, tensor in pinned.items():
            assert tensor.is_pinned()
            assert torch.equal(tensor.to("cuda", non_blocking=True).cpu(), batch[name])


class Pair(NamedTuple):
    tokens: torch.Tensor
    labels: torch.Tensor


def make_pair(sample: dict[str, Any]) -> Pair:
    return Pair(sample["tokens"], sample["labels"])


def test_named_tuples_stay_what_they_are(
    dataset: megablend.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for batch in megablend.Loader(
        dataset, micro_batch_size=4, transform=make_pair, pin_memory=True
    ):
        assert isinstance(batch, Pair)
        assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1])
