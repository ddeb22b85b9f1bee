"""Objects that are replaced, deleted or grow between their listing and their reading, while a revision is distributed: it has its
own bytes on all nodes, or says which file is gone. Real nodes that read one another, a real etcd, a source that counts."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from megablend.errors import MegablendError
from megablend.mirror.catalog.manifest import DataFile
from megablend.mirror.disk.pages import count_pages, pages_of_file, ranges_of_pages
from megablend.mirror.node.engine import Want
from megablend.mirror.node_parts import Node
from tests.mirror.etcd import EtcdServer
from tests.mirror.peers.clusters import PATIENT, NodesOf
from tests.storage.faulty import Faults, FaultySource

pytestmark = pytest.mark.usefixtures("obstore")
MB = 1 << 20


async def check_held(node: Node, file: DataFile, data: bytes) -> bool:
    """Whether all of a file is held; what is held of it is of these bytes."""
    every = pages_of_file(file.key.size)
    held, found = await node.engine.read_held(Want(file.key, every))
    offsets, sizes = ranges_of_pages(held, file.key.size)
    assert found == b"".join(
        data[offset : offset + size]
        for offset, size in zip(offsets.tolist(), sizes.tolist(), strict=True)
    ), file.path
    return count_pages(held) == count_pages(every)


async def ask(node: Node, verb: str, **about: Any) -> dict[str, Any]:
    return await node._answer_datasets({"verb": verb, **about})


async def list_held(nodes: NodesOf, files: dict[str, bytes], dataset: str) -> list[set[str]]:
    """For each node the paths of the latest revision's files that it holds as a whole."""
    found = []
    for node in nodes.nodes.values():
        datasets = await node._find_datasets()
        revision = datasets.catalog.list_revisions(dataset)[-1]
        # None while the manifest has not come from another node
        listed = datasets.catalog.read_known_files(revision.digest)
        assert {file.path for file in listed} <= files.keys()
        found.append(
            {file.path for file in listed if await check_held(node, file, files[file.path])}
        )
    return found


@pytest.mark.parametrize("seed", range(3))
def test_files_that_change_while_they_are_distributed(
    tmp_path: Path, etcd: EtcdServer, seed: int
) -> None:
    draw = random.Random(seed)
    sizes = {f"{i:02}.bin": draw.choice([70_000, 300_000, MB + 5]) for i in range(20)}
    files = {name: draw.randbytes(size) for name, size in sizes.items()} | {
        "big.bin": draw.randbytes(9 * MB)
    }
    changed = draw.sample(sorted(sizes), 9)
    deleted = changed[:3]

    async def do(source: FaultySource) -> None:
        about = {"endpoints": [etcd.url], "nodes_expected": 3}
        nodes = NodesOf(tmp_path, source, 3, PATIENT, nodes="etcd", etcd=about)
        async with nodes:
            for i in range(3):
                nodes.settings_of[i] = {"advertise": nodes.names[i]}
            await nodes.start(0, 1, 2)
            await nodes.meet()
            sources = [f"{source.url}/d/{name}" for name in files]
            await ask(nodes.nodes[0], "add", dataset="corpus", sources=sources)
            source.faults = Faults(rate=3e6)
            await ask(nodes.nodes[0], "want", target="corpus", whole=True)
            while source.bytes < 3 * MB:
                await asyncio.sleep(0.01)
            now = dict(source.files)
            for name in deleted:
                del now[f"d/{name}"]
            for i, name in enumerate([*changed[3:], "big.bin"]):
                # Others of the same size, grown, shrunk
                size = max(1, len(files[name]) + (0, 5000, -60_000)[i % 3])
                now[f"d/{name}"] = draw.randbytes(size)
            source.files = now
            source.faults = Faults()
            same = files.keys() - {*changed, "big.bin"}
            while not all(same <= held for held in await list_held(nodes, files, "corpus")):
                await asyncio.sleep(0.2)
            # Who waits is told of a file that is gone, wherever he asks
            held = await list_held(nodes, files, "corpus")
            for node, own in zip(nodes.nodes.values(), held, strict=True):
                lost = files.keys() - own
                assert lost <= {*changed, "big.bin"}
                if lost:
                    with pytest.raises(MegablendError) as told:
                        await ask(node, "wait", target="corpus")
                    text = str(told.value)
                    assert "at the source after it was listed" in text
                    assert any(f"{source.url}/d/{name}" in text for name in {*changed, "big.bin"})
            assert any(files.keys() - own for own in held)

            # What is there now is a revision of its own; what was not changed is not fetched again
            new = {name.removeprefix("d/"): data for name, data in now.items()}
            before = source.bytes
            there = [f"{source.url}/{name}" for name in now]
            await ask(nodes.nodes[1], "add", dataset="corpus", sources=there)
            await ask(nodes.nodes[1], "wait", target="corpus")
            assert await list_held(nodes, new, "corpus") == [{*new}] * 3
            replaced = sum(len(data) for name, data in new.items() if name not in same)
            assert source.bytes - before <= replaced + 3 * len(files)

    with FaultySource({f"d/{name}": data for name, data in files.items()}) as source:
        asyncio.run(asyncio.wait_for(do(source), 200))
