"""Datasets of a cluster with etcd: real commands, node processes, etcd; a source that counts."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.mirror.catalog.test_datasets import (
    MB,
    MIXED,
    Machine,
    check_folder,
    count_sent,
    make_files,
)
from tests.mirror.etcd import EtcdServer
from tests.mirror.nodes import get_status
from tests.mirror.test_clusters import until
from tests.storage.faulty import FaultySource
from tests.storage.objects.servers.start import ending_with_parent, find_ports

pytestmark = pytest.mark.usefixtures("obstore", "keys")
LEASE = 3.0


@pytest.fixture
def keys(plain_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")


class Service(Machine):
    """A node as a service."""

    process: subprocess.Popen[bytes] | None = None
    environ: Mapping[str, str] = MappingProxyType({})
    """More variables of it."""

    def start(self) -> None:
        """Run the node process; return when it answers."""
        self.launch()
        self.wait_until_ready()

    def launch(self) -> None:
        """Run the node process."""
        path = self.config.with_suffix(".log")
        # A long line is broken where it has a blank
        self._num_ready = path.read_text().split().count("ready") if path.exists() else 0
        with path.open("ab") as log:
            command = [sys.executable, "-m", "megablend", "node", "run", str(self.config)]
            command = ending_with_parent(command)
            environ = {**os.environ, **self.environ}
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environ)

    def wait_until_ready(self) -> None:
        """Until the process that was launched last answers."""
        path = self.config.with_suffix(".log")
        process = self.process
        assert process is not None

        def has_come() -> bool:
            is_there = path.read_text().split().count("ready") > self._num_ready
            return is_there or process.poll() is not None

        until(has_come)
        assert process.poll() is None, path.read_text()

    def kill(self) -> None:
        """End it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def wait_for_view(self, count: int) -> None:
        """Until so many nodes have met."""

        def has_met() -> bool:
            cluster = get_status(self.storage["mirror"])["cluster"]
            return bool(cluster["formed"]) and cluster["nodes"] == count

        until(has_met)


def make_services(
    folder: Path,
    source: FaultySource,
    etcd: EtcdServer,
    count: int,
    lease: float = LEASE,
    limits: Mapping[str, object] = MappingProxyType({}),
    access: Mapping[str, object] = MappingProxyType({}),
    **settings: object,
) -> list[Service]:
    """Nodes, which are not started.

    Args:
        limits: of the source, for all of them.
        access: to etcd.
    """
    about = {"endpoints": [etcd.url], "nodes_expected": count, "lease": lease, **access}
    return [
        Service(
            folder / f"n{i}",
            source,
            limits,
            nodes="etcd",
            etcd=about,
            port=port,
            advertise=f"127.0.0.1:{port}",
            **settings,
        )
        for i, port in enumerate(find_ports(count))
    ]


@contextlib.contextmanager
def services(
    folder: Path, files: dict[str, bytes], etcd: EtcdServer, count: int, *more: Any, **settings: Any
) -> Iterator[list[Service]]:
    """Nodes, which are started; the rest as for `make_services`."""
    with FaultySource({f"b/{name}": data for name, data in files.items()}) as source:
        nodes = make_services(folder, source, etcd, count, *more, **settings)
        try:
            for node in nodes:
                node.launch()
            for node in nodes:
                node.wait_until_ready()
            for node in nodes:
                node.wait_for_view(count)
            yield nodes
        finally:
            for node in nodes:
                node.kill()


def test_a_dataset_is_wanted_on_all_nodes_by_one_command(tmp_path: Path, etcd: EtcdServer) -> None:
    files = make_files("d", MIXED | {f"{i}.bin": MB for i in range(8)})
    with services(tmp_path, files, etcd, 3) as (a, b, c):
        revision = a.add("corpus", "d")
        listed = count_sent(a.source)
        held = a.ask("want", "corpus", "--copies", "all", "--wait")
        assert (held["nodes"], held["complete"], held["missing"]) == (3, 3, 0)
        # Each byte once, for all nodes, and one more of each file a node, by which its version is seen
        size = sum(map(len, files.values()))
        assert 0 <= count_sent(a.source) - listed - size <= 3 * len(files)
        for node in (a, b, c):
            assert node.ask("list")["wants"] == ["corpus@latest"]
            check_folder(node.ask("path", "corpus")["path"], files, "d")
        told = c.run("status").stdout
        assert "corpus@latest: complete on 3 of 3 nodes, 0.000 GB missing\n" in told

        # An empty machine takes a node's place
        before = count_sent(a.source)
        c.kill()
        shutil.rmtree(c.folder)
        c.start()
        for node in (a, b, c):
            node.wait_for_view(3)  # its lease may have run out meanwhile
        held = b.ask("want", "corpus", "--copies", "all", "--wait")
        assert held["complete"] == 3
        check_folder(c.ask("path", f"corpus@{revision[:6]}")["path"], files, "d")
        assert count_sent(a.source) - before <= len(files)

        # A node that is away deletes what was removed meanwhile, when it is back
        c.kill()
        done = b.run("remove", "corpus").stdout
        assert f"forgotten: corpus@{revision[:12]}\n" in done
        assert "unreachable, will delete when it is back: 127.0.0.1:" in done
        assert done.count("in 12 files\n") == 2
        c.start()
        until(lambda: c.ask("list")["revisions"] == [])
        assert not list((c.folder / "files").rglob("*.data"))


def test_a_want_waits_for_nodes_that_have_not_met_and_says_why_they_cannot(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    """What is wanted right after the first node's start is held when the others have come; a node with another
    secret says what is wrong."""
    files = make_files("d", MIXED)
    secrets = [tmp_path / "secret", tmp_path / "other"]
    for each in secrets:
        each.write_text(f"{each.name} of sixteen letters")
        each.chmod(0o600)
    with FaultySource({f"b/{name}": data for name, data in files.items()}) as source:
        nodes = make_services(tmp_path, source, etcd, 2, secret_file=str(secrets[0]))
        (tmp_path / "z").mkdir()
        (stranger,) = make_services(tmp_path / "z", source, etcd, 1, secret_file=str(secrets[1]))
        a, b = nodes
        try:
            a.start()
            a.add("corpus", "d")
            want = ["want", "corpus", "--copies", "all", "--wait", "--mirror", str(a.config)]
            command = [sys.executable, "-m", "megablend", "datasets", *want]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as waiting:
                until(lambda: waiting.poll() is not None or bool(a.ask("list")["wants"]))
                b.start()
                told, _ = waiting.communicate(timeout=500)
            assert told == "corpus@latest: held on 2 nodes\n"

            stranger.start()
            code, message = stranger.fail("want", "corpus", "--copies", "all", "--wait")
            assert code == 2
            assert "cannot be trusted" in message
            code, message = stranger.fail("path", "corpus")
            assert code == 3
            assert "has not been received yet" in message
            log = stranger.config.with_suffix(".log").read_text()
            assert log.count("cannot get the manifest") <= 2
        finally:
            for node in (*nodes, stranger):
                node.kill()


def test_what_is_refused(tmp_path: Path, etcd: EtcdServer) -> None:
    files = make_files("d", MIXED)
    with services(tmp_path, files, etcd, 1) as (a,):
        a.add("corpus", "d")
        code, message = a.fail("want", "corpus", "--nodes", "127.0.0.1:1")
        assert code == 2
        assert "'127.0.0.1:1' is not one of the 1 nodes" in message
        code, message = a.fail("want", "corpus", "--copies", "2")
        assert code == 2
        assert message.startswith("corpus@latest: 2 copies cannot be kept on 1 nodes")
        code, message = a.fail("want", "corpus", "--copies", "no")
        assert "--copies: found 'no', expected `share`, `all`, or a number" in message
        a.ask("want", "corpus", "--wait")
        etcd.stop()
        began = time.monotonic()
        code, message = a.fail("unwant", "corpus")
        assert code == 3
        assert message.startswith("etcd is unreachable: ")
        assert time.monotonic() - began < 150
        assert a.goals()
        assert "etcd is unreachable" in a.run("status").stdout
        assert a.read("s3://b/d/big.bin") == files["d/big.bin"]
        etcd.start()
        # What was not answered may have been done
        until(lambda: a.run("unwant", "corpus").returncode == 0 or not a.ask("list")["wants"])
