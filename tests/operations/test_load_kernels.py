"""Kernels are loaded in the background of `open`; forks and the end of the process get along with that."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from numba.core import config

import megablend
from tests.preloaded import python
from tests.runs import documents, make_config, write_source

pytestmark = [
    pytest.mark.skipif(bool(vars(config)["DISABLE_JIT"]), reason="nothing is compiled"),
]

FIRST_BATCH = """
import sys
import megablend
from megablend import jit
from megablend.operations.load_kernels import wait_for_kernels

met = []
take_turns = jit._take_turns

def noted(dispatcher):
    compile_or_load = take_turns(dispatcher)
    return lambda signature: (met.append(dispatcher.py_func.__name__), compile_or_load(signature))[1]

jit._take_turns = noted
dataset = megablend.open(sys.argv[1])
wait_for_kernels()
next(iter(megablend.Loader(dataset, micro_batch_size=4)))
print(",".join(met))
"""

FORK = """
import sys, time
import torch
import megablend
from megablend import jit
from megablend.operations import load_kernels
from numba.core import compiler_lock

def slow(module):
    with compiler_lock.global_compiler_lock:
        time.sleep(0.3)  # a fork at this moment leaves its child with a lock that nobody releases
    jit.load_kernels(module)

load_kernels.load_kernels = slow
dataset = megablend.open(sys.argv[1])
loader = torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=2, multiprocessing_context="fork")
print([batch["tokens"].shape for batch in loader][0])
again = megablend.open(sys.argv[1])
print(again[0]["tokens"].shape)
"""

END = """
import sys, time
import megablend
from megablend.operations import load_kernels

def slow(module):
    print(module.__name__, flush=True)
    time.sleep(0.5)

load_kernels.load_kernels = slow
megablend.open(sys.argv[1])
print("done", flush=True)
"""


@pytest.fixture(params=["parquet", "megatron"])
def path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    source = write_source(tmp_path, 0, request.param, documents(0, 300, 30, 1))
    given = make_config(tmp_path, [source], samples=20)
    megablend.build(given)
    (tmp_path / "run.json").write_text(json.dumps(given))
    return tmp_path / "run.json"


def run(script: str, path: Path) -> str:
    """What a new process prints."""
    command = [*python("torch"), "-c", script, str(path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, check=False, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_first_batch_loads_no_kernel(path: Path) -> None:
    run(FIRST_BATCH, path)  # compiles what this node has not compiled yet
    assert run(FIRST_BATCH, path) == ""


def test_workers_are_forked_while_kernels_are_loaded(path: Path) -> None:
    assert run(FORK, path).splitlines() == ["torch.Size([4, 8])", "torch.Size([8])"]


def test_a_process_ends_while_kernels_are_loaded(path: Path) -> None:
    *loaded, _ = run(END, path).splitlines()
    assert len(loaded) < 5, "it waits for one module, not for all"
