"""Clusters of real nodes in one process, over loopback, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from megablend.mirror.disk.folder import FileKey, MirrorFolder
from megablend.mirror.disk.pages import Pages, pages_of_file, ranges_of_pages
from megablend.mirror.members.launchers import Members, Pace, Torchrun
from megablend.mirror.members.views import View
from megablend.mirror.node.engine import Want
from megablend.mirror.node_parts import Node
from megablend.mirror.peers.assembly import Assembly
from megablend.mirror.peers.cluster import Cluster
from megablend.mirror.process import make_views
from megablend.storage.mirror_options import parse_mirror
from megablend.storage.object_options import ObjectOptions
from tests.mirror.peers.links import Link
from tests.storage.faulty import FaultySource
from tests.storage.objects.servers.start import find_ports

QUICK = Pace(ping=0.2, silent=1.0, gone=6.0, complete=20.0)
PATIENT = Pace(ping=0.2, silent=20.0, gone=6.0, complete=60.0)
"""A busy machine takes nobody for silent."""
MOST_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
# Several nodes are in one process, both ends of their connections too
resource.setrlimit(resource.RLIMIT_NOFILE, (MOST_FILES, MOST_FILES))


class HandedView:
    """The views that a test hands to one node, in the place of EtcdMembers."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._queue = asyncio.Queue[View]()

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    def find_doubt(self, number: int) -> None:
        return None

    def as_json(self) -> dict[str, Any]:
        return {}

    def hand(self, view: View) -> None:
        """From now on the node has this one, too."""
        self._queue.put_nowait(view)

    async def follow(self) -> AsyncIterator[View]:
        while True:
            yield await self._queue.get()


class HandedViews:
    """Views that a test hands to nodes of a cluster that has so many at first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._of: dict[int, HandedView] = {}
        self._last: dict[int, tuple[str, ...]] = {}

    def start(self, i: int) -> HandedView:
        """Those of a node that starts."""
        self._of[i] = HandedView(self._size)
        return self._of[i]

    def hand(self, nodes: NodesOf, number: int, names: Iterable[int], to: Iterable[int]) -> None:
        """A view of nodes by number, to some of them."""
        listed = tuple(sorted(nodes.names[i] for i in names))
        self._last[number] = listed
        earlier = tuple(self._last[n] for n in range(number - 1, number - 5, -1) if n in self._last)
        view = View(number, listed, earlier)
        for i in to:
            self._of[i].hand(view)


class NodesOf:
    """Nodes that read one source.

    Args:
        folder: of their mirrors.
        source: what they read.
        count: how many there are, at most.
        has_links: whether they reach one another by a `Link` each.
        settings: of each mirror; those of some nodes are in `settings_of`.
    """

    def __init__(
        self,
        folder: Path,
        source: FaultySource,
        count: int,
        pace: Pace = QUICK,
        *,
        has_links: bool = False,
        **settings: Any,
    ) -> None:
        self.folder = folder
        self.source = source
        self.pace = pace
        self.ports = find_ports(count)
        self.names = [f"127.0.0.1:{port}" for port in self.ports]
        self.links = [Link(port) for port in self.ports] if has_links else []
        self.settings = settings
        self.settings_of: dict[int, dict[str, Any]] = {}
        self.objects_of: dict[int, ObjectOptions] = {}
        self.nodes: dict[int, Node] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._locks = contextlib.ExitStack()
        self._locks_of: dict[int, contextlib.ExitStack] = {}

    async def __aenter__(self) -> NodesOf:
        for i, link in enumerate(self.links):
            self.names[i] = await link.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for i in list(self._tasks):
            await self.stop(i)
        for link in self.links:
            await link.stop()

    async def start(
        self,
        *which: int,
        members: list[int] | None = None,
        torchrun: int | None = None,
        views: HandedViews | None = None,
    ) -> None:
        """Start nodes, of a cluster of these members (all); or of a job of so many machines; or where
        views are handed to them."""
        for i in which:
            if self.links:
                await self.links[i].start()
            path = self.folder / f"node{i}"
            name = self.names[i]
            listed = sorted({name, *(self.names[j] for j in members or range(len(self.names)))})
            options = parse_mirror(
                {
                    "folder": str(path),
                    "prefixes": [f"{self.source.url}/"],
                    "reserve": 0,
                    "nodes": listed,
                    "port": self.ports[i],
                    **self.settings,
                    **self.settings_of.get(i, {}),
                }
            )
            found = Members(tuple(listed), name)
            if torchrun is not None:
                found = Members((), name, Torchrun(i, torchrun, self.names[0]))
            folder = MirrorFolder.create(str(path), group=None)
            if options.etcd is not None:
                found = Members((), name, views=make_views(options, options.etcd, name, folder))
            if views is not None:
                handed: Any = views.start(i)  # it has what a Cluster uses of EtcdMembers
                found = Members((), name, views=handed)
            lock = contextlib.ExitStack()
            lock.enter_context(folder.lock())
            self._locks_of[i] = lock
            node = Node(
                options,
                self.objects_of.get(i, ObjectOptions()),
                folder,
                found,
                is_service=True,
                pace=self.pace,
            )
            self.nodes[i] = node
            ready = asyncio.Event()
            self._tasks[i] = asyncio.ensure_future(node.run(ready.set))
            waiting = asyncio.ensure_future(ready.wait())
            await asyncio.wait([waiting, self._tasks[i]], return_when=asyncio.FIRST_COMPLETED)
            if self._tasks[i].done():
                waiting.cancel()
                self.nodes.pop(i)
                self._locks_of.pop(i).close()
                await self._tasks.pop(i)

    async def stop(self, i: int, *, empties: bool = False) -> None:
        """End a node, as far as others and the source see: at once, if it has a link."""
        if self.links:
            self.links[i].cut()
            # Its end takes a moment, in which it would begin further reads
            self.nodes[i].source.read = _never  # type: ignore[assignment, method-assign]
        task = self._tasks.pop(i)
        task.cancel()
        await asyncio.wait([task])
        self.nodes.pop(i)
        self._locks_of.pop(i).close()
        if empties:
            shutil.rmtree(self.folder / f"node{i}")

    def cluster(self, i: int) -> Cluster:
        cluster = self.nodes[i].cluster
        assert cluster is not None
        return cluster

    def assembly(self, i: int) -> Assembly:
        """Of the view that is in force."""
        return self.cluster(i)._assemblies[0]

    async def key(self, name: str) -> FileKey:
        """Of a file of the source."""
        location = f"{self.source.url}/{name}"
        state = await next(iter(self.nodes.values())).source.stat(location)
        return FileKey(location, state.etag, state.size)

    async def read(self, i: int, name: str, pages: Pages | None = None, due: float = 0.0) -> None:
        """Read pages of a file by a node, and compare them."""
        key = await self.key(name)
        engine = self.nodes[i].engine
        pages = pages_of_file(key.size) if pages is None else pages
        await engine.serve(Want(key, pages, due or time.monotonic()))
        held, data = await engine.read_held(Want(key, pages))
        assert np.array_equal(held.blocks, pages.blocks)
        assert np.array_equal(held.masks, pages.masks)
        offsets, sizes = ranges_of_pages(pages, key.size)
        true = self.source.files[name]
        assert data == b"".join(
            true[offset : offset + size]
            for offset, size in zip(offsets.tolist(), sizes.tolist(), strict=True)
        )

    async def read_all(self, *which: int, names: list[str] | None = None) -> None:
        """All of these nodes read all files at the same time."""
        await asyncio.gather(
            *(
                self.read(i, name)
                for i in which or self.nodes
                for name in names or self.source.files
            )
        )

    async def meet(self) -> None:
        """Wait until all work together, and nobody takes another one to be away."""
        states = [self.cluster(i).as_json for i in self.nodes]
        await until(lambda: all(s()["formed"] and not s()["away"] for s in states))

    async def settle(self) -> None:
        """Wait until all copies are paid."""
        await until(lambda: all(_is_settled(self.cluster(i)) for i in self.nodes))


async def _never(*_: object) -> None:
    await asyncio.Event().wait()


def _is_settled(cluster: Cluster) -> bool:
    state = cluster.as_json()
    # What is being told is no debt any more
    is_telling = any(peer._num_pending for peer in cluster._peers.values())
    debts = state.get("bytes_to_copy"), state.get("copying"), state.get("untold_nodes")
    return bool(state["formed"] and not is_telling and not any(debts))


async def until(condition: Callable[[], bool | Awaitable[bool]], seconds: float = 100.0) -> None:
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not come about"
        await asyncio.sleep(0.02)
