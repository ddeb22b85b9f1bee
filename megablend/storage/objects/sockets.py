"""Ranged GETs over sockets of the event loop, straight into the memory where the bytes are needed.

The client needs two calls for a range of one version, and a thread for each that hands its answer
on: five times the CPU time that reading the same from a socket takes. So what is read most, ranges
of versions that are known, is requested here, by URLs that the client signs. Only the answer that
is expected is taken. For whatever else comes the client is asked, which knows redirects,
credentials and proxies, and what an error means.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
import urllib.request
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

from megablend.lru import LRUCache
from megablend.storage.objects.failures import Failure, Kind, read_failure
from megablend.storage.objects.in_flight import Request
from megablend.storage.objects.object_version import normalise_etag

T = TypeVar("T")
SIGNED_SECONDS = 900
"""For how long a URL is signed; it is used for a third of this."""
_MAX_TARGETS = 4096
"""Objects whose URLs are kept."""
_HEAD_BYTES = 8 << 10
"""The longest head of an answer that is taken."""
_IDLE_SECONDS = 45.0
"""A connection that was idle for longer is not used again: something on the way may have forgotten
it."""
_MAX_UNEXPECTED = 3
"""Times in a row that the client got an answer which was not as expected here; then only the client
is asked."""


class UnexpectedAnswerError(Exception):
    """An answer is not as expected, so that the client has to be asked."""


class _Target(NamedTuple):
    """Where an object is requested."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    head: bytes
    """What requests for the object begin with, up to the headers that differ."""


class _Connection(asyncio.BufferedProtocol):
    """A connection, which is asked for one range at a time."""

    def __init__(self) -> None:
        self.used_at = 0.0
        """When its last answer was complete."""
        self._transport: asyncio.Transport | None = None
        self._head = bytearray(_HEAD_BYTES)
        self._view = memoryview(self._head)
        self._got = 0
        """Bytes that were received into `_head`: the head, and what came along with it."""
        self._room: memoryview | None = None
        """Where the rest of the body goes; None until the head is there."""
        self._status = 0
        self.pause = 0.0
        """Seconds after which the source may be asked again, as its last answer says."""
        self._is_kept = False
        self._request: Request | None = None
        self._done: asyncio.Future[int] | None = None

    @property
    def is_open(self) -> bool:
        """Whether it can be asked."""
        return self._transport is not None and not self._transport.is_closing()

    def ask(self, head: bytes, request: Request) -> asyncio.Future[int]:
        """Send a request. Returns: its status, when the bytes are in their memory; or
        ConnectionError, UnexpectedAnswerError."""
        assert self._transport is not None
        self._request = request
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(head)
        return self._done

    def abort(self) -> None:
        """Close the connection. Nothing is written to a request's memory any more."""
        self._request = None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.BaseProtocol."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.BaseProtocol."""
        self._transport = None
        self._end(exc if isinstance(exc, OSError) else ConnectionError("the connection was closed"))

    def get_buffer(self, sizehint: int) -> memoryview:
        """See asyncio.BufferedProtocol: the head comes first."""
        return self._view[self._got :] if self._room is None else self._room

    def buffer_updated(self, nbytes: int) -> None:
        """See asyncio.BufferedProtocol."""
        request = self._request
        if request is None:  # nothing was asked
            self.abort()
            return
        request.last = asyncio.get_running_loop().time()
        if self._room is not None:
            self._room = self._room[nbytes:]
        else:
            self._got += nbytes
            end = self._head.find(b"\r\n\r\n", 0, self._got)
            if end < 0 and self._got < _HEAD_BYTES:
                return
            self._room = self._begin_body(request, end) if end >= 0 else None
            if self._room is None:
                self._end(UnexpectedAnswerError)
                return
        if not self._room:
            self._end(None)

    def _begin_body(self, request: Request, end: int) -> memoryview | None:
        """Parse the head, which ends at byte `end`, and store what came of the body. Returns: where
        the rest of the body goes; None if the answer is not as expected."""
        head = self._head[:end].decode("latin-1")
        lower = head.lower()  # names of headers may be written in any case

        def find_header(name: str) -> str:
            start = lower.find(f"\r\n{name}:")
            return head[start + len(name) + 3 :].partition("\r\n")[0].strip() if start >= 0 else ""

        protocol = head[:9]
        status = head[9:12]
        length = find_header("content-length")
        if not (status.isdigit() and length.isdigit()) or find_header("transfer-encoding"):
            return None
        self._status = int(status)
        after = find_header("retry-after")
        self.pause = float(after[:9]) if after.isdecimal() else 0.0
        self._is_kept = protocol == "HTTP/1.1 " and find_header("connection").lower() != "close"
        wanted = request.wanted
        body = self._view[end + 4 : self._got]
        if self._status == 206:
            assert wanted.into is not None
            assert wanted.version is not None
            content_range = f"bytes {wanted.start}-{wanted.stop - 1}/{wanted.version.size}"
            if find_header("content-range") != content_range or int(length) != wanted.size:
                return None
            if find_header("content-encoding"):
                return None
            if normalise_etag(find_header("etag")) != wanted.version.etag:
                return None
            room = wanted.into
            request.first = request.last
        elif int(length) <= _HEAD_BYTES:
            room = memoryview(bytearray(int(length)))
        else:
            return None
        if len(body) > len(room):
            return None
        room[: len(body)] = body
        return room[len(body) :]

    def _end(self, error: Exception | type[Exception] | None) -> None:
        """End the request: its answer is complete, or will not be because of `error`."""
        done = self._done
        self._done = None
        self._request = self._room = None
        self._got = 0
        if error is not None or not self._is_kept:
            self.abort()
        if done is None or done.done():
            return
        if error is None:
            done.set_result(self._status)
        else:
            done.set_exception(error)


class SocketReader:
    """Reads ranges of one source's objects; used in the event loop only.

    Args:
        find_url: the URL of a key, which is signed for SIGNED_SECONDS if need be.
        make_tls: the certificates that are trusted.
        connect_timeout: seconds.
    """

    def __init__(
        self,
        find_url: Callable[[str], Awaitable[str]],
        make_tls: Callable[[], ssl.SSLContext],
        connect_timeout: float,
    ) -> None:
        self._find_url = find_url
        self._make_tls = functools.cache(make_tls)
        self._connect_timeout = connect_timeout
        self._targets = LRUCache[asyncio.Task[_Target]](_MAX_TARGETS)
        self._idle = deque[_Connection]()
        self._unexpected = 0
        """See _MAX_UNEXPECTED."""
        self._generation = 0
        """The number of the present signed URLs: new ones are made when an answer is not as
        expected, since credentials may have expired."""

    @property
    def is_usable(self) -> bool:
        """Whether the source answers as this reader expects."""
        return self._unexpected < _MAX_UNEXPECTED

    async def read(
        self, request: Request, ask_client: Callable[[Request], Awaitable[T | Failure]]
    ) -> T | Failure | None:
        """Read the range that is wanted into its memory, or else ask the client.

        Returns: None if the bytes are in their memory; otherwise a failure, or the client's answer.
        """
        generation = self._generation
        try:
            failure = await self._read(request)
        except (UnexpectedAnswerError, OSError):
            found = await ask_client(request)
            # Counted once, although many requests with the same URLs may be in flight
            if not isinstance(found, Failure) and generation == self._generation:
                self._generation += 1
                self._unexpected += 1
            return found
        if failure is None:
            self._unexpected = 0
        return failure

    async def _read(self, request: Request) -> Failure | None:
        """Read the range that is wanted into its memory. Returns: a failure that is worth trying
        again; None if the bytes are there.

        Raises: UnexpectedAnswerError; OSError if there is no connection.
        """
        wanted = request.wanted
        assert wanted.version is not None
        target = await self._find_target(request)
        head = b'%bIf-Match: "%b"\r\nRange: bytes=%d-%d\r\n\r\n' % (
            target.head,
            wanted.version.etag.encode("latin-1"),
            wanted.start,
            wanted.stop - 1,
        )
        while True:
            connection = self._take_idle()
            is_new = connection is None
            if connection is None:
                connection = await self._connect(request, target)
            request.waits_for = done = connection.ask(head, request)
            try:
                status = await done
            except OSError as error:
                if is_new or request.first is not None:
                    return read_failure(error)
                continue  # it was closed while nobody used it
            finally:
                if done.cancelled():
                    connection.abort()
            if connection.is_open:
                connection.used_at = asyncio.get_running_loop().time()
                self._idle.append(connection)
            if status == 206:
                return None
            failure = read_failure(ConnectionError(f"status code: {status}"))
            if failure.kind in (Kind.AGAIN, Kind.BUSY):
                return replace(failure, pause=connection.pause)
            raise UnexpectedAnswerError

    async def _find_target(self, request: Request) -> _Target:
        """Where the object of a request is asked for. Raises: UnexpectedAnswerError."""
        loop = asyncio.get_running_loop()
        key = request.wanted.key
        period = int(loop.time() // (SIGNED_SECONDS / 3))
        found = self._targets.get(
            (key, period, self._generation), lambda: loop.create_task(self._make_target(key))
        )
        request.waits_for = waiting = asyncio.shield(found)  # others wait for it, too
        try:
            return await waiting
        except Exception as error:  # of the client, which is asked again
            raise UnexpectedAnswerError from error

    async def _make_target(self, key: str) -> _Target:
        """Where an object is requested. Raises: whatever the client does; UnexpectedAnswerError if a
        proxy is to be used."""
        url = urlsplit(await self._find_url(key))
        proxies = urllib.request.getproxies()
        assert url.hostname is not None
        if {url.scheme, "all"} & proxies.keys() and not urllib.request.proxy_bypass(url.netloc):
            raise UnexpectedAnswerError
        tls = self._make_tls() if url.scheme == "https" else None
        target = f"{url.path}?{url.query}" if url.query else url.path
        lines = (
            f"GET {target} HTTP/1.1",
            f"Host: {url.netloc}",
            "User-Agent: megablend",
            "Accept: */*",
            "",
        )
        return _Target(
            url.hostname,
            url.port or (80 if tls is None else 443),
            tls,
            "\r\n".join(lines).encode("ascii"),
        )

    def _take_idle(self) -> _Connection | None:
        """Return the connection that was used last, None if there is none; those that were idle for
        long are closed."""
        oldest_use = asyncio.get_running_loop().time() - _IDLE_SECONDS
        while self._idle and self._idle[0].used_at < oldest_use:
            self._idle.popleft().abort()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self, request: Request, target: _Target) -> _Connection:
        """Open a connection. Raises: OSError, such as TimeoutError."""
        loop = asyncio.get_running_loop()

        async def connect() -> _Connection:
            connecting = loop.create_connection(
                _Connection, target.host, target.port, ssl=target.tls
            )
            return (await asyncio.wait_for(connecting, self._connect_timeout))[1]

        request.waits_for = made = loop.create_task(connect())
        try:
            return await made
        except (TimeoutError, asyncio.TimeoutError) as error:  # not the same before Python 3.11
            raise TimeoutError from error
