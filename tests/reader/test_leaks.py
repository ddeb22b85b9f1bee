"""Opening, reading and leaving, hundreds of times: no descriptor, no thread, no shared memory is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import megablend
from tests.preloaded import python
from tests.runs import documents, make_config, write_source


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    kinds = ["parquet", "arrow", "megatron"]
    sources = [
        write_source(tmp_path, d, kind, documents(d, 60, 30, seed=4)) | {"weight": 1}
        for d, kind in enumerate(kinds)
    ]
    config = make_config(tmp_path, sources, samples=240)
    megablend.build(config)
    return config


@pytest.mark.parametrize(
    "opens", [30, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])]
)
def test_opens_leave_nothing(tmp_path: Path, config: dict[str, Any], opens: int) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    worker = Path(__file__).with_name("opens_worker.py")
    command = [*python("torch"), str(worker), str(path), str(opens)]
    environment = os.environ | {"PYTHONPATH": str(worker.parent.parent.parent)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=2900, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    after_ten, at_the_end = json.loads(done.stdout)
    # At first kernels may still be loading
    assert all(end <= ten for end, ten in zip(at_the_end, after_ten, strict=True))


SCRIPT = """
import signal, sys, megablend
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
loader = megablend.Loader(megablend.open(sys.argv[1]), micro_batch_size=4, num_workers=2, multiprocessing_context=sys.argv[2])
while True:
    for batch in loader:
        print("batch", flush=True)
    loader.load_state_dict(loader.dataset.state_dict(0))
"""


@pytest.mark.parametrize("context", [pytest.param("fork", marks=pytest.mark.slow), "spawn"])
def test_an_interrupted_loop_leaves_no_worker_and_no_shared_memory(
    tmp_path: Path, config: dict[str, Any], context: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    (tmp_path / "loop.py").write_text(
        "if __name__ == '__main__':\n" + "".join(f"    {line}\n" for line in SCRIPT.split("\n"))
    )
    shared = set(Path("/dev/shm").glob("torch_*"))
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "loop.py"), str(path), context],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "batch\n"
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: workers get it, too
    try:
        _, errors = process.communicate(timeout=500)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode != 0
    assert "KeyboardInterrupt" in errors
    for _ in range(2400):
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.1)
    else:
        pytest.fail("a worker outlives its loop")
    mine = {
        name
        for name in set(Path("/dev/shm").glob("torch_*")) - shared
        if f"_{process.pid}_" in name.name
    }
    assert not mine
