"""Who reads the source: the node process, and no rank or worker beside it."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import megablend
from tests.mirror.nodes import find_node, mirror
from tests.mirror.test_clusters import count_bytes, read_all, with_mirror
from tests.mirror.test_runs import make_configs
from tests.storage.faulty import FaultySource

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("obstore")]


def list_clients(port: int) -> set[int]:
    """Processes with a connection to a port of this machine."""
    wanted = f":{port:04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    # Established connections, by who has asked for them
    links = {
        f"socket:[{line[9]}]" for line in lines if line[2].endswith(wanted) and line[3] == "01"
    }
    return {int(each.name) for each in Path("/proc").glob("[0-9]*") if links & list_open(each)}


def list_open(process: Path) -> set[str]:
    """What a process has open; nothing if it has ended."""
    found = set[str]()
    with contextlib.suppress(OSError):
        for each in (process / "fd").iterdir():
            # One may be closed meanwhile
            with contextlib.suppress(OSError):
                found.add(str(each.readlink()))
    return found


@pytest.mark.usefixtures("fork_server")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_node_has_one_client_of_the_source(tmp_path: Path) -> None:
    """Of eight ranks with four workers each."""
    num_ranks = 8
    with FaultySource({}) as source, mirror(tmp_path / "m", source.url) as settings:
        plain, remote = make_configs(tmp_path, source, {})
        megablend.build(plain)
        expected = read_all([plain] * num_ranks)
        config = with_mirror(remote, settings)
        path = tmp_path / "config.json"
        path.write_text(json.dumps(remote))
        # Without the mirror, which is empty then, and in a process whose connections end with it
        build = [sys.executable, "-m", "megablend", "build", str(path)]
        subprocess.run(build, check=True, capture_output=True, timeout=500)
        before = source.bytes
        clients = set[int]()
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(0.05):
                clients.update(list_clients(source.port))

        # Workers are forked from a process that has imported what they need
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["megablend"])
        with ThreadPoolExecutor(1) as watcher:
            watching = watcher.submit(watch)
            try:
                found = read_all(
                    [config] * num_ranks, num_workers=4, multiprocessing_context=context
                )
            finally:
                is_over.set()
            watching.result()
        assert found == expected
        assert clients == {find_node(tmp_path / "m")}
        read = source.bytes - before
        assert 0 < read <= 1.001 * count_bytes(source) + 40 * len(source.files)
