"""Memory is divided without a rest that nobody counts, and too little of it is refused with what would do."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import megablend
from megablend.index.blocks.block_sizes import SHARES
from megablend.prefetch.memory_budget import Budget, batches_of, plan_budget
from megablend.prefetch.memory_need import check_memory
from megablend.run.run import Run
from megablend.run.skips import Skips
from tests.runs import documents, make_config, write_source


def run_of(folder: Path, **settings: Any) -> Run:
    sources = [
        write_source(folder, d, "parquet", documents(d, 70, 40, seed=9)) | {"weight": weight}
        for d, weight in enumerate((5, 3, 2))
    ]
    config = make_config(folder, sources, **({"samples": 480} | settings))
    megablend.build(config)
    return megablend.open(config).run


def test_the_parts_are_the_whole(tmp_path: Path) -> None:
    run = run_of(tmp_path, memory=1_000_003)
    budget = plan_budget(run, micro_batch_size=3)
    assert {field.name for field in fields(Budget)} == {"batches", "orders", *SHARES}
    parts = [getattr(budget, field.name) for field in fields(Budget)]
    assert min(parts) > 0
    assert 1_000_003 - len(parts) <= sum(parts) <= 1_000_003
    assert budget.orders == sum(
        run.locator.readings(source)[-1].order.memory_bytes for source in range(3)
    )


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, {}),
        ({"create_attention_mask": True}, {}),
        ({"inter_document_masking": True}, {}),
        ({}, {"num_batches": 5}),
    ],
)
def test_batches_are_counted_as_they_are(
    tmp_path: Path, settings: dict[str, Any], sizes: dict[str, int]
) -> None:
    run = run_of(tmp_path, **settings)
    batch = next(iter(megablend.Loader(megablend.Dataset(run), micro_batch_size=4)))
    made = sum(tensor.nbytes for tensor in batch.values())
    counted = plan_budget(run, micro_batch_size=4, **sizes).batches
    assert 1 <= counted / made / sizes.get("num_batches", 2) <= 1.2


@pytest.mark.parametrize(
    "settings", [{"sequence_length": 10**15}, {"sequence_length": 8192, "memory": "255KiB"}]
)
def test_a_sample_larger_than_the_memory_is_refused_before_anything_is_read(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    config = make_config(
        tmp_path, [{"name": "a", "path": "none.arrow", "weight": 1}], samples=1, **settings
    )
    for function in (megablend.build, megablend.open, megablend.describe):
        with pytest.raises(
            megablend.ConfigError,
            match=r"memory: found .*, expected .* or more, the size of one sample of sequence_l",
        ):
            function(config)


def test_what_is_refused_says_how_much_would_do(tmp_path: Path) -> None:
    run = run_of(tmp_path, memory=2000, shuffle_window=64, sequence_length=20)
    with pytest.raises(
        megablend.ConfigError,
        match=(
            r"memory: found 2.0 KiB, expected [\d.]+ KiB or more \(blocks of 4 lanes: .* 2 batches of 4 samples: "
            r".*, block orders: .*\); raise `memory`, or lower `shuffle_window`"
        ),
    ) as refused:
        check_memory(run, Skips(), micro_batch_size=4, stride=4)
    asked = re.search(r"expected ([\d.]+) KiB", str(refused.value))
    assert asked is not None
    enough = run_of(
        tmp_path / "more",
        memory=int((float(asked[1]) + 0.1) * 1024),
        shuffle_window=64,
        sequence_length=20,
    )
    assert len(list(megablend.Loader(megablend.Dataset(enough), micro_batch_size=4))) == 120


def test_batches_of_a_loader_and_of_a_worker() -> None:
    assert [batches_of(0), batches_of(4), batches_of(4, 7)] == [2, 3, 8]


def test_a_dataset_keeps_less_beside_a_loader(tmp_path: Path) -> None:
    dataset = megablend.Dataset(run_of(tmp_path, memory=300_000))
    for k in range(0, 480, 7):
        dataset[k]
    alone = dataset.block_cache.max_bytes
    most = dataset.block_cache._bytes
    loader = megablend.Loader(dataset, micro_batch_size=4)
    next(iter(loader))
    assert dataset.block_cache.max_bytes < alone / 8
    assert dataset.block_cache._bytes <= dataset.block_cache.max_bytes < most
    loader.close()
    assert dataset.block_cache.max_bytes == alone
