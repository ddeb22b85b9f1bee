"""The connection of a process to a mirror's node process, which is started if none runs."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from megablend.errors import ConfigError
from megablend.mirror.disk.folder import MirrorFolder
from megablend.mirror.disk.room import Need
from megablend.mirror.greeting import find_credentials
from megablend.mirror.members.launchers import describe_members
from megablend.mirror.node.frames import (
    HEAD,
    PROTOCOL,
    Kind,
    pack,
    pack_json,
    pack_needs,
    unpack_error,
)
from megablend.storage.base import FileStat
from megablend.storage.hints import Filled
from megablend.storage.mirror_options import MirrorOptions
from megablend.storage.object_options import ObjectOptions
from megablend.storage.objects.rate_limiter import JOB_SIZES
from megablend.storage.waits import wait_for
from megablend.system.after_fork import unlock_in_children
from megablend.system.limited_json import parse_json
from megablend.system.log import LOG
from megablend.system.private_folder import find_private_folder

T = TypeVar("T")
_RETRY_SECONDS = 0.05
_MAX_REPEATS = 3
"""Times that a request is sent again because the node process ended."""
_PROBE_NUMBER = 0
"""The number of the request that checks whether a silent node process still answers."""


class NodeLostError(Exception):
    """The node process has ended, or is not responding."""


class _EndedError(NodeLostError):
    """The node process ended during a request."""


class Connection:
    """Sends requests to a node process. Thread-safe; connects when it is first used, and makes
    a new connection after the node process has ended, and in each process after a fork.

    Args:
        agreed: the settings that need to agree with those of the node process; None if only
            commands are sent, and no files are read.
        starts: whether a node process is started, with `options`, if none is running.
    """

    def __init__(
        self,
        options: MirrorOptions,
        objects: ObjectOptions,
        agreed: MirrorOptions | None,
        *,
        starts: bool = True,
    ) -> None:
        self._options = options
        self._objects = objects
        self._agreed = agreed
        self._starts = starts
        self.unlock_after_fork()
        unlock_in_children(self)

    def unlock_after_fork(self) -> None:
        """Begin without a connection: a forked child's parent keeps its own."""
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._pending: dict[int, Future[bytes]] = {}
        self._numbers = itertools.count(1)
        self._due: dict[str, Sequence[Need]] = {}
        self._lost_at = -1e9

    def stat(self, locations: Sequence[str]) -> list[FileStat]:
        """Return the states of files. Raises: NodeLostError; the same errors as Storage.stat."""
        states = parse_json(self._get_answer(Kind.STAT, pack_json(list(locations))))
        return [FileStat(size=size, etag=etag) for size, etag in states]

    def want(self, need: Need) -> Future[bytes]:
        """Request pages. The result of the future is their packed ORIGINS, once all of them are
        held; its error is the source's, or NodeLostError."""
        return self.request(Kind.WANT, pack_needs([need]))

    def distrust(self, need: Need) -> None:
        """Have pages replaced that differ from a checksum. Raises: see `fill`."""
        self._get_answer(Kind.DISTRUST, pack_needs([need]))

    def report_states(self, states: Sequence[tuple[str, FileStat]]) -> None:
        """Report the states of files that were just listed. Raises: NodeLostError."""
        self._get_answer(
            Kind.KNOWN, pack_json([[path, state.size, state.etag] for path, state in states])
        )

    def set_due(self, reader: str, needs: Sequence[Need]) -> None:
        """Announce the needs of a reader of this process, which replace its last announcement. On
        a new connection all announcements are repeated. Raises: NodeLostError."""
        self._due = {**self._due, reader: needs}
        if not needs:
            del self._due[reader]
        self.request(Kind.DUE, self._pack_due())

    def fill(self, needs: Sequence[Need], *, is_dry: bool) -> Filled:
        """Have needs fetched now, whenever they are due, or only counted if `is_dry`. Raises:
        NodeLostError; the errors of the source."""
        payload = bytes([is_dry]) + pack_needs(needs)
        return Filled(*parse_json(self._get_answer(Kind.FILL, payload)))

    def _pack_due(self) -> bytes:
        return pack_needs([need for needs in self._due.values() for need in needs])

    def close(self) -> None:
        """Disconnect; the next use connects again."""
        with self._lock:
            if self._socket is not None:
                # A thread is receiving: closing alone would not end its call
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
                self._drop(self._socket)

    def command(self, kind: Kind, about: Any = None) -> Any:
        """Send a command, and return its response, parsed from JSON. Raises: NodeLostError."""
        return parse_json(self._get_answer(kind, b"" if about is None else pack_json(about)))

    def _get_answer(self, kind: Kind, payload: bytes) -> bytes:
        """Send a request that may be repeated, and return its response. Raises: NodeLostError."""
        return _repeat(lambda: wait_for(self._request_once(kind, payload)))

    def request(self, kind: Kind, payload: bytes) -> Future[bytes]:
        """Send a request. Returns: a future of the response's payload. Raises: NodeLostError;
        ConfigError if the mirror cannot be used."""
        return _repeat(lambda: self._request_once(kind, payload))

    def _request_once(self, kind: Kind, payload: bytes) -> Future[bytes]:
        """Like `request`. Also raises _EndedError if the node process ends during the call."""
        answer = Future[bytes]()
        with self._lock:
            connection = self._socket or self._open()
            number = next(self._numbers)
            if kind != Kind.DUE:
                self._pending[number] = answer
            self._send(connection, pack(kind, number, payload))
        return answer

    def _send(self, connection: socket.socket, frame: bytes) -> None:
        try:
            connection.sendall(frame)
        except OSError as error:
            self._drop(connection)
            raise _EndedError(str(error)) from None

    def _open(self) -> socket.socket:
        """Connect to the node process, which is started if none is running. Raises: the same errors
        as `_start`; NodeLostError if it is not responding."""
        if time.monotonic() - self._lost_at < self._options.patience:
            raise NodeLostError("it was not responding a moment ago")
        deadline = time.monotonic() + self._options.patience
        while True:
            connected = self._connect() or self._start()
            if connected is not None:
                break
            if time.monotonic() > deadline:
                self._lost_at = time.monotonic()
                raise NodeLostError(f"waited {self._options.patience:g} s for a response")
            time.sleep(_RETRY_SECONDS)
        self._socket = connected
        threading.Thread(
            target=self._receive,
            args=(connected, self._pending),
            name="megablend-mirror",
            daemon=True,
        ).start()
        if self._due:
            self._send(connected, pack(Kind.DUE, 0, self._pack_due()))
        return connected

    def _connect(self) -> socket.socket | None:
        """Connect, and exchange greetings. Returns: None if no node process is listening. Raises:
        ConfigError if the node process refuses this process."""
        try:
            folder = MirrorFolder.attach(self._options.folder)
        except ConfigError:
            return None  # the started node process makes the mirror, or reports why it cannot
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(self._options.patience)
        fd = os.open(folder.path, os.O_PATH | os.O_DIRECTORY)
        try:
            # A socket's path has at most 107 bytes
            connection.connect(f"/proc/self/fd/{fd}/{folder.socket_path.name}")
            hello = self._make_hello(folder)
            connection.sendall(pack(Kind.HELLO, 0, pack_json(hello)))
            kind, _, payload = _read_frame(connection)
        except PermissionError:
            connection.close()
            raise ConfigError(
                f"{folder.path}: another user's node process owns this mirror\n"
                "set `mirror.group` to a group that both users belong to, or use another folder"
            ) from None
        except (OSError, EOFError):
            connection.close()
            return None
        finally:
            os.close(fd)
        if kind == Kind.FAILED:
            connection.close()
            raise unpack_error(payload)
        differing = parse_json(payload)["differing"]
        if differing:
            LOG.warning(
                "mirror: %s: the node process uses its own %s, not those of this config",
                folder.path,
                ", ".join(differing),
            )
        return connection

    def _make_hello(self, folder: MirrorFolder) -> dict[str, Any]:
        hello: dict[str, Any] = {"protocol": PROTOCOL}
        if self._agreed is not None:
            hello |= {
                "credentials": find_credentials(self._objects, folder.id),
                "queries": [[url, query] for url, query in self._objects.urls if query],
                "options": self._agreed.as_json(),
                "members": describe_members(self._agreed, os.environ),
            }
        return hello

    def _start(self) -> socket.socket | None:
        """Start a node process, and connect to it. Returns: None if another process of this machine
        is starting it. Raises: ConfigError if the node process cannot run; NodeLostError if this
        connection must not start one."""
        if not self._starts:
            raise NodeLostError("none listens")
        folder = self._options.folder.encode(errors="surrogateescape")
        folder_hash = hashlib.blake2b(folder, digest_size=8).hexdigest()
        # The lock is not in or next to the mirror's folder, where this user may not be allowed to
        # write
        private, _ = find_private_folder(
            [Path(tempfile.gettempdir())], Path(f"megablend-{os.geteuid()}"), prefix="megablend-"
        )
        lock_path = private / f"{folder_hash}.start.lock"
        fd = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            connected = self._connect()
            if connected is not None:
                return connected
            settings = {"mirror": self._options.as_json(), "by_prefix": self._objects.by_prefix}
            # Limits are divided among the job's processes; the node process is not one of them
            environment = {key: os.environ[key] for key in os.environ.keys() - JOB_SIZES}
            starter = subprocess.run(
                [sys.executable, "-m", "megablend.mirror.process"],
                input=json.dumps(settings).encode(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=environment,
                timeout=max(30.0, self._options.patience),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None
        finally:
            os.close(fd)
        message = starter.stderr.decode(errors="replace").strip()
        # Without a message it was killed while it started: another start may succeed
        if starter.returncode and message:
            raise ConfigError(f"mirror: {message}")
        return self._connect()

    def _receive(self, connection: socket.socket, pending: dict[int, Future[bytes]]) -> None:
        """Pass responses to their futures in `pending`, until the connection ends."""

        def probe() -> None:
            """After `patience` seconds of silence with pending requests, send one that gets a
            response at once. Raises: EOFError if such a request is still pending."""
            if _PROBE_NUMBER in pending:
                raise EOFError
            if pending:
                pending[_PROBE_NUMBER] = Future()
                connection.sendall(pack(Kind.STAT, _PROBE_NUMBER, pack_json([])))

        try:
            while True:
                kind, number, payload = _read_frame(connection, probe)
                answer = pending.pop(number, None)
                if answer is None or not answer.set_running_or_notify_cancel():
                    continue
                if kind == Kind.FAILED:
                    answer.set_exception(unpack_error(payload))
                else:
                    answer.set_result(payload)
        except Exception as error:
            if not isinstance(error, OSError | EOFError):
                LOG.warning("mirror: cannot understand a response from the node process: %r", error)
            with self._lock:
                self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        """Forget a connection that is lost; called with the lock held."""
        if self._socket is connection:
            self._socket = None
            unanswered = self._pending
            self._pending = {}
            # In another thread: callbacks of the futures may send requests, which take the lock
            threading.Thread(
                target=_fail_all, args=(list(unanswered.values()),), daemon=True
            ).start()
        connection.close()


@lru_cache(maxsize=16)
def find_connection(options: MirrorOptions, objects: ObjectOptions) -> Connection:
    """Return the connection to a mirror's node process, which this whole process shares."""
    return Connection(options, objects, options)


def _repeat(function: Callable[[], T]) -> T:
    """Call a function; repeat the call if the node process ended during it."""
    for _ in range(_MAX_REPEATS):
        with contextlib.suppress(_EndedError):
            return function()
    return function()


def _fail_all(answers: list[Future[bytes]]) -> None:
    """Fail the futures that are not cancelled."""
    for answer in answers:
        if answer.set_running_or_notify_cancel():
            answer.set_exception(_EndedError("the node process ended"))


def _read_frame(
    connection: socket.socket, on_timeout: Callable[[], None] | None = None
) -> tuple[int, int, bytes]:
    """Read a frame: its kind, number and payload. `on_timeout` is called each time that the socket
    times out. Raises: EOFError at the end; OSError; the errors of `on_timeout`."""
    size, kind, number = HEAD.unpack(_read_exactly(connection, HEAD.size, on_timeout))
    return kind, number, _read_exactly(connection, size, on_timeout)


def _read_exactly(
    connection: socket.socket, size: int, on_timeout: Callable[[], None] | None
) -> bytes:
    parts = list[bytes]()
    while size:
        try:
            part = connection.recv(min(size, 1 << 20))
        except TimeoutError:
            if on_timeout is None:
                raise
            on_timeout()
            continue
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
