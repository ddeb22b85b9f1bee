"""Remedies of paths, threads and memory: done as the messages say."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import megablend

THREADS = """
import os, resource, sys, threading
from megablend.system.failures import translating
limit, wait = int(sys.argv[1]), threading.Event()
os.setuid(65534)
resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))
try:
    with translating("loader"):
        for _ in range(40):
            threading.Thread(target=wait.wait, daemon=True).start()
except Exception as error:
    print(error)
"""
MEMORY = """
import resource, sys
import numpy as np
from megablend.system.failures import translating
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    with translating("sample 3"):
        np.empty(1 << 30, np.uint8)
except Exception as error:
    print(error)
"""
READING = """
import os, random, resource, sys
from pathlib import Path
import megablend
from megablend.operations.load_kernels import wait_for_kernels
room, warm = 56 << 20, megablend.open(sys.argv[1])[0]
wait_for_kernels()  # LLVM ends a process that lacks memory
for project in sys.argv[1:]:
    if not os.fork():
        break
    os.wait()
else:
    sys.exit()
dataset = megablend.open(project)
dataset[0]
wait_for_kernels()
limit = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + room
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
places = random.Random(1)
try:
    for _ in range(120):
        dataset[places.randrange(len(dataset))]
except megablend.ResourceError as error:
    print(error)
else:
    print("read")
"""
"""Reads the run of each config in a process of its own; what is imported takes longest."""


def run(script: str, *arguments: object) -> str:
    """What a process prints: an error's message, or nothing."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(
    os.getuid() != 0, reason="only root can become another user, whom the limit binds"
)
def test_too_few_threads() -> None:
    says = r"loader: the system refuses to start more threads; raise the limit \(`ulimit -u`\), or stop other processes"
    assert re.search(says, run(THREADS, 10))
    assert run(THREADS, 1000) == ""


def test_too_little_memory() -> None:
    says = r"sample 3: out of memory \(.*\); the machine, or the job's limit, has no memory left: stop other processes, or"
    assert re.search(says, run(MEMORY, 1 << 30))
    assert run(MEMORY, 4 << 30) == ""
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


def test_more_cached_blocks_than_memory_has_room_for(tmp_path: Path) -> None:
    # 114 MiB of blocks: more than the process has room for, less than `memory`
    length = 50_000
    documents = 1_200
    values = pa.array(np.full(length * documents, 7, np.uint16))
    starts = pa.array(np.arange(0, len(values) + 1, length, dtype=np.int32))
    tokens = pa.ListArray.from_arrays(starts, values)
    pq.write_table(pa.table({"input_ids": tokens}), tmp_path / "a.parquet", row_group_size=20)
    project = tmp_path / "run.yaml"
    lower = tmp_path / "lower.yaml"
    source = f"- name: a\n  path: {tmp_path}/a.parquet\n"
    settings = f"cache: {tmp_path}/cache\nsequence_length: 4096\nsamples: 20000\nsources:\n{source}"
    project.write_text(f"memory: 2GiB\n{settings}")
    megablend.build(str(project))
    lower.write_text(f"memory: 24MiB\n{settings}")
    said, found = run(READING, project, lower).splitlines()
    assert re.search(r": out of memory \(.*\); .*; lower `memory:` if it is set", said)
    assert found == "read"
