"""The node process of a mirror: how it starts, what it runs, and when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

import megablend
from megablend.arrays import Bools, Uint32s, Uint64s
from megablend.errors import ConfigError, MegablendError
from megablend.mirror.disk.folder import FolderInUseError, MirrorFolder
from megablend.mirror.disk.page_store import PageStore
from megablend.mirror.disk.pages import PAGE_BYTES
from megablend.mirror.disk.room import Need
from megablend.mirror.members.launchers import Members, Pace, describe_members, find_members
from megablend.mirror.node.engine import Engine
from megablend.mirror.node.frames import PROTOCOL, Kind
from megablend.mirror.node.local_server import LeavingError, LocalServer
from megablend.mirror.node.metrics import format_metrics
from megablend.mirror.node.needs import Needs
from megablend.mirror.node.source_reads import KnownState, SourceReader, States
from megablend.storage.mirror_options import VARIABLE, EtcdOptions, MirrorOptions
from megablend.storage.mirror_parser import parse_mirror
from megablend.storage.object_options import ObjectOptions
from megablend.storage.objects.clients import divide_limits, find_pauses
from megablend.system.log import LOG
from megablend.system.service_manager import notify

if TYPE_CHECKING:
    from megablend.mirror.catalog.datasets import Datasets
    from megablend.mirror.catalog.mates import Mates
    from megablend.mirror.members.views import Views
    from megablend.mirror.peers.cluster import Cluster
    from megablend.mirror.web.server import WebServer

LINGER_SECONDS = 600.0
"""How long after its last client a node process ends that a rank has started."""
_FAILED_SECONDS = 6.0
"""As LINGER_SECONDS, if the nodes of its cluster cannot work together: long enough for all of them
to notice it, and short enough that it has ended when a job with better settings starts."""
_SCRUB_BYTES = 8 << 20
_SCRUB_SECONDS = 1.0
_MAX_LOG_BYTES = 1 << 20
_ETCD_PREFIX = "MEGABLEND_ETCD_"
"""Prefix of the variables with etcd's user and password: USER and PASSWORD follow."""
_CREDENTIAL_PREFIXES = ("AWS_", "GOOGLE_", "AZURE_", "HTTPS_PROXY", "HTTP_PROXY")
"""Prefixes of variables that decide how object stores are read."""


class Node:
    """The parts of a node process, and its answers to clients.

    Args:
        options: the mirror's settings: a service's own, or those of the rank that started it.
        objects: settings by which the source is reached.
        folder: the mirror's folder, whose lock this process holds.
        members: the nodes of the cluster; None without other nodes.
        is_service: whether it outlives its clients, and reads with its own credentials for all of
            them.
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
        self._pace = pace
        self.options = options
        self._objects = objects
        self._is_service = is_service
        self._folder = folder
        reserve = options.reserve
        if reserve is None:
            state = os.statvfs(folder.path)
            reserve = state.f_blocks * state.f_frsize // 20
        self.source = SourceReader(options, objects)
        self._members = members
        # In a cluster with etcd, other nodes may have said what is wanted here
        self._has_datasets = folder.datasets_path.exists() or options.etcd is not None
        store = PageStore(folder, size=options.size, reserve=reserve, evicts=not self._has_datasets)
        self._described_members = describe_members(options, os.environ)
        self.cluster = None if members is None else self._make_cluster(members)
        self.engine = Engine(store, self.cluster or self.source)
        states = States(self.engine, self.source, self._find_listed)
        tell = None if self.cluster is None else self.cluster.tell_needs
        self.needs = Needs(self.engine, tell, self._select)
        self._datasets: Datasets | None = None
        self._datasets_lock = asyncio.Lock()
        self._datasets_opened = asyncio.Event()
        self._ended = asyncio.Event()
        self._started = time.time()
        commands = {
            Kind.STATUS: self.get_status,
            Kind.STOP: self._stop,
            Kind.SCRUB: self._scrub_all,
            Kind.REMOVE: self._remove,
            Kind.CHECK: self._check,
        }
        self.server = LocalServer(
            folder, self.engine, states, self.needs, self._greet, commands, self._answer_datasets
        )
        self.web = None if options.data_port is None else self._make_web()

    def _make_cluster(self, members: Members) -> Cluster:
        with _requires_nodes("nodes"):
            from megablend.mirror.peers.cluster import Cluster
        paths = ("/v1/manifest", "/v1/forgotten") if members.views is not None else ()
        more = {("POST", path): partial(self._answer_mate, path) for path in paths}
        return Cluster(self.options, members, self.source, self.get_metrics, self._pace, more)

    async def _answer_mate(
        self, path: str, node: str, query: Mapping[str, str], body: bytes
    ) -> bytes:
        """Answer another node's request about datasets."""
        shared = (await self._find_datasets()).shared
        assert shared is not None, "they are shared where there is etcd"
        return await shared.answer(path, body)

    def _make_web(self) -> WebServer:
        with _requires_nodes("data_port"):
            from megablend.mirror.web.server import WebServer

        async def find_datasets() -> Datasets | None:
            is_there = self._has_datasets or self._datasets is not None
            return await self._find_datasets() if is_there else None

        return WebServer(
            self.options, self.engine, find_datasets, self.get_status, self.server.note_use
        )

    async def _find_datasets(self) -> Datasets:
        """The datasets that are wanted here. Opened, and imported, when they are first needed."""
        from megablend.mirror.catalog.datasets import Datasets

        async with self._datasets_lock:
            if self._datasets is None:
                self._datasets = await Datasets.open(
                    self.engine, self.source, self.needs, self._find_own, self._find_mates()
                )
                if self.cluster is not None:
                    self.cluster.view_listeners.append(self._datasets.holding.change_nodes)
                self._datasets_opened.set()
            return self._datasets

    def _find_mates(self) -> Mates | None:
        views = None if self._members is None else self._members.views
        if views is None or self.cluster is None:
            return None
        from megablend.mirror.catalog.mates import Mates
        from megablend.mirror.members.etcd_members import EtcdMembers

        assert isinstance(views, EtcdMembers)
        return Mates(self.cluster, views)

    async def _find_listed(self, location: str) -> KnownState | None:
        """The state of a file as datasets list it."""
        if self._datasets is None:
            return None
        return await asyncio.to_thread(self._datasets.catalog.find_state, location)

    async def _answer_datasets(self, request: dict[str, Any]) -> dict[str, Any]:
        return await (await self._find_datasets()).answer(request)

    async def _hold_datasets(self) -> None:
        await self._datasets_opened.wait()
        await (await self._find_datasets()).run()

    async def run(self, ready: Callable[[], None]) -> None:
        """Serve until stopped; `ready` is called as soon as clients are answered."""
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
            asyncio.ensure_future(each)
            for each in (self.needs.run(), self._watch(), self._hold_datasets())
        ]
        ended = asyncio.ensure_future(self._ended.wait())
        try:
            done, _ = await asyncio.wait([ended, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
        finally:
            self._notify("STOPPING=1")
            self.server.close()
            for each in (ended, *tasks):
                each.cancel()
            if self.web is not None:
                await self.web.stop()
            if self.cluster is not None:
                await self.cluster.stop()
            await self.engine.close()

    def _notify(self, state: str) -> None:
        if self._is_service:
            notify(state)

    async def _watch(self) -> None:
        """Each second, evict until the reserve is free; without clients, check a part of the held
        pages, and end if nobody needs this process any more."""
        while True:
            await asyncio.sleep(_SCRUB_SECONDS)
            await self.engine.call(self.engine.store.evict_to_reserve)
            self._notify("WATCHDOG=1")  # the event loop and the disk still work
            if not self.server.num_clients:
                await self.engine.call(self.engine.store.scrub, _SCRUB_BYTES)
                idle = time.monotonic() - self.server.idle_since
                has_failed = self.cluster is not None and self.cluster.has_failed
                if not self._is_service and idle > (
                    _FAILED_SECONDS if has_failed else LINGER_SECONDS
                ):
                    self._ended.set()

    def _greet(self, hello: dict[str, Any]) -> dict[str, Any]:
        """Answer a client's greeting. A process that a job has started, and through which no rank
        reads, ends if its settings are not those of the client, so that another one can take its
        place.

        Raises: LeavingError if it ends; ConfigError if it cannot end, and the client cannot use it.
        """
        answer = {"pid": os.getpid(), "version": megablend.__version__, "differing": []}
        is_reader = "options" in hello
        has_to_stay = self._is_service or self.server.is_read
        if not is_reader:
            # A command may be of any version, so that `megablend node stop` always works
            return answer
        if hello.get("protocol") != PROTOCOL:
            if not has_to_stay:
                self._leave()
            raise ConfigError(
                f"{self._folder.path}: the node process speaks protocol {PROTOCOL}, but this process speaks "
                f"{hello.get('protocol')}\n"
                "run the same version of megablend in both, and stop the node process (`megablend node stop`)"
            )
        own = self.options if hello["members"] else self.options.alone()
        asked = parse_mirror(hello["options"])
        differing = [
            each.name
            for each in dataclasses.fields(MirrorOptions)
            if getattr(own, each.name) != getattr(asked, each.name)
        ]
        if not self._is_service:
            credentials = find_credentials(self._objects, self._folder.id)
            has_other_credentials = hello["credentials"] != credentials
            has_other_nodes = hello["members"] not in ([], self._described_members)
            if not has_to_stay and (has_other_credentials or has_other_nodes or differing):
                self._leave()
            if has_other_credentials:
                raise ConfigError(
                    f"{self._folder.path}: its node process reads object stores with other credentials or settings "
                    "than this process\n"
                    "use another `folder`, wait until the jobs that read there have ended, or run it as a service "
                    "(`megablend node run`), which reads with settings of its own"
                )
            if has_other_nodes and self.server.is_read_by_a_cluster:
                raise ConfigError(
                    f"{self._folder.path}: is in use by a job with other nodes\n"
                    "use another `folder`, or wait for that job to end"
                )
            if has_other_nodes:
                self._leave()
        self.source.add_queries(dict(hello["queries"]))
        return answer | {"differing": differing}

    def _leave(self) -> NoReturn:
        """End, so that the client starts another process. Raises: LeavingError."""
        self._ended.set()
        raise LeavingError

    async def get_status(self) -> dict[str, Any]:
        """What the node holds and has done."""
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

    async def get_metrics(self) -> str:
        """The status as text for Prometheus."""
        return format_metrics(await self.get_status())

    async def _select(self, need: Need) -> Need:
        """The part of a need that this node is to hold, whichever node reads it."""
        return need if self.cluster is None else await self.cluster.select(need)

    async def _find_own(self, ids: Uint64s, blocks: Uint32s) -> Bools:
        """Which blocks of many files this node is to hold: bool [rows]; see Homes.order_rows."""
        if self.cluster is None:
            return np.ones(len(blocks), np.bool_)
        return await self.cluster.find_own(ids, blocks)

    async def _check(self) -> dict[str, Any]:
        if self.cluster is None:
            return {"nodes": 1, "failures": []}
        return {"nodes": self.cluster.num_nodes, "failures": await self.cluster.check()}

    async def _stop(self) -> dict[str, Any]:
        asyncio.get_running_loop().call_later(0.05, self._ended.set)
        return {"pid": os.getpid()}

    async def _scrub_all(self) -> dict[str, Any]:
        num_bytes = 0
        wrong = list[str]()
        is_done = False
        while not is_done:
            report = await self.engine.call(self.engine.store.scrub, _SCRUB_BYTES, not num_bytes)
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


@contextlib.contextmanager
def _requires_nodes(setting: str) -> Iterator[None]:
    """Turn an ImportError of the context into a ConfigError about `setting`."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"{setting}: cannot be used: {error}\ninstall megablend[nodes] on each node"
        ) from None


def find_credentials(objects: ObjectOptions, salt: str) -> str:
    """A digest of what decides how object stores are read: settings, and variables with
    credentials. Digests of different folders cannot be compared, since each folder has its own
    salt."""
    variables = sorted(
        each for each in os.environ.items() if each[0].upper().startswith(_CREDENTIAL_PREFIXES)
    )
    text = json.dumps([objects.by_prefix, variables], sort_keys=True)
    return hashlib.blake2b(
        text.encode("utf-8", "surrogateescape"), key=salt.encode()[:64]
    ).hexdigest()


def make_views(options: MirrorOptions, about: EtcdOptions, own: str, folder: MirrorFolder) -> Views:
    """Make the views of a cluster whose nodes meet in etcd. Raises: ConfigError if a file of the
    settings cannot be used."""
    with _requires_nodes("nodes"):
        from megablend.mirror.members.etcd import Etcd
        from megablend.mirror.members.etcd_members import EtcdMembers
        from megablend.mirror.peers.signing import make_contexts, read_private
    password = os.environ.get(f"{_ETCD_PREFIX}PASSWORD")
    if about.password_file is not None:
        password = read_private("etcd: password_file", about.password_file).decode().strip()
    contexts = make_contexts(about.tls)
    etcd = Etcd(
        about.endpoints,
        tls=None if contexts is None else contexts[1],
        user=about.user or os.environ.get(f"{_ETCD_PREFIX}USER"),
        password=password,
    )
    return EtcdMembers(etcd, about, own, folder)


def run_node(
    options: MirrorOptions,
    objects: ObjectOptions,
    *,
    is_service: bool,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Run a node process until it is stopped.

    Args:
        ready: called as soon as clients are answered.

    Raises: ConfigError if the folder cannot be used; FolderInUseError if another process owns it.
    """
    # So that its own reads of the source do not go through a mirror
    os.environ.pop(VARIABLE, None)
    folder = MirrorFolder.create(options.folder, group=options.group)
    members = find_members(options, os.environ)
    if members is not None and options.etcd is not None:
        members = members._replace(views=make_views(options, options.etcd, members.own, folder))
    if members is not None:
        # The nodes share the limits of the source
        divide_limits(members.size)
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Each request to another node may take a connection
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    with folder.lock():

        async def run() -> None:
            node = Node(options, objects, folder, members, is_service=is_service)
            if (cluster := node.cluster) is not None and options.etcd is not None:
                cluster.view_listeners.append(lambda: divide_limits(cluster.num_nodes))
            await node.run(ready)

        asyncio.run(run())


def main() -> None:
    """`python -m megablend.mirror.process`, started by a rank, with settings as JSON on stdin. It
    forks. The parent ends as soon as the child answers clients, or with a message why it does
    not."""
    settings = json.load(sys.stdin)
    options = parse_mirror(settings["mirror"])
    by_prefix = settings["by_prefix"]
    objects = ObjectOptions(tuple((prefix, tuple(map(tuple, each))) for prefix, each in by_prefix))
    reading, writing = os.pipe()
    if pid := os.fork():
        os.close(writing)
        message = os.fdopen(reading).read()
        os.waitpid(pid, os.WNOHANG)
        sys.stderr.write(message.removeprefix("ready"))
        sys.exit(0 if message.startswith("ready") else 1)
    os.close(reading)
    os.setsid()
    os.chdir("/")

    def tell(message: str) -> None:
        with contextlib.suppress(OSError):
            os.write(writing, message.encode())
        os.close(writing)

    def ready() -> None:
        _log_to(Path(options.folder) / "node.log")
        tell("ready")

    try:
        run_node(options, objects, is_service=False, ready=ready)
    except FolderInUseError:
        tell("ready")  # clients are answered, by another process
    except MegablendError as error:
        tell(str(error))
    os._exit(0)


def _log_to(path: Path) -> None:
    """Log to a file from now on, which begins anew when it is too long, and close the starter's
    files."""
    if path.exists() and path.stat().st_size > _MAX_LOG_BYTES:
        path.unlink()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    LOG.info("megablend %s: node process %d", megablend.__version__, os.getpid())


if __name__ == "__main__":
    main()
