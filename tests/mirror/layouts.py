"""What nodes of neighbouring versions have in common: maps, frames, signatures, requests, values in etcd. Each is made of fixed
input, or collected from a cluster of two nodes, so that it can be compared with golden files (tools/make_golden_mirror.py)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np

from megablend.errors import CorruptFileError
from megablend.mirror.catalog.catalog import Revision, Want, pack_entry
from megablend.mirror.catalog.manifest import DataFile, Manifest
from megablend.mirror.disk.block_map import DURABLE, BlockMap, map_bytes, sum_of_pages
from megablend.mirror.disk.folder import FileKey
from megablend.mirror.disk.pages import PAGE_BYTES, Pages
from megablend.mirror.disk.room import Need
from megablend.mirror.node.frames import Kind, pack, pack_error, pack_needs, pack_pages
from megablend.mirror.peers.signing import Signer, Verifier
from megablend.storage.objects import clients
from tests.mirror.etcd import EtcdServer
from tests.mirror.manifests import make_manifest
from tests.mirror.peers.clusters import PATIENT, NodesOf
from tests.storage.faulty import FaultySource

GOLDEN = Path(__file__).parent.parent / "golden" / "mirror"
KEY = FileKey("s3://bucket/a b/\u00fc.bin", "e-1", 600_000)
PAGES = Pages(np.array([0, 2], np.uint32), np.array([0b1011, 1 << 18], np.uint64))
DATA = bytes(np.arange(3 * PAGE_BYTES + 10_176 % PAGE_BYTES, dtype=np.uint32).astype(np.uint8))
REVISION = Revision(
    dataset="corpus",
    digest="0123456789abcdef" * 2,
    num_files=2,
    num_bytes=600_007,
    added=1_764_132_000.5,
    sources=("s3://bucket/a b/",),
    by="node1:7171",
    every=600.0,
    is_plain=True,
    is_found=True,
)
WANT = Want(
    dataset="corpus",
    revision="latest",
    is_whole=True,
    until=1_864_132_000.0,
    since=1_764_132_001.0,
    nodes=("node1:7171", "node2:7171"),
    copies=2,
    by="node2:7171",
)
FILES = [DataFile("x/empty", FileKey("s3://bucket/x/empty", "e0", 0)), DataFile("\u00fc.bin", KEY)]
MANIFEST = make_manifest(FILES)


def make_map() -> bytes:
    """A map of a file of three blocks."""
    mapping = mmap.mmap(-1, map_bytes(KEY.size))
    made = BlockMap(mapping, KEY, bytes(range(16)))
    made.store_header(bytes(range(16)))
    made.store(0, 0b1011, DURABLE, sum_of_pages(0b1011, memoryview(DATA[: 3 * PAGE_BYTES])))
    made.store(2, 1 << 18, 0, 77)
    made.add_punch()
    return mapping[:]


def sign() -> bytes:
    """A signed request, and its answer."""
    signer = Signer(b"0123456789abcdef", "a:1")
    signer._client = "c" * 32
    headers = signer.sign("POST", "/v1/tell?view=3", b"body", to="b:1", session="s" * 32)
    answer = Verifier(b"0123456789abcdef", "b:1").sign_answer(headers, 200, b"answer")
    return json.dumps({"request": headers, "answer": answer}, indent=1).encode()


def _pack_needs() -> bytes:
    return pack(Kind.WANT, 1 << 40, pack_needs([Need.of(KEY, PAGES, float("inf"))]))


LAYOUTS: dict[str, Callable[[], bytes]] = {
    "map.bin": make_map,
    "needs.bin": _pack_needs,
    "pages.bin": lambda: pack_pages(PAGES, DATA),
    "error.json": lambda: pack_error(CorruptFileError("s3://b/x", "is damaged", offset=5)),
    "kinds.json": lambda: json.dumps({each.name: each.value for each in Kind}, indent=1).encode(),
    "signatures.json": sign,
    "revision.json": lambda: pack_entry(REVISION),
    "want.json": lambda: pack_entry(WANT),
    # Compressed bytes are another library's
    "manifest.txt": lambda: repr(
        (MANIFEST.revision, list(Manifest.unpack(MANIFEST.revision, MANIFEST.pack())))
    ).encode(),
}
"""Bytes, by the names of their golden files."""


def describe(value: Any) -> Any:
    """The shape of a value of JSON: names and types."""
    if isinstance(value, dict):
        return {name: describe(each) for name, each in sorted(value.items())}
    if isinstance(value, list):
        shapes: list[Any] = []
        for each in map(describe, value):
            shapes += [] if each in shapes else [each]
        return shapes
    return type(value).__name__


def _describe_body(body: bytes) -> Any:
    try:
        return describe(json.loads(body)) if body else "nothing"
    except ValueError:
        return "frames"


async def collect(folder: Path) -> dict[str, Any]:
    """Shapes of what two nodes with datasets ask of one another, and have in etcd."""
    etcd = EtcdServer(folder / "etcd")
    etcd.start()
    names = [f"{i}.bin" for i in range(8)]
    with FaultySource({f"d/{name}": name.encode() * 50_000 for name in names}) as source:
        about = {"endpoints": [etcd.url], "nodes_expected": 2}
        nodes = NodesOf(folder, source, 2, PATIENT)
        nodes.settings = {"nodes": "etcd", "etcd": about}
        try:
            with _recorded() as requests:
                async with nodes:
                    for i in (0, 1):
                        nodes.settings_of[i] = {"advertise": nodes.names[i]}
                    await nodes.start(0, 1)
                    await nodes.meet()
                    values = await _use(nodes, source, names)
                    while "POST /v1/busy" not in requests:
                        await asyncio.sleep(0.1)
        finally:
            etcd.stop()
    # Of several nodes' the longest, which has all there is
    ordered = sorted(values.items(), key=lambda item: len(item[1]))
    kept = {_anonymise(key, nodes.names): describe(json.loads(value)) for key, value in ordered}
    return {"requests": requests, "etcd": dict(sorted(kept.items()))}


@contextlib.contextmanager
def _recorded() -> Iterator[dict[str, Any]]:
    """Requests that are signed meanwhile: by method and path, names in their queries, and bodies."""
    found: dict[str, Any] = {}
    real = Signer.sign

    def sign(self: Signer, method: str, path: str, body: bytes, **more: str) -> dict[str, str]:
        place = urlsplit(path)
        query = found.setdefault(f"{method} {place.path}", {"query": [], "body": []})
        query["query"] = sorted({*query["query"], *parse_qs(place.query)})
        if (shape := _describe_body(body)) not in query["body"]:
            query["body"].append(shape)
        return real(self, method, path, body, **more)

    Signer.sign = sign  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Signer.sign = real  # type: ignore[method-assign]


async def _use(nodes: NodesOf, source: FaultySource, names: list[str]) -> dict[str, bytes]:
    """Have nodes say all that they say. Returns: what is in etcd when all is held."""
    one, other = (nodes.nodes[i] for i in (0, 1))
    sources = [f"{source.url}/d/{name}" for name in names]
    for name in ("corpus", "gone"):
        await one._answer_datasets({"verb": "add", "dataset": name, "sources": sources})
    await other._answer_datasets({"verb": "want", "target": "corpus", "whole": True})
    await one._answer_datasets({"verb": "wait", "target": "corpus"})
    await other._check()
    await one._answer_datasets({"verb": "remove", "dataset": "gone"})
    for listen in clients.busy_listeners:
        listen("s3://elsewhere", 1.0)
    assert other.cluster is not None
    etcd = other.cluster.views.etcd  # type: ignore[union-attr]
    while True:
        values, _ = await etcd.get("megablend/")
        found = {key: each.data for key, each in values.items()}
        held = [json.loads(data) for key, data in found.items() if "/held/" in key]
        is_told = any(each["listed"] for each in held) and len(held) == 2
        if is_told and not any(each["owed"] for each in held):
            return found
        await asyncio.sleep(0.2)


def _anonymise(key: str, nodes: list[str]) -> str:
    for node in nodes:
        key = key.replace(node, "NODE")
    return key.partition("@")[0] + ("@REVISION" if "@" in key else "")
