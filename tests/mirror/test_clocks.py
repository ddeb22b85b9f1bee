"""Nodes whose clocks are 40 days apart, twenty of them started at once, and one later: each byte leaves the source once."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from tests.mirror.catalog.test_cluster_datasets import keys, make_services
from tests.mirror.catalog.test_datasets import check_folder, count_sent, make_files
from tests.mirror.etcd import EtcdServer
from tests.mirror.test_clusters import until
from tests.storage.faulty import Faults, FaultySource

__all__ = ["keys"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("obstore", "keys"),
]
COUNT = 20
LATER_SECONDS = 30.0
DAY = 86_400
CLOCK = """import os, time
true = time.time
time.time = lambda: true() + float(os.environ["MEGABLEND_TEST_CLOCK"])
"""


def test_clocks_are_apart_and_one_node_comes_later(tmp_path: Path, etcd: EtcdServer) -> None:
    clock = tmp_path / "clock"
    clock.mkdir()
    (clock / "sitecustomize.py").write_text(CLOCK)
    sizes = {f"{i}.bin": 250_000 for i in range(40)}
    files = make_files("d", sizes) | make_files("e", {"a": 100_000})
    with FaultySource({f"b/{name}": data for name, data in files.items()}) as source:
        nodes = make_services(
            tmp_path, source, etcd, COUNT + 1, 15.0, access={"nodes_expected": COUNT}
        )
        draw = random.Random(0)
        days = [-20.0, 20.0, *(draw.uniform(-20, 20) for _ in nodes[2:])]
        for node, shift in zip(nodes, days, strict=True):
            path = os.pathsep.join([str(clock), os.environ["PYTHONPATH"]])
            node.environ = {"PYTHONPATH": path, "MEGABLEND_TEST_CLOCK": str(shift * DAY)}
        *first, last = nodes
        behind, ahead = nodes[:2]
        try:
            began = time.monotonic()
            for node in first:
                node.launch()
            started = time.monotonic() - began
            for node in first:
                node.wait_until_ready()
            for node in first:
                node.wait_for_view(COUNT)
            met = time.monotonic() - began
            # The last revision, and the first want, are so though a clock says otherwise
            ahead.add("corpus", "e")
            revision = behind.add("corpus", "d")
            listed = count_sent(source)
            source.faults = Faults(rate=sum(map(len, files.values())) / (2 * LATER_SECONDS))
            ahead.ask("want", "corpus", "--copies", "all")
            behind.add("other", "e")
            behind.ask("want", "other", "--copies", "all")
            until(lambda: len(ahead.goals()) == 2)
            assert [each["want"] for each in ahead.ask("status")["goals"]] == [
                "corpus@latest",
                "other@latest",
            ]
            time.sleep(max(0.0, began + started + LATER_SECONDS - time.monotonic()))
            last.start()
            is_reading = source.bytes - listed < 0.9 * sum(map(len, files.values()))
            last.wait_for_view(COUNT + 1)
            source.faults = Faults()
            for want in ("corpus", "other"):
                held = behind.ask("want", want, "--copies", "all", "--wait")
                assert held["complete"] == COUNT + 1
            size = sum(map(len, files.values()))
            ratio = (count_sent(source) - listed) / size
            print(
                f"{COUNT} nodes started in {started:.2f} s, met after {met:.1f} s; one {LATER_SECONDS:.0f} s later; "
                f"source / unique {ratio:.5f}"
            )
            assert started < 3
            assert is_reading
            assert 1 <= ratio < 1.001
            for node in (ahead, last):
                path = node.ask("path", f"corpus@{revision}")["path"]
                check_folder(path, files, "d")
        finally:
            for node in nodes:
                node.kill()
