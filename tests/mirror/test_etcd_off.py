"""Etcd is off for a minute, and back without its data, or with old ones: jobs read on, fetching goes on, nothing is deleted.

MEGABLEND_TEST_SECONDS sets for how long it is off, each time.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from megablend.storage.by_scheme import make_storage
from megablend.storage.store_options import parse_options
from tests.mirror.catalog.test_cluster_datasets import Service, keys, services
from tests.mirror.catalog.test_datasets import MB, check_folder, count_sent, make_files
from tests.mirror.etcd import EtcdServer
from tests.mirror.nodes import count_only, find_held, get_status
from tests.storage.faulty import Faults

__all__ = ["keys"]

OFF_SECONDS = float(os.environ.get("MEGABLEND_TEST_SECONDS", "60"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("obstore", "keys"),
    pytest.mark.timeout(300 + 4 * OFF_SECONDS),
]
STEP = 256 << 10
PERIOD = 0.5


class Job:
    """Reads a file that nobody holds, a part at a time, by a node."""

    def __init__(self, node: Service, data: bytes) -> None:
        self._storage = make_storage(objects=parse_options(node.storage))
        self._data = data
        self.steps: list[tuple[float, float]] = []
        """Of each: when it began, and how long it took; in seconds."""
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Job:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join(60)

    def _run(self) -> None:
        for begin in range(0, len(self._data) - STEP, STEP):
            if self._ends.wait(PERIOD):
                return
            began = time.monotonic()
            fetched = self._storage.fetch(
                "s3://b/job/x", np.array([begin]), np.array([STEP]), lambda n: np.empty(n, np.uint8)
            )
            assert bytes(fetched.result(timeout=500)[0]) == self._data[begin : begin + STEP]
            self.steps.append((began, time.monotonic() - began))

    def find_longest(self, begin: float, end: float) -> float:
        """The longest step in a time. There are such."""
        assert self._thread.is_alive()
        return max(took for began, took in self.steps if begin <= began <= end)


def test_etcd_is_off_and_loses_its_data(tmp_path: Path, etcd: EtcdServer) -> None:
    job_file = make_files("job", {"x": int((4 * OFF_SECONDS + 120) / PERIOD) * STEP // 2})
    sizes = {f"{i}.bin": MB for i in range(40)}
    data = make_files("d", sizes, 1) | make_files("e", sizes, 2)
    with services(tmp_path, data | job_file, etcd, 3, 5.0, copies=2) as nodes:
        a, b, c = nodes
        source = a.source
        for name in "de":
            a.add(name, name)
        listed = count_sent(source)
        held = [find_held(node.folder) for node in nodes]

        def note() -> int:
            """Bytes that are held now. Raises if something is not held any more."""
            num_bytes = 0
            for i, node in enumerate(nodes):
                now = find_held(node.folder)
                assert count_only(held[i], [now]) == 0
                held[i] = now
                num_bytes += count_only(now, [])
            return num_bytes

        def be_off(*, loses: bool) -> None:
            """From now on, as if its disk were lost, or an old copy of it restored."""
            began = time.monotonic()
            etcd.stop()
            fetched = note()
            while time.monotonic() < began + OFF_SECONDS:
                time.sleep(1)
                note()
            assert note() > fetched
            assert all(get_status(node.storage["mirror"])["cluster"]["away"] == 0 for node in nodes)
            etcd.lose_data()
            if not loses:
                shutil.copytree(copy, etcd.data)
            etcd.start()
            for node in nodes:
                node.wait_for_view(3)
            print(
                f"off for {OFF_SECONDS:.0f} s: longest step {job.find_longest(began, time.monotonic()):.2f} s, "
                f"{(note() - fetched) / 1e6:.1f} MB held more"
            )

        # So that fetching lasts as long as all of this
        size = sum(map(len, data.values()))
        rate = size / (2 * OFF_SECONDS) + 2 * STEP / PERIOD
        source.faults = Faults(rate=rate)
        copy = tmp_path / "copy"
        with Job(c, job_file["job/x"]) as job:
            began = time.monotonic()
            b.ask("want", "d", "--copies", "all")
            time.sleep(10)
            before = job.find_longest(began, time.monotonic())
            be_off(loses=True)
            assert a.ask("list")["wants"] == ["d@latest"]
            etcd.stop()
            shutil.copytree(etcd.data, copy)
            etcd.start()
            for node in nodes:
                node.wait_for_view(3)
            c.ask("want", "e", "--copies", "all")
            be_off(loses=False)
            during = job.find_longest(began, time.monotonic())
        source.faults = Faults()
        started = time.monotonic()
        for name in "de":
            done = b.ask("want", name, "--copies", "all", "--wait")
            assert (done["complete"], done["missing"]) == (3, 0)
        converged = time.monotonic() - started
        assert all(node.ask("list")["wants"] == ["d@latest", "e@latest"] for node in nodes)
        note()
        for node in nodes:
            for name in "de":
                check_folder(node.ask("path", name)["path"], data, name)
        read = len(job.steps) * STEP
        more = count_sent(source) - listed - size - read
        print(
            f"longest step before {before:.2f} s, during {during:.2f} s of {len(job.steps)}; "
            f"source {1 + more / (size + read):.5f} of unique; complete {converged:.1f} s after the rate was lifted"
        )
        assert during <= max(3.0, 2 * before)
        # The last step's pages, and versions
        assert 0 <= more <= STEP + 12 * len(data)
