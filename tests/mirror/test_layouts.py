"""What nodes of neighbouring versions have in common is as it was: a change of a layout is a change of PROTOCOL.

Golden files are made by tools/make_golden_mirror.py."""

from __future__ import annotations

import asyncio
import json
import mmap
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megablend.errors import CorruptFileError
from megablend.mirror.catalog.catalog import Revision, Want, unpack_entry
from megablend.mirror.disk.block_map import DURABLE, BlockMap, sum_of_pages
from megablend.mirror.disk.pages import PAGE_BYTES, pages_of_file
from megablend.mirror.node.frames import (
    HEAD,
    PROTOCOL,
    Kind,
    unpack_error,
    unpack_needs,
    unpack_pages,
)
from tests.mirror.catalog.test_cluster_datasets import Service, keys
from tests.mirror.catalog.test_datasets import MIXED, count_sent, make_files
from tests.mirror.etcd import EtcdServer
from tests.mirror.layouts import DATA, GOLDEN, KEY, LAYOUTS, PAGES, REVISION, WANT, collect
from tests.mirror.nodes import get_status
from tests.mirror.test_clusters import until
from tests.storage.faulty import FaultySource
from tests.storage.objects.servers.start import find_ports

__all__ = ["keys"]


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_what_is_written_is_as_it_was(name: str) -> None:
    """A failure is a layout that neighbouring versions do not read: see PROTOCOL, and the tool."""
    assert LAYOUTS[name]() == (GOLDEN / name).read_bytes()


def test_what_was_written_is_read(tmp_path: Path) -> None:
    def read(name: str) -> bytes:
        return (GOLDEN / name).read_bytes()

    size, kind, number = HEAD.unpack_from(read("needs.bin"))
    (need,) = unpack_needs(read("needs.bin")[HEAD.size :])
    assert (size, kind, number) == (len(read("needs.bin")) - HEAD.size, Kind.WANT, 1 << 40)
    assert (need.key, need.pages.blocks.tolist(), need.pages.masks.tolist()) == (
        KEY,
        PAGES.blocks.tolist(),
        PAGES.masks.tolist(),
    )
    assert need.due.tolist() == [float("inf")] * 2
    pages, data = unpack_pages(read("pages.bin"), KEY, pages_of_file(KEY.size))
    assert (pages.masks.tolist(), bytes(data)) == (PAGES.masks.tolist(), DATA)
    error = unpack_error(read("error.json"))
    assert isinstance(error, CorruptFileError)
    assert (error.path, error.problem, error.offset) == ("s3://b/x", "is damaged", 5)
    assert unpack_entry(Revision, read("revision.json")) == REVISION
    assert unpack_entry(Want, read("want.json")) == WANT
    with (GOLDEN / "map.bin").open("rb") as file:
        found = BlockMap.read(file.fileno(), mmap.ACCESS_READ)
    assert found is not None
    assert (found.key, found.boot, found.punches) == (KEY, bytes(range(16)), 1)
    checksum = sum_of_pages(0b1011, memoryview(DATA[: 3 * PAGE_BYTES]))
    assert [found.load(i) for i in range(3)] == [
        (0b1011, DURABLE, checksum),
        (0, 0, 0),
        (1 << 18, 0, 77),
    ]
    # Offsets of the module's table
    text = read("map.bin")
    assert text[:8] == b"MBMAP\0\0\1"
    assert struct.unpack_from("<Q", text, 8) == (KEY.size,)
    assert struct.unpack_from("<Q", text, 4096) == (0b1011,)


def test_what_nodes_say_and_have_in_etcd_is_as_it_was(tmp_path: Path, obstore: None) -> None:
    golden = json.loads((GOLDEN / "cluster.json").read_text())
    found = asyncio.run(asyncio.wait_for(collect(tmp_path), 150))
    assert json.loads(json.dumps(found["etcd"])) == golden["etcd"]
    assert found["requests"].keys() == golden["requests"].keys()
    # Which of these there are depends on who is faster
    names = {"view", "held", "settle", "fresh", "greets", "list", "session", "formed", "more"}
    for path, about in golden["requests"].items():
        assert found["requests"][path]["body"] == about["body"]
        assert {*found["requests"][path]["query"]} <= names


class OtherVersion(Service):
    """A node of a neighbouring version: it has another version's name, more in JSON, and perhaps another protocol."""

    protocol = PROTOCOL

    def start(self) -> None:
        code = f"""
import megablend, json, sys
megablend.__version__ = "9.9.9"
from megablend.mirror.node import frames
frames.PROTOCOL = {self.protocol}
frames.pack_json, plain = lambda value: plain({{**value, "later": [1]}} if isinstance(value, dict) else value), frames.pack_json
from megablend.mirror.catalog import catalog
pack = catalog.pack_entry
catalog.pack_entry = lambda entry: json.dumps(json.loads(pack(entry)) | {{"later": {{"a": 1}}}}).encode()
from megablend.cli import main
sys.argv[1:] = ["node", "run", {str(self.config)!r}]
main()
"""
        path = self.config.with_suffix(".log")
        with path.open("ab") as log:
            self.process = subprocess.Popen([sys.executable, "-c", code], stdout=log, stderr=log)
        process = self.process
        until(lambda: "ready" in path.read_text().split() or process.poll() is not None)


def make_nodes(folder: Path, source: FaultySource, etcd: EtcdServer) -> list[Service]:
    """One of this version, and one of another."""
    about: dict[str, Any] = {"endpoints": [etcd.url], "nodes_expected": 1, "lease": 10.0}
    return [
        kind(
            folder / f"n{port}",
            source,
            nodes="etcd",
            etcd=about,
            port=port,
            advertise=f"127.0.0.1:{port}",
        )
        for kind, port in zip((Service, OtherVersion), find_ports(2), strict=True)
    ]


@pytest.mark.usefixtures("obstore", "keys")
def test_a_node_of_another_version_with_this_protocol_is_one_of_them(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    files = make_files("d", MIXED)
    with FaultySource({f"b/{name}": data for name, data in files.items()}) as source:
        one, other = make_nodes(tmp_path, source, etcd)
        try:
            one.start()
            other.start()
            for node in (one, other):
                node.wait_for_view(2)
            assert get_status(other.storage["mirror"])["version"] == "9.9.9"
            # What one has put, the other understands
            other.ask("add", "corpus", "s3://b/d/", "--every", "10m")
            assert one.ask("list")["revisions"][0]["every"] == 600
            listed = count_sent(source)
            held = one.ask("want", "corpus", "--copies", "all", "--wait")
            assert held["complete"] == 2
            assert count_sent(source) - listed <= sum(map(len, files.values())) + 2 * len(files)
            assert other.ask("remove", "corpus")["away"] == []
            until(lambda: one.ask("list")["revisions"] == [])
        finally:
            one.kill()
            other.kill()


@pytest.mark.usefixtures("obstore", "keys")
@pytest.mark.parametrize("protocol", [PROTOCOL - 1, PROTOCOL + 1])
def test_a_node_of_another_protocol_is_refused(
    tmp_path: Path, etcd: EtcdServer, protocol: int
) -> None:
    with FaultySource({}) as source:
        one, other = make_nodes(tmp_path, source, etcd)
        assert isinstance(other, OtherVersion)
        other.protocol = protocol
        try:
            one.start()
            one.wait_for_view(1)
            other.start()
            assert other.process is not None
            assert other.process.wait(500) == 2
            said = " ".join(other.config.with_suffix(".log").read_text().split())
            name = one.storage["mirror"]["advertise"]
            expected = f"{name} speaks protocol {PROTOCOL}, but this node speaks {protocol} "
            assert expected in said
            assert "or stop all nodes before you start one with another protocol" in said
            assert get_status(one.storage["mirror"])["cluster"]["nodes"] == 1
        finally:
            one.kill()
            other.kill()
