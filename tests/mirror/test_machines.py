"""Runs on several machines that have nothing in common but their network: namespaces, with nginx as the source."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

import megablend
from tests.mirror.namespaces import SOURCE, find_obstacle, run_cluster
from tests.mirror.test_runs import digest_batches, make_configs
from tests.storage.faulty import FaultySource

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("obstore"), pytest.mark.timeout(200)]


@pytest.fixture(scope="module", autouse=True)
def namespaces() -> None:
    if (obstacle := find_obstacle()) is not None:
        pytest.skip(f"no network namespaces here: {obstacle}")


def write_files(folder: Path, source: FaultySource) -> int:
    """Write what a source serves. Returns: bytes."""
    for name, data in source.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return sum(map(len, source.files.values()))


def make_remote(folder: Path, remote: dict[str, Any], node: int, **settings: Any) -> dict[str, Any]:
    """The config of a node."""
    mirror = {
        "folder": str(folder / f"node{node}" / "mirror"),
        "prefixes": [f"http://{SOURCE}/"],
        "reserve": 0,
        "insecure": True,
        **settings,
    }
    return copy.deepcopy(remote) | {"storage": {"mirror": mirror}}


@pytest.mark.parametrize("nodes", ["torch", "list"])
def test_four_machines_read_the_source_once(nodes: str, tmp_path: Path) -> None:
    count = 4
    with FaultySource({}) as source:  # nginx serves its files
        source.url = f"http://{SOURCE}"
        plain, remote = make_configs(tmp_path, source, {}, lanes=8)
    size = write_files(tmp_path / "served", source)
    megablend.build(plain)
    names = [f"10.9.0.{i + 1}:7171" for i in range(count)]
    settings = {"nodes": names if nodes == "list" else "torch", "copies": 2}
    configs = [make_remote(tmp_path, remote, i, **settings) for i in range(count)]
    all_ranks = [
        {"node": i, "config": configs[i], "rank": i // 2, "size": 2, "replicas": 2}
        for i in range(count)
    ]
    steps: list[dict[str, Any]] = [
        {"build": configs[0], "ranks": all_ranks},
        {"ranks": all_ranks},
        {"kill": configs[2]["storage"]["mirror"]["folder"], "ranks": all_ranks},
    ]
    found = run_cluster(tmp_path, tmp_path / "served", steps)
    expected = [
        digest_batches(plain, data_parallel_rank=rank, data_parallel_size=2, replicas=2)
        for rank in (0, 0, 1, 1)
    ]
    for step in found:
        assert step["digests"] == expected
    slack = 2 * count * len(source.files)  # to know a file's version, a node asks for a byte of it
    assert found[0]["bytes"] <= 1.001 * size + slack
    assert found[1]["bytes"] == 0
    assert found[2]["bytes"] <= len(source.files)  # the empty machine asks for versions
