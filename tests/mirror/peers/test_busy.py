"""A source that asks to be left alone: real node processes, of which one hears it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megablend.storage.objects import clients
from tests.mirror.catalog.test_cluster_datasets import Service, keys
from tests.mirror.catalog.test_datasets import MB, count_sent
from tests.mirror.nodes import get_status
from tests.mirror.test_clusters import until
from tests.storage.faulty import Faults, FaultySource
from tests.storage.objects.servers.start import find_ports

__all__ = ["keys"]
pytestmark = pytest.mark.usefixtures("obstore", "keys")
PAUSE = 100
READ = """
import json, sys
from megablend.storage.store_options import parse_options
from megablend.storage.by_scheme import make_storage
make_storage(objects=parse_options(json.loads(sys.argv[1]))).read("s3://b/x", 0, 6 << 20)
"""
"""A process of its own, which ends before its nodes do."""


def find_pause(node: Service) -> float:
    return float(get_status(node.storage["mirror"])["source_pauses"].get("s3://b", 0))


def test_all_nodes_leave_a_source_alone_that_has_asked_one_of_them(tmp_path: Path) -> None:
    # A file of one piece: one node reads it, in several requests
    data = bytes(6 * MB)
    ports = find_ports(3)
    names = [f"127.0.0.1:{port}" for port in ports]
    with FaultySource({"b/x": data}, Faults(rate=MB)) as source:
        nodes = [
            Service(tmp_path / f"n{i}", source, nodes=names, port=port, advertise=name)
            for i, (port, name) in enumerate(zip(ports, names, strict=True))
        ]
        for node in nodes:
            # One after another
            node.storage["s3://"]["max_requests"] = 1
            node.config.write_text(json.dumps({"storage": node.storage}))
        read = [sys.executable, "-c", READ, json.dumps(nodes[0].storage)]
        reading: subprocess.Popen[bytes] | None = None
        try:
            for node in nodes:
                node.start()
            for node in nodes:
                node.wait_for_view(3)
            reading = subprocess.Popen(read)
            until(lambda: source.bytes > MB)
            assert source.most_in_flight == 1
            began = time.monotonic()
            source.faults = Faults(status={429: 1.0}, retry_after=PAUSE)
            until(lambda: source.faulty["429"] > 0)
            source.faults = Faults()
            for node in nodes:
                until(lambda node=node: find_pause(node) > 0)  # type: ignore[misc]
                pause = find_pause(node)
                assert PAUSE - 1 - (time.monotonic() - began) < pause <= PAUSE
            count_sent(source)
            requests = source.requests
            time.sleep(2)
            assert source.requests == requests
        finally:
            if reading is not None:
                reading.kill()
                reading.wait()
            for node in nodes:
                node.kill()


def test_requests_of_urls_with_queries_share_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    from megablend.storage.objects.address import Address
    from megablend.storage.store_options import StoreOptions

    monkeypatch.setattr(clients, "_clients", {})
    monkeypatch.setattr(clients, "_limiters", {})
    monkeypatch.setattr(clients, "_busy_until", {})
    address = Address("https", "host", "")
    options = StoreOptions(max_requests=8)
    one, other = (clients.get_client(address, options, query) for query in ("a=1", "a=2"))
    assert one is not other
    assert one.limiter is other.limiter
    told: list[tuple[str, float]] = []
    monkeypatch.setattr(clients, "busy_listeners", [lambda *about: told.append(about)])
    one.limiter.slow_down(time.monotonic(), 5.0)
    clients.slow_down("https://host", 60.0)
    ((root, seconds),) = told
    assert (root, round(seconds)) == ("https://host", 5)
    assert 30 < clients.find_pauses()[root] <= 60
    # What it has not asked yet
    clients.slow_down("https://new", 60.0)
    new = clients.get_client(Address("https", "new", ""), options, "")
    assert 30 < new.limiter.paused_until - time.monotonic() <= 60
