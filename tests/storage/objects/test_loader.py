"""Workers of a Loader over an object store: started without a fork, they give the batches of local files."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import default_collate

import megablend
from megablend.errors import ConfigError
from megablend.storage.ranges import FetchedRanges
from tests.runs import documents, make_config, write_source
from tests.storage.faulty import Faults, FaultySource
from tests.storage.objects.test_http import list_files

pytestmark = pytest.mark.usefixtures("obstore")
SCRIPT = """
import megablend, json, sys
loader = megablend.Loader(megablend.open(json.loads(sys.argv[1])), micro_batch_size=2, num_workers=1)
for batch in loader:
    pass
"""
GUARD = "if __name__ == '__main__':"


@pytest.fixture
def remote(tmp_path: Path) -> Any:
    folder = tmp_path / "data"
    folder.mkdir()
    source = write_source(folder, 0, "megatron", documents(0, 60, 20, seed=1)) | {"weight": 1}
    plain = make_config(tmp_path, [source], samples=8, cache=str(tmp_path / "plain"))
    files = {
        f"d/{path.relative_to(folder)}": path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    with FaultySource(files) as server:
        path = [each.replace(str(folder), f"{server.url}/d") for each in list_files(source)]
        config = make_config(
            tmp_path, [source | {"path": path}], samples=8, cache=str(tmp_path / "remote")
        )
        megablend.build(plain)
        megablend.build(config)
        yield plain, config


def test_workers_are_not_forked_and_give_the_same_batches(remote: Any) -> None:
    plain, config = remote
    expected = [
        batch["tokens"] for batch in megablend.Loader(megablend.open(plain), micro_batch_size=2)
    ]
    loader = megablend.Loader(megablend.open(config), micro_batch_size=2, num_workers=2)
    found = [batch["tokens"] for batch in loader]
    assert len(found) == len(expected) == 4
    assert all(a.equal(b) for a, b in zip(expected, found, strict=True))
    with pytest.raises(
        ConfigError, match="multiprocessing_context: found 'fork', expected 'forkserver' or 'spawn'"
    ):
        megablend.Loader(
            megablend.open(config),
            micro_batch_size=2,
            num_workers=1,
            multiprocessing_context="fork",
        )


def test_functions_that_workers_cannot_import_are_named(remote: Any) -> None:
    _, config = remote
    dataset = megablend.open(config)
    sizes: Any = {"micro_batch_size": 2, "num_workers": 1}
    with pytest.raises(ConfigError, match=r"^transform: found \S*<lambda>, expected a function at"):
        megablend.Loader(dataset, transform=lambda sample: sample, **sizes)
    with pytest.raises(ConfigError, match=r"^collate_fn: found \S*<lambda>, expected a function"):
        megablend.Loader(dataset, collate_fn=lambda samples: samples, **sizes)
    with pytest.raises(ConfigError, match=r"^collate_fn: found \S*<lambda>, expected a function"):
        megablend.Loader(dataset, collate_fn=partial(lambda samples: samples), **sizes)
    megablend.Loader(dataset, transform=lambda sample: sample, micro_batch_size=2)
    megablend.Loader(dataset, transform=dict, **sizes)
    megablend.Loader(dataset, collate_fn=default_collate, **sizes)


def run_script(folder: Path, text: str, config: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(text)
    root = Path(megablend.__file__).parent.parent
    return subprocess.run(
        [sys.executable, script, json.dumps(config)],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, "PYTHONPATH": ":".join([str(root), *sys.path])},
    )


def test_a_script_without_a_main_guard_is_told_so(remote: Any, tmp_path: Path) -> None:
    done = run_script(tmp_path, SCRIPT, remote[1])
    assert done.returncode != 0
    assert f"put the script's code under `{GUARD}`" in done.stderr


@pytest.mark.slow
def test_a_script_with_the_remedy_of_its_message(remote: Any, tmp_path: Path) -> None:
    done = run_script(tmp_path, f"{GUARD}\n{textwrap.indent(SCRIPT, '    ')}", remote[1])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "is_opened", [False, True], ids=["before files are opened", "while blocks are read"]
)
@pytest.mark.parametrize("how", ["collected", "closed"])
def test_requests_to_a_source_that_is_down_end_with_the_loader(
    how: str, is_opened: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    # Between two attempts
    monkeypatch.setattr("megablend.storage.objects.retry_policy._MAX_SECONDS", 0.2)
    source = write_source(tmp_path / "data", 0, "parquet", documents(0, 60, 20, seed=1)) | {
        "weight": 1
    }
    files = {
        f"b/{path.name}": path.read_bytes()
        for path in (tmp_path / "data").rglob("*")
        if path.is_file()
    }
    with FaultySource(files) as server:
        settings: dict[str, Any] = {"samples": 8, "file_checks_per_second": 0}
        settings["storage"] = {"s3://": {"endpoint": server.url}}
        config = make_config(
            tmp_path, [source | {"path": [f"s3://{name}" for name in files]}], **settings
        )
        megablend.build(config)
        loader = megablend.Loader(megablend.open(config), micro_batch_size=2)
        assert loader._steps is not None
        if is_opened:
            loader._steps[[0, 1]]
            loader._steps.close()
        server.faults = Faults(status={503: 1.0})
        before = server.requests
        ahead = loader._steps._read_ahead_from(0)
        assert ahead._advance()  # requests the first window
        wait_until(lambda: server.requests > before + 3)
        if how == "closed":
            loader.close()  # waits for its threads
        del loader, ahead
        gc.collect()
        wait_until(lambda: is_quiet(server))


def test_what_was_read_does_not_wait_for_the_garbage_collector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers in a reference cycle would be memory beyond `memory`, as much as was read since the last collection."""
    source = write_source(tmp_path, 0, "parquet", documents(0, 400, 20, seed=1)) | {"weight": 1}
    path = Path(list_files(source)[0])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    with FaultySource({"b/x.parquet": path.read_bytes()}) as server:
        config = make_config(
            tmp_path,
            [source | {"path": "s3://b/x.parquet"}],
            samples=64,
            storage={"s3://": {"endpoint": server.url}},
        )
        megablend.build(config)
        batches = iter(megablend.Loader(megablend.open(config), micro_batch_size=2))
        gc.collect()
        gc.disable()
        try:
            before = server.requests
            for _ in batches:
                pass
            assert server.requests > before
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            held = {type(each) for each in gc.garbage} & {FetchedRanges, memoryview}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert not held


def is_quiet(server: FaultySource) -> bool:
    """Whether there are no requests for longer than there is between two attempts."""
    before = server.requests
    time.sleep(0.5)
    return server.requests == before


def wait_until(is_reached: Callable[[], bool]) -> None:
    """Wait at most four minutes; the source is tried for ten."""
    deadline = time.monotonic() + 500
    while not is_reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_the_first_batch_is_there_when_one_percent_of_the_data_has_arrived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    values = np.random.default_rng(0).integers(0, 1 << 20, 4_000_000, dtype=np.int32)
    rows = pa.ListArray.from_arrays(np.arange(0, len(values) + 1, 1000, dtype=np.int32), values)
    path = tmp_path / "x.parquet"
    pq.write_table(
        pa.table({"ids": rows}),
        path,
        use_dictionary=False,
        data_page_size=64 << 10,
        write_page_index=True,
    )
    data = path.read_bytes()
    with FaultySource({f"b/{i}.parquet": data for i in range(80)}) as server:
        source = {"name": "s", "path": "s3://b/*.parquet", "column": "ids", "weight": 1}
        storage = {"s3://": {"endpoint": server.url}}
        config = make_config(
            tmp_path, [source], samples=10_000, sequence_length=2048, storage=storage
        )
        del config["block_bytes"]
        megablend.build(config)
        server.faults = Faults(latency=0.03)
        server.bytes = 0
        loader = iter(megablend.Loader(megablend.open(config), micro_batch_size=4))
        tokens = next(loader)["tokens"]
        arrived = server.bytes
        assert tokens.shape == (4, 2048)
        assert arrived <= 0.01 * 80 * len(data), f"{arrived:,} bytes"
