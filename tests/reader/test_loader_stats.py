"""What a Loader reports of itself, against the batches that it gave."""

from __future__ import annotations

import errno
import json
import resource
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import megablend
from megablend.errors import CacheError, ConfigError, ResourceError
from megablend.reader.batch_dataset import BatchDataset
from megablend.reader.loader_stats import CountedSteps, append_stats, write_prometheus
from megablend.storage.by_scheme import make_storage
from tests.inspect.test_find import make_run
from tests.storages import CountingStorage

KINDS_OF_READING = {"requests", "bytes", "blocks", "reading_seconds", "decoding_seconds"}
"""Without faults, and without a mirror."""


def keep_twice(sample: dict[str, Any]) -> dict[str, Any]:
    return {"dataset_id": sample["dataset_id"]}


def loaders_of(config: dict[str, Any], **options: Any) -> list[megablend.Loader]:
    return [
        megablend.Loader(
            megablend.open(config),
            micro_batch_size=2,
            data_parallel_rank=rank,
            data_parallel_size=2,
            **options,
        )
        for rank in range(2)
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 2},
        {"transform": keep_twice},
        {"transform": keep_twice, "num_workers": 1},
    ],
)
def test_sources_and_reading_are_counted(tmp_path: Path, options: dict[str, Any]) -> None:
    # Two loaders of one process: the second's workers are forked while the first one's background check would run.
    config, _ = make_run(tmp_path, eod=False, split=None, file_checks_per_second=0)
    loaders = loaders_of(config, **options)
    seen = Counter[int]()
    assert loaders[0].stats()["sources"][0]["share"] == 0.0
    for step, batches in enumerate(zip(*loaders, strict=True), 1):
        for batch in batches:
            assert isinstance(batch, dict)
            seen.update(batch["dataset_id"].tolist())
        if step == 30:
            break
    for rank, loader in enumerate(loaders):
        stats = loader.stats()
        assert (stats["rank"], stats["batches"], stats["consumed_samples"]) == (rank, 30, 120)
        assert [source["samples"] for source in stats["sources"]] == [seen[i] for i in range(3)]
        for i, source in enumerate(stats["sources"]):
            assert (source["name"], source["dataset_id"]) == (f"s{i}", i)
            assert source["tokens"] == seen[i] * 8
            assert source["epochs"] == seen[i] * 8 / loader.dataset.run.data.tokens[i]
            assert source["share"] == seen[i] / 120
            assert source["planned_share"] == pytest.approx((4 - i) / 9, abs=0.005)
        assert {name for name, value in stats["reads"].items() if value > 0} == KINDS_OF_READING
        assert stats["waiting_seconds"] > 0
        assert json.loads(json.dumps(stats)) == stats
        loader.close()


def test_bytes_are_those_of_the_blocks(tmp_path: Path) -> None:
    """One rank reads a source without shuffling, so each block once; a pair's .idx is asked for its documents, too."""
    config, _ = make_run(tmp_path, eod=False, split=None)
    alone = config | {
        "run": "alone",
        "sources": [config["sources"][1] | {"weight": 1}],
        "order": "sequential",
    }
    megablend.build(alone | {"samples": 40})
    storage = CountingStorage(make_storage())
    dataset = megablend.open(alone | {"samples": 40}, storage=storage)
    blocks = dataset.run.store.snapshot.blocks(
        sorted({int(b) for k in range(40) for b in dataset.sample(k).spans.blocks})
    )
    loader = megablend.Loader(dataset, micro_batch_size=40)
    storage.bytes = 0
    for _ in loader:
        pass
    reads = loader.stats()["reads"]
    assert reads["blocks"] == len(blocks)
    assert int(blocks["stored_bytes"].sum()) <= reads["bytes"] <= storage.bytes


def test_a_worker_shares_the_memory_of_its_batches_itself(tmp_path: Path) -> None:
    config, _ = make_run(tmp_path)
    dataset = megablend.open(config)
    steps = BatchDataset(dataset, micro_batch_size=2, step_samples=2, num_batches=1)
    batch = CountedSteps(steps, None)[[0, 1]].batch
    assert [value.is_shared() for value in batch.values()] == [True] * len(batch)
    steps.close()


def limit_files(_: int) -> None:
    """Leave a worker no room for shared memory."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def stacked(samples: list[dict[str, Any]]) -> torch.Tensor:
    return torch.stack([sample["tokens"] for sample in samples])


@pytest.mark.parametrize("collate_fn", [None, stacked])
def test_a_batch_for_which_shared_memory_has_no_room_is_an_error(
    tmp_path: Path, collate_fn: Any
) -> None:
    config, _ = make_run(tmp_path)
    options = {} if collate_fn is None else {"collate_fn": collate_fn}
    loader = megablend.Loader(
        megablend.open(config),
        micro_batch_size=2,
        data_parallel_rank=0,
        data_parallel_size=1,
        num_workers=1,
        worker_init_fn=limit_files,
        timeout=60,
        **options,
    )
    with pytest.raises(ResourceError, match="/dev/shm has no room for a worker's batch"):
        next(iter(loader))
    loader.close()


@pytest.mark.parametrize("collate_fn", [None, stacked])
def test_workers_whose_locks_have_no_room_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, collate_fn: Any
) -> None:
    def fail(_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    config, _ = make_run(tmp_path)
    options = {} if collate_fn is None else {"collate_fn": collate_fn}
    loader = megablend.Loader(megablend.open(config), micro_batch_size=2, num_workers=1, **options)
    monkeypatch.setattr(torch.utils.data.DataLoader, "__iter__", fail)
    with pytest.raises(
        ResourceError, match=r"^the Loader's workers, whose locks are in /dev/shm: No"
    ):
        next(iter(loader))
    loader.close()


def test_without_reading_ahead_only_samples_are_counted(tmp_path: Path) -> None:
    config, _ = make_run(tmp_path)
    loader = megablend.Loader(
        megablend.open(config), micro_batch_size=4, collate_fn=torch.utils.data.default_collate
    )
    next(iter(loader))
    assert (loader.stats()["reads"], loader.stats()["batches"]) == (None, 1)


def test_a_restart_continues_the_counts_of_sources(tmp_path: Path) -> None:
    config, _ = make_run(tmp_path)
    loader = megablend.Loader(megablend.open(config), micro_batch_size=4)
    batches = iter(loader)
    for _ in range(7):
        next(batches)
    state = loader.state_dict()
    before = loader.stats()
    resumed = megablend.Loader(megablend.open(config, state=state), micro_batch_size=5)
    assert resumed.stats()["sources"] == before["sources"]
    assert resumed.stats()["batches"] == 0


def test_lines_and_prometheus_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = make_run(tmp_path)
    loader = megablend.Loader(megablend.open(config), micro_batch_size=4)
    next(iter(loader))
    stats = loader.stats()
    for _ in range(2):
        append_stats(stats, tmp_path / "stats.jsonl")
    assert [json.loads(line) for line in (tmp_path / "stats.jsonl").read_text().splitlines()] == [
        stats,
        stats,
    ]
    parser = pytest.importorskip("prometheus_client.parser")
    write_prometheus(stats, tmp_path / "megablend.prom")
    text = (tmp_path / "megablend.prom").read_text()
    found = {
        (sample.name, sample.labels.get("source")): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["megablend_consumed_samples", None] == 4
    assert found["megablend_read_bytes", None] == stats["reads"]["bytes"]
    for source in stats["sources"]:
        assert found["megablend_source_tokens", source["name"]] == source["tokens"]
    with pytest.raises(
        CacheError, match=r"cannot write the statistics \(Is a directory\); specify the "
    ):
        write_prometheus(stats, tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"pip install 'megablend\[prometheus\]'"):
        write_prometheus(stats, tmp_path / "megablend.prom")


def test_skipped_samples_are_not_counted(tmp_path: Path) -> None:
    config, _ = make_run(tmp_path, eod=False, split=None, file_checks_per_second=0)
    megablend.skip(config, 8, 24, batch_size=4)
    megablend.skip(config, 60, 68, batch_size=4)
    loader = megablend.Loader(megablend.open(config), micro_batch_size=4)
    seen = Counter[int]()
    for step, batch in enumerate(loader, 1):
        seen.update(batch["dataset_id"].tolist())
        if step == 11:
            break
    stats = loader.stats()
    assert stats["consumed_samples"] == 60
    assert sum(seen.values()) == 44
    for _ in range(2):
        assert [source["samples"] for source in stats["sources"]] == [seen[i] for i in range(3)]
        assert [source["tokens"] for source in stats["sources"]] == [seen[i] * 8 for i in range(3)]
        assert [source["share"] for source in stats["sources"]] == [seen[i] / 44 for i in range(3)]
        loader.load_state_dict(loader.dataset.state_dict(68))
        stats = loader.stats()
    loader.close()
