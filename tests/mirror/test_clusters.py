"""Whole runs on several nodes: the batches of local files, and each byte read from the source once for all of them.

Each node has its own folder and its own real node process. This process acts as the ranks of all
nodes, since a connection goes by its mirror's folder.
"""

from __future__ import annotations

import contextlib
import copy
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import megablend
from megablend.operations.fill import fill_mirror
from megablend.storage.hints import Filled
from tests.cli.commands import run
from tests.mirror.nodes import find_node, get_status, kill_node, mirror
from tests.mirror.test_runs import digest_fields, make_configs
from tests.storage.faulty import FaultySource
from tests.storage.objects.servers.start import find_ports

pytestmark = pytest.mark.usefixtures("obstore")


@contextlib.contextmanager
def cluster(
    folder: Path, source: FaultySource, count: int, **settings: Any
) -> Iterator[list[dict[str, Any]]]:
    """The `mirror` settings of each node of a cluster."""
    ports = find_ports(count)
    names = [f"127.0.0.1:{port}" for port in ports]
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                mirror(
                    folder / f"node{i}",
                    source.url,
                    nodes=names,
                    port=port,
                    advertise=names[i],
                    **settings,
                )
            )
            for i, port in enumerate(ports)
        ]


def with_mirror(config: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(config) | {"storage": {"mirror": settings}}


def read_all(
    configs: list[dict[str, Any]], micro_batch_size: int = 4, **options: Any
) -> list[list[str]]:
    """Digests of the batches of each rank, read at the same time."""

    def read(rank: int) -> list[str]:
        loader = megablend.Loader(
            megablend.open(configs[rank]),
            micro_batch_size=micro_batch_size,
            data_parallel_rank=rank,
            data_parallel_size=len(configs),
            **options,
        )
        return [digest_fields(batch) for batch in loader]

    with ThreadPoolExecutor(len(configs)) as threads:
        return list(threads.map(read, range(len(configs))))


def count_bytes(source: FaultySource) -> int:
    return sum(map(len, source.files.values()))


@pytest.mark.parametrize("count", [2, 4])
def test_each_byte_leaves_the_source_once_for_all_nodes(count: int, tmp_path: Path) -> None:
    with FaultySource({}) as source, cluster(tmp_path, source, count) as settings:
        plain, remote = make_configs(tmp_path, source, {})
        megablend.build(plain)
        megablend.build(with_mirror(remote, settings[0]))
        expected = read_all([plain] * count)
        configs = [with_mirror(remote, each) for each in settings]
        assert read_all(configs) == expected
        slack = 40 * count * len(source.files)  # versions of files
        assert source.bytes <= 1.001 * count_bytes(source) + slack
        before = source.bytes
        source.is_down = True
        assert read_all(configs) == expected
        assert source.bytes == before


def test_a_dead_node_costs_nothing_when_its_copies_are_paid(tmp_path: Path) -> None:
    count = 3
    with FaultySource({}) as source, cluster(tmp_path, source, count, copies=2) as settings:
        plain, remote = make_configs(tmp_path, source, {})
        megablend.build(plain)
        configs = [with_mirror(remote, each) for each in settings]
        megablend.build(configs[0])
        expected = read_all([plain] * count)
        assert read_all(configs) == expected
        until(lambda: all(map(is_settled, settings)))
        before = source.bytes
        kill_node(tmp_path / "node1")
        (tmp_path / "node1").rename(tmp_path / "lost")
        assert read_all(configs) == expected
        # The empty node asked for versions of files
        assert source.bytes <= before + len(source.files)


def test_nodes_are_filled_before_a_job(tmp_path: Path) -> None:
    count = 3
    with FaultySource({}) as source, cluster(tmp_path, source, count) as settings:
        plain, remote = make_configs(tmp_path, source, {})
        megablend.build(plain)
        configs = [with_mirror(remote, each) for each in settings]
        megablend.build(configs[0])
        with ThreadPoolExecutor(count) as threads:
            counted = list(threads.map(lambda each: fill_mirror(each, is_dry=True), configs))
            assert sum(each.needed for each in counted) <= count_bytes(source)
            assert all(each.source + each.peers == 0 for each in counted)
            filled = list(threads.map(fill_mirror, configs))
            assert [each.needed for each in filled] == [each.needed for each in counted]
            assert all(each.refused == 0 for each in filled)
            again = list(threads.map(fill_mirror, configs))
            assert all(each == Filled(needed=each.needed) for each in again)
        source.is_down = True
        assert read_all(configs) == read_all([plain] * count)
        assert source.bytes <= 1.001 * count_bytes(source) + 40 * count * len(source.files)


def test_commands_tell_of_the_nodes(tmp_path: Path) -> None:
    with FaultySource({}) as source, cluster(tmp_path, source, 2) as settings:
        _, remote = make_configs(tmp_path, source, {})
        configs = [with_mirror(remote, each) for each in settings]
        megablend.build(configs[0])
        read_all(configs)
        path = tmp_path / "config.json"
        path.write_text(json.dumps(configs[0]))
        done = run("node", "check", path)
        assert (done.returncode, done.stdout) == (0, "2 nodes: all reach one another\n")
        assert ", one of 2 nodes\n" in run("node", "status", path).stdout
        assert f"{socket.gethostname()}: holds " in run("node", "fill", path).stdout
        assert "would fetch 0.000 GB" in run("node", "fill", path, "--dry-run").stdout
        kill_node(tmp_path / "node1")
        done = run("node", "check", path)
        assert done.returncode == 3
        other = settings[1]["advertise"]
        assert f"cannot reach {other}: " in done.stdout
        assert f", one of 2 nodes; unreachable: {other}\n" in run("node", "status", path).stdout


def test_a_mirror_of_a_slurm_job_is_removed_outside_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process is left, and nothing says here which machines the job had."""
    with FaultySource({}) as source, cluster(tmp_path, source, 1) as settings:
        _, remote = make_configs(tmp_path, source, {})
        megablend.build(with_mirror(remote, settings[0]))
        kill_node(tmp_path / "node0")
        monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
        path = tmp_path / "config.json"
        path.write_text(json.dumps(with_mirror(remote, settings[0] | {"nodes": "slurm"})))
        done = run("node", "remove", path)
        assert (done.returncode, done.stdout[:8]) == (0, "deleted "), done.stderr
        assert not (tmp_path / "node0").exists()


def until(condition: Callable[[], bool], seconds: float = 100.0) -> None:
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not come about"
        time.sleep(0.05)


def is_settled(settings: dict[str, Any]) -> bool:
    state = get_status(settings)["cluster"]
    return bool(
        state["formed"]
        and not (state["bytes_to_copy"] or state["copying"] or state["untold_nodes"])
    )


def test_commands_do_not_wait_for_nodes(tmp_path: Path) -> None:
    """The other node never comes."""
    with FaultySource({}) as source, cluster(tmp_path, source, 2) as settings:
        plain, remote = make_configs(tmp_path, source, {})
        config = with_mirror(remote, settings[0])
        started = time.monotonic()
        megablend.build(config)
        megablend.build(plain)
        shown = megablend.show(config, sample=3)
        assert shown.to_dict()["source"] == megablend.show(plain, sample=3).to_dict()["source"]
        assert time.monotonic() - started < 100  # a node waits for 120 s


def test_a_job_that_mends_what_was_at_fault_is_not_told_of_it_again(tmp_path: Path) -> None:
    """Though the node processes of the job before are still there."""
    secrets = [tmp_path / f"secret{i}" for i in range(2)]
    for i, path in enumerate(secrets):
        path.write_text(f"{i}" * 40)
        path.chmod(0o600)
    script = (
        "import json, sys; from megablend.storage.by_scheme import make_storage;"
        "from megablend.storage.store_options import parse_options; settings, url = json.loads(sys.argv[1]);"
        "make_storage(objects=parse_options({'mirror': settings})).read(url, 0, 9)"
    )
    with FaultySource({"d/x": b"x" * 9}) as source, cluster(tmp_path, source, 2) as settings:

        def read(i: int) -> subprocess.CompletedProcess[str]:
            order = json.dumps(
                [settings[i] | {"secret_file": str(secrets[i])}, f"{source.url}/d/x"]
            )
            command = [sys.executable, "-c", script, order]
            return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)

        with ThreadPoolExecutor(2) as threads:
            for done in threads.map(read, range(2)):
                assert done.returncode
                assert "give all nodes the same `secret_file`" in done.stderr
            until(lambda: not any(find_node(tmp_path / f"node{i}") for i in range(2)))
            secrets[1].write_text(secrets[0].read_text())
            for done in threads.map(read, range(2)):
                assert done.returncode == 0, done.stderr
