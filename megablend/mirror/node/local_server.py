"""Responds to ranks and commands on this machine, at a unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import grp
import os
import pwd
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megablend.errors import ConfigError, MegablendError
from megablend.mirror.disk.folder import MirrorFolder
from megablend.mirror.disk.room import Need
from megablend.mirror.node.engine import Engine, Mode, Want, sum_origins
from megablend.mirror.node.fill import fill
from megablend.mirror.node.frames import (
    HEAD,
    MAX_PAYLOAD,
    ORIGINS,
    Kind,
    pack,
    pack_error,
    pack_json,
    unpack_needs,
)
from megablend.mirror.node.needs import Needs
from megablend.mirror.node.states import States
from megablend.storage.base import FileStat
from megablend.system.close_server import close_server
from megablend.system.limited_json import parse_json
from megablend.system.limited_log import LimitedLog
from megablend.system.log import LOG

_MAX_AT_A_TIME = 256
"""The maximum number of requests of a client that are processed at a time. Others wait."""
_OF_FILES = (Kind.STAT, Kind.KNOWN, Kind.WANT, Kind.DUE, Kind.DISTRUST, Kind.FILL)
"""The kinds of requests about files, which only clients that read files may send."""
_CREDENTIALS = struct.Struct("3i")
"""The format of Linux's struct ucred: process id, user id, group id."""


class LeavingError(Exception):
    """Raised if the node process is about to exit, so that the client starts another one."""


@dataclass(eq=False)
class LocalServer:
    """The server of a node process for clients on the same machine."""

    folder: MirrorFolder
    engine: Engine
    states: States
    needs: Needs
    select: Callable[[list[Need]], Awaitable[list[Need]]] | None
    """Returns the pages of needs that this node should hold; None if it should hold all of them."""
    describe: Callable[[dict[str, Any]], dict[str, Any]]
    """Returns the node's response to a client's HELLO; raises ConfigError to refuse the client."""
    commands: Mapping[Kind, Callable[[], Awaitable[Any]]]
    """The functions that return the responses to further requests, by kind."""
    answer_datasets: Callable[[dict[str, Any]], Awaitable[Any]]
    """Returns the response to a request of kind DATASETS."""
    num_clients: int = 0
    idle_since: float = field(default_factory=time.monotonic)
    _log: LimitedLog = field(default_factory=LimitedLog)
    _server: asyncio.Server | None = None
    _readers: dict[str, list[Any]] = field(default_factory=dict)
    """The clients that read files, each with the nodes of its job; the list is empty for a job
    without other nodes."""

    @property
    def is_read(self) -> bool:
        """Whether any connected client reads files."""
        return bool(self._readers)

    @property
    def is_read_by_a_cluster(self) -> bool:
        """Whether any connected client reads files for a job on several nodes."""
        return any(self._readers.values())

    def note_use(self) -> None:
        """Record that the mirror was used in another way than through this socket."""
        self.idle_since = time.monotonic()

    async def start(self) -> None:
        """Start listening. An existing socket is replaced: no process uses it, since this one holds
        the folder's lock."""
        path = self.folder.socket_path
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with self.folder.socket_address() as address:
            listener.bind(address)
        path.chmod(0o600 if self.folder.group is None else 0o660)
        self._server = await asyncio.start_unix_server(self._serve, sock=listener, backlog=1024)

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            await close_server(self._server)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_clients += 1
        turns = asyncio.Semaphore(_MAX_AT_A_TIME)
        tasks: set[asyncio.Task[None]] = set()
        name = f"client-{id(writer):x}"
        try:
            _check_client(writer.get_extra_info("socket"), self.folder)
            while True:
                size, kind, number = HEAD.unpack(await reader.readexactly(HEAD.size))
                if size > MAX_PAYLOAD:
                    raise ConfigError(
                        f"refused a request of {size} bytes: the limit is {MAX_PAYLOAD} bytes"
                    )
                payload = await reader.readexactly(size)
                await turns.acquire()
                task = asyncio.ensure_future(self._answer(writer, name, kind, number, payload))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                task.add_done_callback(lambda _: turns.release())
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client or this process ends
        except MegablendError as error:
            self._log.warn(f"{self.folder.path}: refused a client", str(error))
            with contextlib.suppress(ConnectionError):
                writer.write(pack(Kind.FAILED, 0, pack_error(error)))
        finally:
            for running in tasks:
                running.cancel()
            self.needs.set(name, [])
            self._readers.pop(name, None)
            self.num_clients -= 1
            self.idle_since = time.monotonic()
            writer.close()

    async def _answer(
        self, writer: asyncio.StreamWriter, client: str, kind: int, number: int, payload: bytes
    ) -> None:
        """Carry out a request, and send the result or the error."""
        try:
            answer = pack(Kind.DONE, number, await self._do(client, kind, payload))
        except LeavingError:
            writer.close()
            return
        except Exception as error:
            if not isinstance(error, MegablendError):
                # Log each kind once a minute at most: a client may send data that is not a frame
                kind_of_error = type(error).__name__
                self._log.warn(f"a request failed ({kind_of_error})", str(error), error)
            answer = pack(Kind.FAILED, number, pack_error(error))
        if kind != Kind.DUE:
            with contextlib.suppress(ConnectionError):
                writer.write(answer)
                await writer.drain()

    async def _do(self, client: str, kind: int, payload: bytes) -> bytes:
        """Carry out a request, and return the payload of the response."""
        if kind in _OF_FILES and client not in self._readers:
            raise ConfigError("a client requested files before it sent its settings")
        match kind:
            case Kind.HELLO:
                return self._greet(client, parse_json(payload))
            case Kind.STAT:
                return await self._stat(parse_json(payload))
            case Kind.KNOWN:
                await self._remember(parse_json(payload))
            case Kind.DUE:
                self.needs.set(client, unpack_needs(payload))
            case Kind.WANT:
                return await self._fetch(unpack_needs(payload))
            case Kind.DISTRUST:
                await self._replace(unpack_needs(payload))
            case Kind.FILL:
                needs = unpack_needs(payload[1:])
                if self.select is not None:
                    needs = await self.select(needs)
                return pack_json(await fill(self.engine, needs, is_dry=bool(payload[0])))
            case Kind.DATASETS:
                return pack_json(await self.answer_datasets(parse_json(payload)))
            case _ if kind in self.commands:
                return pack_json(await self.commands[Kind(kind)]())
            case _:
                raise ConfigError(
                    f"the node process does not recognize requests of kind {kind}; run the same version of megablend in both "
                    "processes"
                )
        return b""

    def _greet(self, client: str, hello: dict[str, Any]) -> bytes:
        answer = self.describe(hello)
        if "options" in hello:
            self._readers[client] = hello["members"]
        return pack_json(answer)

    async def _stat(self, locations: list[str]) -> bytes:
        requests = [self.states.get(location) for location in locations]
        # All requests have finished before the first error is raised
        results = await asyncio.gather(*requests, return_exceptions=True)
        stats: list[tuple[int, str]] = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            stats.append((result.size, result.etag))
        return pack_json(stats)

    async def _remember(self, states: list[tuple[str, int, str]]) -> None:
        for location, size, etag in states:
            await self.states.remember(str(location), FileStat(size=int(size), etag=str(etag)))

    async def _fetch(self, needs: Iterable[Need]) -> bytes:
        origins = [await self.engine.serve(Want.of(need)) for need in needs]
        return ORIGINS.pack(*sum_origins(origins))

    async def _replace(self, needs: Iterable[Need]) -> None:
        """Replace pages whose bytes are wrong: drop them, and fetch them again."""
        for need in needs:
            LOG.warning(
                "mirror: %s: bytes of %s were wrong; fetching them again",
                self.folder.path,
                need.key.location,
            )
            await self.engine.serve(Want(need.key, need.pages, time.monotonic(), Mode.FRESH))


def _check_client(connection: socket.socket, folder: MirrorFolder) -> None:
    """Check that the client of a connection may read the folder. Raises: ConfigError if not."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, group = _CREDENTIALS.unpack(credentials)
    if user in (0, os.geteuid()):
        return
    if folder.group is not None:
        readers = grp.getgrnam(folder.group).gr_gid
        with contextlib.suppress(KeyError):
            if group == readers or readers in os.getgrouplist(pwd.getpwuid(user).pw_name, group):
                return
    raise ConfigError(
        f"{folder.path}: belongs to user {os.geteuid()}, but this process runs as user {user}\n"
        "set `mirror.group` to a group that both users belong to, or use another folder"
    )
