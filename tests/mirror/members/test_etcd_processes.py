"""Node processes that find one another by a real etcd, and are killed, stopped and replaced."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megablend.storage.by_scheme import make_storage
from megablend.storage.store_options import parse_options
from tests.mirror.etcd import EtcdServer
from tests.mirror.nodes import get_status
from tests.mirror.peers.test_cluster import is_read_once, make_files
from tests.storage.faulty import FaultySource
from tests.storage.objects.servers.start import find_ports

pytestmark = pytest.mark.usefixtures("obstore")
LEASE = 4.0


class Processes:
    """`megablend node run` of so many nodes."""

    def __init__(
        self,
        folder: Path,
        source: FaultySource,
        etcd: EtcdServer,
        count: int,
        expected: int,
        **limits: int,
    ) -> None:
        self._folder = folder
        self._source = source
        self.settings: list[dict[str, Any]] = []
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        about = {"endpoints": [etcd.url], "nodes_expected": expected, "lease": LEASE}
        for i, port in enumerate(find_ports(count)):
            settings = {
                "folder": str(folder / f"node{i}"),
                "prefixes": [f"{source.url}/"],
                "reserve": 0,
                "nodes": "etcd",
                "etcd": about,
                "copies": 2,
                "port": port,
                "advertise": f"127.0.0.1:{port}",
                "patience": 60,
            }
            self.settings.append(settings)
            config = {"storage": {"mirror": settings, f"{source.url}/": limits}}
            (folder / f"{i}.json").write_text(json.dumps(config), encoding="utf-8")

    def start(self, *which: int) -> None:
        """Return when they answer: who asks one that does not would start another one."""
        for i in which:
            config = str(self._folder / f"{i}.json")
            with (self._folder / f"{i}.log").open("ab") as log:
                self._processes[i] = subprocess.Popen(
                    [sys.executable, "-m", "megablend", "node", "run", config],
                    stdout=subprocess.PIPE,
                    stderr=log,
                )
        for i in which:
            answers = self._processes[i].stdout
            assert answers is not None
            assert b": ready" in answers.readline(), (self._folder / f"{i}.log").read_text()

    def send(self, i: int, number: int) -> None:
        self._processes[i].send_signal(number)

    def kill(self, i: int, *, empties: bool = False) -> None:
        end(self._processes.pop(i))
        if empties:
            shutil.rmtree(self._folder / f"node{i}")

    def state(self, i: int) -> dict[str, Any]:
        found: dict[str, Any] = get_status(self.settings[i])["cluster"]
        return found

    def wait(self, *which: int) -> int:
        """Until these nodes, and no others, are in one view, and owe nothing: its number."""
        number = 0

        def is_there() -> bool:
            nonlocal number
            states = [self.state(i) for i in which]
            number = states[0]["view"]
            return all(
                state["formed"]
                and (state["view"], state["nodes"]) == (number, len(which))
                and not (state["bytes_to_copy"] or state["copying"] or state["untold_nodes"])
                for state in states
            )

        until(is_there)
        return number

    def read_all(self, *which: int) -> None:
        """By these nodes at the same time."""

        storages = {
            i: make_storage(objects=parse_options({"mirror": self.settings[i]})) for i in which
        }

        def read(what: tuple[int, str]) -> None:
            i, name = what
            data = self._source.files[name]
            assert bytes(storages[i].read(f"{self._source.url}/{name}", 0, len(data))) == data

        with ThreadPoolExecutor(16) as threads:
            list(threads.map(read, [(i, name) for name in self._source.files for i in which]))


def end(process: subprocess.Popen[bytes]) -> None:
    assert process.poll() is None
    process.kill()
    process.communicate()


@contextlib.contextmanager
def processes(*arguments: Any, **limits: Any) -> Iterator[Processes]:
    found = Processes(*arguments, **limits)
    try:
        yield found
    finally:
        for process in found._processes.values():
            end(process)


def until(condition: Callable[[], bool], seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not come about"
        time.sleep(0.1)


def test_killed_stopped_and_replaced_nodes_cost_nothing(tmp_path: Path, etcd: EtcdServer) -> None:
    with (
        FaultySource(make_files(4, 9 << 20)) as source,
        processes(tmp_path, source, etcd, 4, 4) as nodes,
    ):
        nodes.start(0, 1, 2, 3)
        nodes.read_all(0, 3)
        first = nodes.wait(0, 1, 2, 3)
        nodes.kill(1, empties=True)
        assert nodes.wait(0, 2, 3) > first
        nodes.send(2, signal.SIGSTOP)
        second = nodes.wait(0, 3)
        nodes.start(1)
        third = nodes.wait(0, 1, 3)
        nodes.send(2, signal.SIGCONT)
        assert nodes.wait(0, 1, 2, 3) > third > second
        nodes.read_all(0, 1, 2, 3)
        assert is_read_once(source, 16)
        # Etcd ends while a node dies: it is left out when etcd is back, and not before a lease has run out
        etcd.stop()
        nodes.kill(3, empties=True)
        time.sleep(1.5 * LEASE)
        nodes.read_all(0, 1, 2)
        assert nodes.state(0)["nodes"] == 4
        etcd.start()
        nodes.wait(0, 1, 2)
        nodes.read_all(0, 1, 2)
        assert is_read_once(source, 16)


def test_limits_of_a_source_are_divided_by_the_nodes_that_there_are(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    rate = 4_000_000
    with (
        FaultySource({f"d/{i}": bytes(1 << 20) for i in range(24)}) as source,
        processes(tmp_path, source, etcd, 2, 1, max_source_rate=rate) as nodes,
    ):
        nodes.start(0)
        nodes.wait(0)
        nodes.start(1)
        nodes.wait(0, 1)
        began = time.monotonic()
        nodes.read_all(0, 1)
        assert is_read_once(source, 8)
        # What a second brings may come at once; as fast again without the division
        assert time.monotonic() - began >= 0.9 * ((24 << 20) / rate - 1)


def test_requests_a_second_are_divided_by_the_nodes_that_there_are(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    rate = 10
    with (
        FaultySource({f"d/{i}": bytes(100_000) for i in range(40)}) as source,
        processes(tmp_path, source, etcd, 2, 1, max_request_rate=rate) as nodes,
    ):
        nodes.start(0)
        nodes.wait(0)
        nodes.start(1)
        nodes.wait(0, 1)
        before = source.requests
        began = time.monotonic()
        nodes.read_all(0, 1)
        assert is_read_once(source, 8)
        count = source.requests - before
        assert count >= 40
        # What a second brings may come at once, at each node
        assert time.monotonic() - began >= 0.9 * (count / rate - 1)
