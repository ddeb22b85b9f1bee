"""Runs on several machines that have nothing in common but their network: namespaces, with nginx as the source."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megablend
from megablend.arrays import Int64s
from megablend.mirror.disk.pages import pages_of_ranges
from megablend.mirror.rank.mirror_storage import MirrorStorage
from tests.mirror.namespaces import SOURCE, find_obstacle, run_cluster
from tests.mirror.nodes import mirror
from tests.mirror.test_runs import KINDS, digest_batches, list_paths, make_configs
from tests.runs import documents, make_config, write_source
from tests.storage.faulty import FaultySource

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("obstore")]


@pytest.fixture(scope="module", autouse=True)
def namespaces() -> None:
    if (obstacle := find_obstacle()) is not None:
        pytest.skip(f"no network namespaces here: {obstacle}")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[int]]:
    """The pages that this process asks its mirror for, by file."""
    found: dict[str, set[int]] = {}

    def record(name: str) -> None:
        read = getattr(MirrorStorage, name)

        def recorded(self: Any, path: str, offsets: Int64s, sizes: Int64s, *rest: Any) -> Any:
            asked = pages_of_ranges(offsets, sizes)
            numbers = np.flatnonzero(
                asked.masks[:, None] >> np.arange(64, dtype=np.uint64) & np.uint64(1)
            )
            found.setdefault(path, set()).update(
                (asked.blocks[numbers // 64].astype(np.int64) * 64 + numbers % 64).tolist()
            )
            return read(self, path, offsets, sizes, *rest)

        monkeypatch.setattr(MirrorStorage, name, recorded)

    record("fetch")
    record("read_ranges")
    return found


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
    settings = {"nodes": names if nodes == "list" else "torch", "copies": 2, "insecure": True}
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


@pytest.mark.parametrize(
    ("count", "num_sources", "replicas"),
    [(1, 10, 1), (2, 1, 1), (8, 1, 1), (8, 10, 4)],
    ids=["one", "two", "eight", "eight with tensor and pipeline ranks"],
)
def test_after_the_first_epoch_the_source_is_not_read(
    count: int,
    num_sources: int,
    replicas: int,
    tmp_path: Path,
    reads: dict[str, set[int]],
) -> None:
    """Two epochs, each with a validation. Replicas are processes that read the same samples, each on a node of its own."""
    data = tmp_path / "served" / "d"
    kinds = list(KINDS)
    entries = [
        write_source(
            data,
            number,
            kinds[number % len(kinds)],
            documents(number, 6000 // num_sources, 4000, seed=number),
            num_files=1 + 10 // num_sources,
        )
        | {"epochs": 2}
        for number in range(num_sources)
    ]
    settings: dict[str, Any] = {
        "sequence_length": 1024,
        "block_bytes": 1 << 14,
        "lanes": 8,
        "split": "90,10,0",
        "valid_samples": 40,
    }

    def make(name: str, where: str) -> dict[str, Any]:
        listed = [
            entry | {"path": [path.replace(str(data), where) for path in list_paths(entry)]}
            for entry in entries
        ]
        return make_config(tmp_path, listed, cache=str(tmp_path / name), **settings)

    size = count // replicas
    plain = make("plain", str(data))
    megablend.build(plain)
    epoch = len(megablend.open(plain)) // size // 4 // 2 + 10
    expected = [
        digest_epochs(plain, epoch, data_parallel_rank=rank, data_parallel_size=size)
        for rank in range(size)
    ]
    # What is needed: the pages that one process asks for when it does all of that
    with (
        FaultySource(
            {f"d/{path.relative_to(data)}": path.read_bytes() for path in data.rglob("*.*")}
        ) as source,
        mirror(tmp_path / "alone", source.url) as alone,
    ):
        config = make("alone-index", f"{source.url}/d") | {"storage": {"mirror": alone}}
        megablend.build(config)
        for rank in range(size):
            digest_epochs(config, epoch, data_parallel_rank=rank, data_parallel_size=size)
        needed = sum(
            len(source.files[name.removeprefix(f"{source.url}/")][page * 4096 :][:4096])
            for name, pages in reads.items()
            for page in pages
        )
        num_files = len(source.files)
    names = [f"10.9.0.{i + 1}:7171" for i in range(count)]
    remote = make("remote", f"http://{SOURCE}/d")
    configs = [
        make_remote(
            tmp_path, remote, i, **({"nodes": names, "insecure": True} if count > 1 else {})
        )
        for i in range(count)
    ]
    ranks = [
        {"node": i, "config": configs[i], "rank": i // replicas, "size": size} for i in range(count)
    ]
    (found,) = run_cluster(
        tmp_path,
        tmp_path / "served",
        [{"build": configs[0], "ranks": ranks, "epoch": epoch}],
    )
    assert found["digests"] == [expected[i // replicas] for i in range(count)]
    print(
        f"{count} nodes, {num_sources} sources, {replicas} replicas: source / needed "
        f"{found['bytes'] / needed:.5f} of {needed} bytes, later {found['later'] / needed:.5f}"
    )
    assert found["bytes"] <= 1.001 * needed + 2 * count * num_files
    assert found["later"] == 0


def digest_epochs(config: dict[str, Any], epoch: int, **ranks: int) -> list[str]:
    """Digests of the batches of a first part, a validation, the rest, and a validation."""
    train = digest_batches(config, "train", **ranks)
    valid = digest_batches(config, "valid", **ranks)
    return [*train[:epoch], *valid, *train[epoch:], *valid]
