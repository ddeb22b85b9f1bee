"""The race of loaders: what it measures with, each loader that is installed, and the whole of it on a few tokens."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import peers
import peers_data
import processes
import pytest
import residency
import torch
from contenders import BATCH, CONTENDERS, LENGTH
from documents import make_documents, write_parquet
from measuring import ContenderError, Limits, measure, next_message
from peers_table import contenders_table, plot, variants_table

ROOT = Path(__file__).parent.parent.parent
NUM_TOKENS = 300_000


def installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the data for each loader that is installed."""
    folder = tmp_path_factory.mktemp("peers")
    peers_data.make_base(folder, NUM_TOKENS)
    for contender in CONTENDERS.values():
        if installed(contender.package):
            peers_data.make(folder, contender.data, *peers_data.MAIN, sys.executable)
    return folder


def test_documents_are_as_many_tokens_as_asked_for(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    tokens, offsets = make_documents(50_000, seed=1)
    assert (len(tokens), offsets[0], offsets[-1]) == (50_000, 0, 50_000)
    assert (np.diff(offsets) > 0).all()
    write_parquet(tmp_path / "x.parquet", tokens, offsets, page_bytes=8 << 10, codec="dictionary")
    column = pq.read_table(tmp_path / "x.parquet")["tokens"].combine_chunks()
    assert (column.values.to_numpy() == tokens).all()
    assert (column.offsets.to_numpy() == offsets).all()


@pytest.fixture
def folder_on_disk() -> Iterator[Path]:
    """Those of pytest may be in memory."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_files_are_brought_into_memory_and_dropped(folder_on_disk: Path) -> None:
    paths = [folder_on_disk / "empty", folder_on_disk / "full"]
    for path, size in zip(paths, (0, 4 << 20), strict=True):
        path.write_bytes(os.urandom(size))
    residency.load(paths)
    assert residency.resident(paths) == 1
    residency.drop(paths)
    kind = subprocess.run(
        ["stat", "-f", "-c", "%T", folder_on_disk], capture_output=True, text=True, check=True
    ).stdout
    if kind.strip() not in ("tmpfs", "ramfs"):  # which are memory
        assert residency.resident(paths) == 0
    assert residency.resident(paths[:1]) == 0


def test_a_tree_of_processes_is_counted_and_ended_also_where_it_left_its_parent() -> None:
    burn = "import time\nb = bytearray(50 << 20)\nend = time.process_time() + .3\nwhile time.process_time() < end: pass\n"
    grandchild = f"[sys.executable, '-c', {burn + 'time.sleep(60)'!r}]"
    code = f"import subprocess, sys\nsubprocess.Popen({grandchild}, start_new_session=True)\n"
    mark = f"test-{os.getpid()}"
    subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, processes.MARK: mark},
        check=True,
        timeout=500,
    )
    try:
        deadline = time.monotonic() + 500
        while (processes.usage(mark).cpu_seconds < 0.3) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(processes.marked(mark)) == 1
        assert processes.usage(mark).cpu_seconds >= 0.3
        held = processes.memory(mark)
        assert 50 << 20 <= held.own <= held.pss < 500 << 20
    finally:
        processes.end(mark)
    while processes.marked(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes.marked(mark)


@pytest.mark.parametrize("name", CONTENDERS)
def test_each_installed_loader_gives_the_tokens(folder: Path, name: str) -> None:
    contender = CONTENDERS[name]
    if not installed(contender.package):
        pytest.skip(f"{contender.package} is not installed")
    data = folder / peers_data.variant(contender.data, *peers_data.MAIN)
    if (data / f"{peers.order_of(contender, name)}.missing").exists():
        pytest.skip("this version lacks the order")
    batches = list(contender.ready(data)())
    assert all(batch.shape == (BATCH, LENGTH) for batch in batches)
    found = torch.cat(batches).flatten().numpy()
    tokens = np.load(folder / "tokens.npy")
    assert len(found) > 0.8 * NUM_TOKENS
    if name.startswith("pyarrow"):
        assert (found == tokens[: len(found)]).all()
    elif name == "megablend, sequential":  # the plan mixes the samples of a cycle
        samples = {
            row.tobytes()
            for row in tokens[: len(tokens) // LENGTH * LENGTH].astype(np.int64).reshape(-1, LENGTH)
        }
        assert {row.tobytes() for row in found.reshape(-1, LENGTH)} <= samples
    else:
        assert (found[: LENGTH * BATCH] != tokens[: LENGTH * BATCH]).any()
        share = [np.bincount(values, minlength=50_001) / len(values) for values in (found, tokens)]
        assert np.abs(share[0] - share[1]).sum() < 0.35, (
            "the same tokens, but for the last batch and for the blend's weights"
        )


def test_what_is_measured_is_there_and_consistent(folder: Path) -> None:
    name = "megablend, page order, 1 source"
    limits = Limits(seconds=20, first=60, tokens=NUM_TOKENS)
    found = measure(name, folder / "parquet-1-64KB-zstd", "page", "warm", sys.executable, limits)
    assert found["resident"] >= 0.99
    assert found["tokens"] == (NUM_TOKENS // LENGTH // BATCH - 1) * LENGTH * BATCH
    assert found["tokens_per_s"] == pytest.approx(found["tokens"] / found["seconds"])
    assert found["pss_bytes"] >= found["own_bytes"] > 50 << 20
    parquet = (folder / "parquet-1-64KB-zstd" / "00000.parquet").stat().st_size
    assert 0 < found["disk_bytes"] < parquet
    assert 0 < found["p50_ms"] <= found["p99_ms"]


def test_messages_that_come_together_are_taken_one_by_one() -> None:
    here, there = os.pipe()
    os.write(there, b'{"step": "first", "seconds": 1}\n{"step": "done"}\n')
    with os.fdopen(here, "rb", buffering=0) as pipe:
        assert next_message(pipe, "first", 1) == {"step": "first", "seconds": 1}
        assert next_message(pipe, "done", 1) == {"step": "done"}
        with pytest.raises(ContenderError, match=r"not done after 0 s"):
            next_message(pipe, "done", 0)
        os.close(there)
        with pytest.raises(ContenderError, match=r"ended before it was done"):
            next_message(pipe, "done", 1)


def test_a_loader_that_ends_or_hangs_is_named(folder: Path, tmp_path: Path) -> None:
    limits = Limits(seconds=1, first=0.0, tokens=NUM_TOKENS)
    (tmp_path / "page.json").write_text("{}")
    with pytest.raises(ContenderError, match=r"not first after 0 s"):
        measure("megablend, sequential", tmp_path, "sequential", "warm", sys.executable, limits)
    limits = Limits(seconds=1, first=60, tokens=NUM_TOKENS)
    with pytest.raises(ContenderError, match=r"ended before it was first: .*sequential.json"):
        measure("megablend, sequential", tmp_path, "sequential", "warm", sys.executable, limits)


def test_tables_have_medians_dashes_and_the_reasons_for_what_is_not_there(tmp_path: Path) -> None:
    keys = ["tokens_per_s", "cpu_s_per_1e9", "read_per_used", "p50_ms", "p99_ms", "first_s"]
    row: dict[str, Any] = dict.fromkeys(keys, 2e6) | {
        "pss_bytes": 3e6,
        "own_bytes": 1e6,
        "disk_bytes": 7e6,
    }
    row |= {"contender": "a", "page": "64KB", "codec": "zstd", "state": "warm"}
    rows = [
        row,
        {**row, "tokens_per_s": 4e6},
        {**row, "contender": "b", "failed": "x is not installed"},
    ]
    rows[2] = {key: value for key, value in rows[2].items() if key not in keys}
    lines = contenders_table(rows, ["a", "b"]).splitlines()
    assert lines[2].startswith("| a | 3.0 | - | 2,000,000.0 | - | - |")
    assert lines[2].endswith("| 3 (1) | 7 |")
    assert lines[3].startswith("| b | x is not installed |")
    assert len({line.count("|") for line in lines}) == 1
    lines = variants_table([row, {**row, "page": "8KB", "state": "cold"}], ["a"]).splitlines()
    assert lines[2:] == ["| 64KB, zstd | 2 / -; 2,000,000.0 |", "| 8KB, zstd | - / 2; - |"]
    assert (
        plot(rows, ["a", "b"], tmp_path / "x.png")
        == (tmp_path / "x.png").exists()
        == installed("matplotlib")
    )


@pytest.mark.slow
def test_the_whole_race_on_a_few_tokens(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "tools/bench/read/peers.py"),
        "--tokens",
        "100000",
        "--rounds",
        "1",
    ]
    command += [
        "--folder",
        str(tmp_path),
        "--pages",
        "64KB",
        "--codecs",
        "none",
        "zstd",
        "--states",
        "warm",
        "--seconds",
        "1",
    ]
    command += [
        "--contenders",
        "pyarrow",
        "1 source",
        "hugging",
        "--plot",
        str(tmp_path / "plot.png"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [(row["contender"].split(",")[0], row["codec"]) for row in rows] == [
        ("pyarrow", "none"),
        ("megablend", "none"),
        ("pyarrow", "zstd"),
        ("megablend", "zstd"),
        ("Hugging Face datasets", "zstd"),
        ("Hugging Face datasets", "zstd"),
    ]
    assert not any("failed" in row for row in rows[:4])
    if not installed("datasets"):
        assert done.stdout.count("| datasets is not installed |") == 2
    assert re.search(r"\| megablend, page order, 1 source \| [\d.,]+ \|", done.stdout)
    assert "| 64KB, none | " in done.stdout
