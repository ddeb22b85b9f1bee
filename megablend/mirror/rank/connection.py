"""Sends requests to a mirror's node process, and receives the responses."""

from __future__ import annotations

import contextlib
import itertools
import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import lru_cache
from typing import Any, TypeVar

from megablend.errors import ConfigError
from megablend.mirror.disk.room import Need
from megablend.mirror.node.frames import Kind, pack, pack_json, pack_needs, read_frame, unpack_error
from megablend.mirror.rank.opening import NodeLostError, Opener
from megablend.storage.base import FileStat
from megablend.storage.hints import Filled
from megablend.storage.mirror_options import MirrorOptions
from megablend.storage.object_options import ObjectOptions
from megablend.storage.waits import wait_for
from megablend.system.after_fork import unlock_in_children
from megablend.system.limited_json import parse_json
from megablend.system.log import LOG

T = TypeVar("T")
_MAX_REPEATS = 3
"""The maximum number of times that a request is repeated after the node process has exited."""
_PROBE_NUMBER = 0
"""The number of the request that checks whether a silent node process still responds."""


class _EndedError(NodeLostError):
    """Raised if the node process exits during a request."""


class Connection:
    """A connection to a mirror's node process. It is thread-safe. The socket is opened at the first
    use, and again after the node process has exited and in forked children.

    The arguments are those of `Opener`.
    """

    def __init__(
        self,
        options: MirrorOptions,
        objects: ObjectOptions,
        agreed: MirrorOptions | None,
        *,
        starts: bool = True,
    ) -> None:
        self._opener = Opener(options, objects, agreed, starts)
        self._refusal = ""
        self._refused_at = -math.inf
        """The monotonic time at which opening last failed, with the error `_refusal`."""
        self.unlock_after_fork()
        unlock_in_children(self)

    def unlock_after_fork(self) -> None:
        """Forget the parent's socket in a forked child, which will open its own."""
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._pending: dict[int, Future[bytes]] = {}
        self._numbers = itertools.count(1)
        self._due: dict[str, Sequence[Need]] = {}
        self._opener.lost_at = -math.inf

    def stat(self, locations: Sequence[str]) -> list[FileStat]:
        """Return the states of files. Raises: NodeLostError; the same errors as Storage.stat."""
        states = parse_json(self._get_answer(Kind.STAT, pack_json(list(locations))))
        return [FileStat(size=size, etag=etag) for size, etag in states]

    def want(self, need: Need) -> Future[bytes]:
        """Request the pages of a need. Returns: a future that is done when all pages are held. The
        result is the packed ORIGINS of the fetched bytes; the error is that of the source, or
        NodeLostError."""
        return self.request(Kind.WANT, pack_needs([need]))

    def distrust(self, need: Need) -> None:
        """Request that pages with wrong bytes be fetched again. Raises: see `fill`."""
        self._get_answer(Kind.DISTRUST, pack_needs([need]))

    def report_states(self, states: Sequence[tuple[str, FileStat]]) -> None:
        """Report the states of files that were just listed. Raises: NodeLostError."""
        self._get_answer(
            Kind.KNOWN, pack_json([[path, state.size, state.etag] for path, state in states])
        )

    def set_due(self, reader: str, needs: Sequence[Need]) -> None:
        """Announce which pages a reader of this process will read. They replace the pages that it
        announced before. After the socket is opened again, all announcements are repeated. Raises:
        NodeLostError."""
        self._due = {**self._due, reader: needs}
        if not needs:
            del self._due[reader]
        self.request(Kind.DUE, self._pack_due())

    def fill(self, needs: Sequence[Need], *, is_dry: bool) -> Filled:
        """Request that the pages of needs be fetched at once, whatever their due times. If
        `is_dry`, they are only counted. Raises: NodeLostError; the errors of the source."""
        payload = bytes([is_dry]) + pack_needs(needs)
        return Filled(*parse_json(self._get_answer(Kind.FILL, payload)))

    def command(self, kind: Kind, about: Any = None) -> Any:
        """Send a command, and return the parsed JSON of the response. Raises: NodeLostError."""
        return parse_json(self._get_answer(kind, b"" if about is None else pack_json(about)))

    def request(self, kind: Kind, payload: bytes) -> Future[bytes]:
        """Send a request. Returns: a future of the response's payload. Raises: NodeLostError;
        ConfigError if the mirror cannot be used."""
        return _repeat(lambda: self._request_once(kind, payload))

    def close(self) -> None:
        """Close the socket. The next use opens it again."""
        with self._lock:
            if self._socket is not None:
                # A thread is receiving: closing alone would not end its call
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
                self._drop(self._socket)

    def _get_answer(self, kind: Kind, payload: bytes) -> bytes:
        """Return the response to a request. The request is repeated if the node process exits.
        Raises: NodeLostError; the error that the node process responds with."""
        return _repeat(lambda: wait_for(self._request_once(kind, payload)))

    def _request_once(self, kind: Kind, payload: bytes) -> Future[bytes]:
        """Send a request, without repeating it. Raises: the same errors as `request`; _EndedError
        if the node process exits in the meantime."""
        answer = Future[bytes]()
        asked_at = time.monotonic()
        with self._lock:
            connection = self._socket or self._open(asked_at)
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

    def _open(self, asked_at: float) -> socket.socket:
        """Open a socket, and start the thread that receives responses. Threads that waited since
        `asked_at` while another one failed get its error. Raises: see `Opener.open`."""
        if asked_at < self._refused_at:
            raise ConfigError(self._refusal)
        try:
            connected = self._opener.open()
        except ConfigError as error:
            self._refusal = str(error)
            self._refused_at = time.monotonic()
            raise
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

    def _pack_due(self) -> bytes:
        return pack_needs([need for needs in self._due.values() for need in needs])

    def _receive(self, connection: socket.socket, pending: dict[int, Future[bytes]]) -> None:
        """Set the results of the futures in `pending` from responses, until the connection ends."""

        def probe() -> None:
            """Check that the node process responds: send a request that is answered at once. Called
            after `patience` seconds without a response to pending requests. Raises: EOFError if the
            previous request of this kind is still pending."""
            if _PROBE_NUMBER in pending:
                raise EOFError
            if pending:
                pending[_PROBE_NUMBER] = Future()
                connection.sendall(pack(Kind.STAT, _PROBE_NUMBER, pack_json([])))

        try:
            while True:
                kind, number, payload = read_frame(connection, probe)
                answer = pending.pop(number, None)
                if answer is None or not answer.set_running_or_notify_cancel():
                    continue
                if kind == Kind.FAILED:
                    answer.set_exception(unpack_error(payload))
                else:
                    answer.set_result(payload)
        except Exception as error:
            if not isinstance(error, OSError | EOFError):
                LOG.warning("mirror: cannot parse a response from the node process: %r", error)
            with self._lock:
                self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        """Forget a socket whose connection is lost. Called with the lock held."""
        if self._socket is connection:
            self._socket = None
            unanswered = self._pending
            self._pending = {}
            # In another thread: callbacks of the futures may send requests, which take the lock
            threading.Thread(target=_fail_all, args=(unanswered,), daemon=True).start()
        connection.close()


@lru_cache(maxsize=16)
def find_connection(options: MirrorOptions, objects: ObjectOptions) -> Connection:
    """Return this process's connection to a mirror's node process. All callers share it."""
    return Connection(options, objects, options)


def _repeat(function: Callable[[], T]) -> T:
    """Call a function, and repeat the call if the node process exited during it."""
    for _ in range(_MAX_REPEATS):
        with contextlib.suppress(_EndedError):
            return function()
    return function()


def _fail_all(pending: dict[int, Future[bytes]]) -> None:
    """Set an error on all pending futures that are not cancelled. Each future is removed from
    `pending` first, since the receiving thread may be taking others at the same time."""
    with contextlib.suppress(KeyError):  # no future is left
        while True:
            _, answer = pending.popitem()
            if answer.set_running_or_notify_cancel():
                answer.set_exception(_EndedError("the node process exited"))
