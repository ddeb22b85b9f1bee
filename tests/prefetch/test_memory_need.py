"""What `memory` must be is said when a loader opens, and is what its steps demand when they are read."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import megablend
from megablend.inspect.description import RunDescription
from megablend.prefetch.memory_budget import batches_of, plan_budget
from megablend.prefetch.memory_need import FIRST_SAMPLES, check_memory
from megablend.prefetch.read_schedule import StepSequence
from megablend.prefetch.windows import make_schedules
from megablend.reader.dataset import Dataset
from megablend.run.run import Run
from megablend.run.skips import Skips


def write_pages(
    folder: Path, name: str, page_tokens: list[int], dtype: str, *, dictionary: bool
) -> dict[str, Any]:
    """A source of one file per entry of `page_tokens`, each a single page of so many tokens."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(len(page_tokens))
    for i, count in enumerate(page_tokens):
        values = pa.array(rng.integers(0, 200, count).astype(dtype))
        offsets = pa.array(np.array([0, count // 2, count], np.int32))
        table = pa.table({"tokens": pa.ListArray.from_arrays(offsets, values)})
        pq.write_table(
            table,
            folder / f"{name}{i}.parquet",
            use_dictionary=dictionary,
            data_page_size=1 << 30,
            compression="zstd" if i % 2 else None,
        )
    return {"name": name, "path": f"{folder}/{name}*.parquet", "weight": 1}


def make(folder: Path, seed: int) -> dict[str, Any]:
    """A config of few sources, some of few large pages."""
    rng = random.Random(seed)
    has_split = rng.random() < 0.4
    sources = []
    for number in range(rng.choice([1, 2, 3])):
        largest = rng.choice([400, 4000] if has_split else [40, 400, 4000])
        pages = [rng.randrange(largest // 4, largest + 1) for _ in range(rng.choice([1, 2, 5, 9]))]
        dtype = rng.choice(["uint16", "int32", "int64"])
        name = f"s{number}"
        source = write_pages(folder, name, pages, dtype, dictionary=rng.random() < 0.3)
        sources.append(source | {"weight": rng.choice([1, 2, 5])})
    config = {
        "cache": str(folder / "cache"),
        "sequence_length": rng.choice([7, 16]),
        "samples": 96,
        "sources": sources,
        "order": rng.choice(["block", "sequential", "document"]),
        "lanes": rng.choice([1, 4]),
        "shuffle_window": rng.choice([1, 4]),
        "seed": seed,
        "inter_document_masking": rng.random() < 0.3,
    }
    if has_split:
        config["split"] = [6, 2, 2]
    return config


def with_memory(run: Run, memory: int) -> Run:
    """The run itself, with another `memory`."""
    run.runtime = replace(run.runtime, memory=memory)
    return run


def demanded(run: Run, sizes: dict[str, int], micro_batch_size: int, high: int) -> int:
    """The least `memory` below `high`, found by trying, with which all steps of a run can be divided into windows."""
    memory = run.runtime.memory
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        with_memory(run, middle)
        steps = StepSequence(
            first=0,
            micro_batch_size=micro_batch_size,
            stride=micro_batch_size,
            stop=run.num_samples,
        )
        try:
            budget = plan_budget(run, micro_batch_size=micro_batch_size, **sizes)
            for _ in make_schedules(run, steps, budget):
                pass
            high = middle
        except megablend.ConfigError:
            low = middle
    with_memory(run, memory)
    return high


def asked(error: megablend.ConfigError) -> int:
    """The figure that a message names, in bytes."""
    found = re.search(r"expected ([\d.]+) ([KMG])iB or more", str(error))
    assert found is not None, error
    return int(float(found[1]) * 1024 ** (1 + "KMG".index(found[2])))


@pytest.mark.parametrize("seed", range(30))
def test_what_a_loader_asks_for_when_it_opens_is_what_reading_demands(
    tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed + 1000)
    config = make(tmp_path, seed)
    megablend.build(config)
    micro_batch_size = rng.choice([1, 3, 8])
    ranks = rng.choice([1, 2])
    num_workers = rng.choice([0, 2])
    loader: dict[str, Any] = {
        "micro_batch_size": micro_batch_size,
        "data_parallel_size": ranks,
        "data_parallel_rank": 0,
        "num_workers": num_workers,
    }
    stride = micro_batch_size * ranks * max(1, num_workers)
    sizes = {"num_batches": batches_of(num_workers)}
    for split in ("train", "valid") if "split" in config else ("train",):
        run = megablend.open(config, split=split).run
        if run.num_samples < micro_batch_size * ranks:
            continue
        with pytest.raises(megablend.ConfigError) as refused:
            megablend.Loader(Dataset(with_memory(run, 1)), **loader)
        figure = asked(refused.value)
        least = demanded(run, sizes, micro_batch_size, 2 * figure)
        if " lanes: " not in str(refused.value):
            assert least <= figure <= least * 1.1 + 103  # rounded up to a tenth
        else:
            assert least <= figure
        with_memory(run, figure)
        check_memory(run, Skips(), micro_batch_size=micro_batch_size, stride=stride, **sizes)
        with_memory(run, int(figure * 0.9) - 103)
        with pytest.raises(megablend.ConfigError, match="memory: found"):
            check_memory(run, Skips(), micro_batch_size=micro_batch_size, stride=stride, **sizes)
        if num_workers == 0:
            with_memory(run, figure)
            batches = list(megablend.Loader(Dataset(run), **loader))
            assert len(batches) == run.num_samples // (micro_batch_size * ranks)


def test_a_large_page_at_the_end_of_a_long_run_is_found(tmp_path: Path) -> None:
    """More samples precede it than are examined at first, and memory is plentiful for these."""
    pages = [100_000] * 9 + [4_000_000]
    config = {
        "cache": str(tmp_path / "cache"),
        "sequence_length": 256,
        "epochs": 1,
        "order": "sequential",
        "lanes": 1,
        "shuffle_window": 1,
        "sources": [write_pages(tmp_path, "a", pages, "uint16", dictionary=False)],
    }
    megablend.build(config)
    dataset = megablend.open(config | {"memory": "6MiB"})
    assert len(dataset) > 4 * FIRST_SAMPLES
    with pytest.raises(megablend.ConfigError, match="blocks of a step of 4 samples"):
        megablend.Loader(dataset, micro_batch_size=4)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_two_files_of_large_pages(tmp_path: Path, num_workers: int) -> None:
    """Reading a page takes more than the part for reads, and there is room for it beside two pages."""
    sources = [
        write_pages(tmp_path, name, [300_000], "uint16", dictionary=False) for name in ("a", "b")
    ]
    config = {
        "cache": str(tmp_path / "cache"),
        "sequence_length": 256,
        "samples": 400,
        "lanes": 1,
        "sources": sources,
    }
    megablend.build(config)
    sizes: dict[str, Any] = {"micro_batch_size": 4, "num_workers": num_workers}
    with pytest.raises(megablend.ConfigError, match="blocks of a step of 4 samples") as refused:
        megablend.Loader(megablend.open(config | {"memory": "1MiB"}), **sizes)
    figure = asked(refused.value)
    assert len(list(megablend.Loader(megablend.open(config | {"memory": figure}), **sizes))) == 100
    with pytest.raises(megablend.ConfigError, match="blocks of a step of 4 samples"):
        megablend.Loader(megablend.open(config | {"memory": figure - 105_000}), **sizes)
    described = megablend.describe(config, micro_batch_size=4, num_workers=num_workers)
    assert isinstance(described, RunDescription)
    assert described.memory_per_rank is not None
    assert figure - 105_000 < described.memory_per_rank / max(1, num_workers) <= figure
    with pytest.raises(megablend.ConfigError, match="blocks of a step of 4 samples"):
        megablend.describe(config | {"memory": "1MiB"}, micro_batch_size=4, num_workers=num_workers)
