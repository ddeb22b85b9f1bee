"""Assembles the parts of a node process, and decides when the process exits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import megablend
from megablend.errors import ConfigError, DataError, MissingFileError
from megablend.mirror.disk.database import SourceState
from megablend.mirror.disk.folder import MirrorFolder
from megablend.mirror.disk.page_store import PageStore
from megablend.mirror.disk.pages import PAGE_BYTES
from megablend.mirror.greeting import Greeter
from megablend.mirror.members.launchers import Members, Pace, describe_members
from megablend.mirror.node.engine import Engine
from megablend.mirror.node.frames import PROTOCOL, Kind
from megablend.mirror.node.local_server import LeavingError, LocalServer
from megablend.mirror.node.needs import Needs
from megablend.mirror.node.source_reads import SourceReader
from megablend.mirror.node.states import States
from megablend.storage.mirror_options import MirrorOptions
from megablend.storage.object_options import ObjectOptions
from megablend.storage.objects.clients import find_pauses
from megablend.system.limited_log import LimitedLog
from megablend.system.service_manager import notify

if TYPE_CHECKING:
    from megablend.mirror.catalog.datasets import Datasets
    from megablend.mirror.peers.cluster import Cluster
    from megablend.mirror.web.server import WebServer

_LINGER_SECONDS = 600.0
"""Seconds without clients after which a node process that was started by a rank exits."""
_FAILED_SECONDS = 6.0
"""Like _LINGER_SECONDS, if the nodes of the cluster cannot work together. It is long enough for all
nodes to notice the failure, and short enough that the process has exited when a job with better
settings starts."""
_RESERVE_SHARE = 20
"""By default, 1/20 of the file system is left free."""
_WATCH_SECONDS = 1.0
_SCRUB_BYTES = 8 << 20
_STOP_SECONDS = 0.05
"""Seconds between a STOP request and the exit of the process, so that the reply is sent."""


class Node:
    """A node process: its parts, and its responses to clients.

    Args:
        options: the settings of the mirror, from the service's config or from the rank that started
            the process.
        objects: the settings of object stores.
        folder: the mirror's folder, whose lock this process holds.
        members: the nodes of the cluster; None if there are no other nodes.
        is_service: whether the process is a service, which outlives its clients and reads sources
            with its own credentials.
    """

    def __init__(
        self,
        options: MirrorOptions,
        objects: ObjectOptions,
        folder: MirrorFolder,
        members: Members | None,
        *,
        is_service: bool,
        pace: Pace = Pace(),  # noqa: B008  (a tuple)
    ) -> None:
        self.options = options
        self._folder = folder
        self._is_service = is_service
        self._pace = pace
        self.source = SourceReader(options, objects)
        self.cluster = None if members is None else self._make_cluster(members)
        # In a cluster with etcd, other nodes may have added datasets that are wanted here
        self._has_datasets = folder.datasets_path.exists() or options.etcd is not None
        self._datasets: Datasets | None = None
        self._datasets_lock = asyncio.Lock()
        self._datasets_opened = asyncio.Event()
        self.engine = Engine(self._open_store(), self.cluster or self.source)
        self.needs = Needs(self.engine, None if self.cluster is None else self.cluster.tell_needs)
        self._greeter = Greeter(
            options, objects, folder, describe_members(options, os.environ), is_service
        )
        self._started = time.time()
        self._ended = asyncio.Event()
        self._log = LimitedLog()
        self.server = LocalServer(
            folder,
            self.engine,
            States(self.engine, self.source, self._find_listed),
            self.needs,
            None if self.cluster is None else self.cluster.select,
            self._greet,
            {
                Kind.STATUS: self.get_status,
                Kind.STOP: self._stop,
                Kind.SCRUB: self._scrub_all,
                Kind.REMOVE: self._remove,
                Kind.CHECK: self._check,
            },
            self._answer_datasets,
        )
        self.web = None if options.data_port is None else self._make_web()

    def _make_cluster(self, members: Members) -> Cluster:
        with requires_nodes("nodes"):
            from megablend.mirror.peers.cluster import Cluster
        paths = ("/v1/manifest", "/v1/forgotten") if members.views is not None else ()
        handlers = {("POST", path): partial(self._answer_mate, path) for path in paths}
        return Cluster(self.options, members, self.source, self.get_status, self._pace, handlers)

    def _open_store(self) -> PageStore:
        file_system = os.statvfs(self._folder.path)
        num_bytes = file_system.f_blocks * file_system.f_frsize
        reserve = self.options.reserve
        if reserve is None:
            reserve = num_bytes // _RESERVE_SHARE
        elif reserve >= num_bytes:
            raise ConfigError(
                f"{self._folder.path}: `mirror.reserve` is {reserve} bytes, but the file system has only {num_bytes}, which "
                "leaves nothing for the mirror\n"
                "lower `mirror.reserve`, or set `mirror.folder` to a folder of another file system"
            )
        # If there are datasets, the store does not evict yet: it does not know which are pinned
        evicts = not self._has_datasets
        return PageStore(self._folder, size=self.options.size, reserve=reserve, evicts=evicts)

    def _make_web(self) -> WebServer:
        with requires_nodes("data_port"):
            from megablend.mirror.web.server import WebServer

        async def find_datasets() -> Datasets | None:
            return await self._find_datasets() if self._has_datasets else None

        return WebServer(
            self.options, self.engine, find_datasets, self.get_status, self.server.note_use
        )

    async def run(self, ready: Callable[[], None]) -> None:
        """Serve clients until stopped. `ready` is called as soon as clients can connect."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ended.set)
        if self.cluster is not None:
            await self.cluster.start(self.engine, self.needs)
        if self._has_datasets:
            # Before anything is evicted, since the store does not know yet what is pinned
            await self._find_datasets()
        if self.web is not None:
            await self.web.start()
        await self.server.start()
        ready()
        self._notify("READY=1")
        tasks = [
            asyncio.ensure_future(self._ended.wait()),
            asyncio.ensure_future(self.needs.run()),
            asyncio.ensure_future(self._watch()),
            asyncio.ensure_future(self._hold_datasets()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises the error of a task that failed
        finally:
            self._notify("STOPPING=1")
            await self.server.close()
            for task in tasks:
                task.cancel()
            if self.web is not None:
                await self.web.stop()
            if self.cluster is not None:
                await self.cluster.stop()
            await self.engine.close()

    def _notify(self, state: str) -> None:
        if self._is_service:
            notify(state)

    async def _watch(self) -> None:
        """Every second, evict pages until the reserve is free. While there are no clients, also
        check a part of the held pages, and exit if the process is no longer needed."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            try:
                await self.engine.call(self.engine.store.evict_to_reserve)
                if not self.server.num_clients:
                    await self.engine.call(self.engine.store.scrub, _SCRUB_BYTES)
            except MissingFileError:
                raise  # the folder was removed
            except DataError as error:
                # What is held can still be read, and the disk may be mended
                self._log.warn("the disk is failing", str(error))
            self._notify("WATCHDOG=1")  # the event loop works, and the disk responds
            if self.server.num_clients:
                continue
            has_failed = self.cluster is not None and self.cluster.has_failed
            linger = _FAILED_SECONDS if has_failed else _LINGER_SECONDS
            if not self._is_service and time.monotonic() - self.server.idle_since > linger:
                self._ended.set()

    def _greet(self, hello: dict[str, Any]) -> dict[str, Any]:
        """Return the response to a client's greeting. Raises: LeavingError if this process exits,
        so that the client starts another one; ConfigError if the client cannot use this process."""
        differing: list[str] = []
        # Commands may be of any version, so that `megablend node stop` always works
        if "options" in hello:
            try:
                differing = self._greeter.compare(hello, self.server)
            except LeavingError:
                self._ended.set()
                raise
            self.source.add_queries(dict(hello["queries"]))
        return {"pid": os.getpid(), "version": megablend.__version__, "differing": differing}

    async def get_status(self) -> dict[str, Any]:
        """Return the status of the node as JSON: what it holds, and counts since its start."""
        usage = await self.engine.call(self.engine.store.usage)
        return {
            "pid": os.getpid(),
            "version": megablend.__version__,
            "protocol": PROTOCOL,
            "folder": str(self._folder.path),
            "service": self._is_service,
            "started": self._started,
            "clients": self.server.num_clients,
            "held_bytes": usage.num_bytes,
            "files": usage.num_files,
            "evicted_bytes": self.engine.store.num_evicted * PAGE_BYTES,
            "source_bytes": self.source.num_bytes,
            "source_requests": self.source.requests,
            "source_pauses": find_pauses(),
            "peer_bytes": self.engine.peer_bytes,
            "read_bytes": None if self.web is None else self.web.num_bytes,
            "wanted": None if self._datasets is None else self._datasets.holding.count(),
            "listed": None if self._datasets is None else self._datasets.listings.count(),
            "cluster": None if self.cluster is None else self.cluster.as_json(),
        }

    async def _stop(self) -> dict[str, Any]:
        asyncio.get_running_loop().call_later(_STOP_SECONDS, self._ended.set)
        return {"pid": os.getpid()}

    async def _scrub_all(self) -> dict[str, Any]:
        num_bytes = 0
        wrong: list[str] = []
        is_done = False
        while not is_done:
            is_first = num_bytes == 0
            report = await self.engine.call(self.engine.store.scrub, _SCRUB_BYTES, is_first)
            num_bytes += report.num_bytes
            wrong += [
                f"{key.location}: blocks {pages.blocks.tolist()}" for key, pages in report.wrong
            ]
            is_done = report.is_round_done
        return {"bytes": num_bytes, "wrong": wrong}

    async def _remove(self) -> dict[str, Any]:
        usage = await self.engine.call(self.engine.store.usage)
        if self._datasets is not None:
            await self.engine.call(self._datasets.remove_all)
        await self.engine.call(self.engine.store.remove_all)
        self._folder.remove()
        self._ended.set()
        return {"bytes": usage.num_bytes, "files": usage.num_files}

    async def _check(self) -> dict[str, Any]:
        if self.cluster is None:
            return {"nodes": 1, "failures": []}
        return {"nodes": self.cluster.num_nodes, "failures": await self.cluster.check()}

    async def _find_datasets(self) -> Datasets:
        """Return the datasets of this mirror, which are opened on the first call."""
        from megablend.mirror.catalog.datasets import Datasets

        async with self._datasets_lock:
            if self._datasets is None:
                self._datasets = await Datasets.open(
                    self.engine, self.source, self.needs, self.cluster
                )
                if self.cluster is not None:
                    self.cluster.view_listeners.append(self._datasets.holding.change_nodes)
                self._has_datasets = True
                self._datasets_opened.set()
            return self._datasets

    async def _answer_datasets(self, request: dict[str, Any]) -> dict[str, Any]:
        return await (await self._find_datasets()).answer(request)

    async def _answer_mate(
        self, path: str, node: str, query: Mapping[str, str], body: bytes
    ) -> bytes:
        """Return the response to another node's request about datasets."""
        shared = (await self._find_datasets()).shared
        assert shared is not None, "they are shared where there is etcd"
        return await shared.answer(path, body)

    async def _hold_datasets(self) -> None:
        """Wait until there are datasets. Then hold wanted revisions, until cancelled."""
        await self._datasets_opened.wait()
        await (await self._find_datasets()).run()

    async def _find_listed(self, location: str) -> SourceState | None:
        """Return the state of a file in the listings of datasets; None if it is unknown."""
        if self._datasets is None:
            return None
        return await asyncio.to_thread(self._datasets.catalog.find_state, location)


@contextlib.contextmanager
def requires_nodes(setting: str) -> Iterator[None]:
    """Convert an ImportError within the context into a ConfigError about `setting`."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"{setting}: needs a package that is missing ({error})\ninstall megablend[nodes] on each node"
        ) from None
