"""Who starts node processes, and who reads the source: one process a node, whoever else comes or is killed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import megablend
from tests.mirror.nodes import find_node, kill_node, mirror
from tests.mirror.test_clusters import cluster, count_bytes, read_all, with_mirror
from tests.mirror.test_optimum import write_blend
from tests.mirror.test_runs import digest_fields
from tests.runs import make_config
from tests.storage.faulty import FaultySource

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("obstore")]
KILLS = 10
RANGE = 300_000
READER = """
import json, logging, sys
from megablend.storage.by_scheme import make_storage
from megablend.storage.store_options import parse_options
logging.basicConfig(format="%(message)s", level=logging.INFO)
settings, url, size = json.loads(sys.argv[1])
storage = make_storage(objects=parse_options({"mirror": settings}))
print("ready", flush=True)
for line in sys.stdin:
    print(storage.read(url, size * int(line), size)[:32].hex(), flush=True)
"""


def list_starts(folder: Path) -> list[str]:
    """The node processes of a folder so far, by its log."""
    return re.findall(r": node process ([0-9]+)\n", (folder / "node.log").read_text())


@contextmanager
def readers(
    settings: list[dict[str, Any]], url: str, count: int
) -> Iterator[list[subprocess.Popen[str]]]:
    """So many processes that are ready to read at the same time, each at the next of these nodes."""
    with ExitStack() as stack:
        started = []
        for i in range(count):
            argument = json.dumps([settings[i % len(settings)], url, RANGE])
            command = [sys.executable, "-c", READER, argument]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            started.append(process)
        for process in started:
            assert ask(process) == "ready"
        yield started


def ask(process: subprocess.Popen[str], number: int | None = None) -> str:
    """A line that the process says; with a number, after it was told it."""
    assert process.stdin is not None
    assert process.stdout is not None
    if number is not None:
        process.stdin.write(f"{number}\n")
        process.stdin.flush()
    return process.stdout.readline().strip()


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_many_that_open_a_folder_at_once_start_one_node_process(
    num_nodes: int, tmp_path: Path
) -> None:
    """And one after each of its kills."""
    data = os.urandom(RANGE * (KILLS + 1))
    with ExitStack() as stack:
        source = stack.enter_context(FaultySource({"d/x": data}))
        if num_nodes == 1:
            settings = [stack.enter_context(mirror(tmp_path / "node0", source.url))]
        else:
            settings = stack.enter_context(cluster(tmp_path, source, num_nodes))
        url = f"{source.url}/d/x"
        processes = stack.enter_context(readers(settings, url, 24))
        threads = stack.enter_context(ThreadPoolExecutor(len(processes)))
        for turn in range(KILLS + 1):
            expected = data[turn * RANGE :][:32].hex()
            found = list(threads.map(lambda each: ask(each, turn), processes))  # noqa: B023
            assert found == [expected] * len(processes)
            starts = [list_starts(tmp_path / f"node{i}") for i in range(num_nodes)]
            # Of each node, since each is killed in its turn
            assert sum(map(len, starts)) == num_nodes + turn
            if turn < KILLS:
                kill_node(tmp_path / f"node{turn % num_nodes}")
        assert [starts[i][-1] for i in range(num_nodes)] == [
            str(find_node(tmp_path / f"node{i}")) for i in range(num_nodes)
        ]
        # Nothing was in flight at a kill; and each new process asks for the file's version
        assert source.bytes <= len(data) + 4096 + 2 * (KILLS + num_nodes)


def test_nodes_that_come_one_after_another_read_the_source_once(tmp_path: Path) -> None:
    """All want all at once, but the last comes a minute after the first."""
    count = 3
    with FaultySource({}) as source, cluster(tmp_path, source, count) as settings:
        blend = write_blend(tmp_path / "data", source, (1.0, 1.0), 400_000)
        plain = make_config(
            tmp_path, blend, sequence_length=256, block_bytes=1 << 14, samples=5_000
        )
        megablend.build(plain)
        (expected,) = read_all([plain])
        before = source.bytes
        configs = [with_mirror(plain, each) for each in settings]
        begins = [threading.Event() for _ in range(count)]

        def read(rank: int) -> tuple[list[str], float]:
            begins[rank].wait()
            loader = megablend.Loader(megablend.open(configs[rank]), micro_batch_size=4)
            digests = [digest_fields(batch) for batch in loader]
            return digests, time.monotonic()

        began = time.monotonic()
        with ThreadPoolExecutor(count) as threads:
            reading = [threads.submit(read, rank) for rank in range(count)]
            for event in begins:
                event.set()
                if event is not begins[-1]:
                    time.sleep(30.0)
            found = [each.result() for each in reading]
        assert [digests for digests, _ in found] == [expected] * count
        assert min(end for _, end in found) > began + 60.0
        size = count_bytes(source)
        print(f"source / needed at most {(source.bytes - before) / size:.4f}")
        assert source.bytes - before <= 1.001 * size + 40 * count * len(source.files)
