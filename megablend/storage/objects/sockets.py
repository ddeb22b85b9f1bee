"""Ranged GETs over sockets of the event loop, straight into the memory where the bytes are needed.

obstore's client needs two calls for a range of one version, each with a thread that hands the
response on: five times the CPU time of reading the same bytes from a socket. So the most frequent
reads, ranges of known versions, are requested here, by URLs that the client signs. Only the expected
response is accepted here. For any other response the client is asked, which knows redirects,
credentials and proxies, and the meaning of errors.
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
"""The time for which a URL is signed; it is used for a third of this time."""
_MAX_TARGETS = 4096
"""The number of objects whose URLs are kept."""
_HEAD_BYTES = 8 << 10
"""The longest head of a response that is accepted."""
_IDLE_SECONDS = 45.0
"""The time after which an idle connection is not used again: a device on the way may have forgotten
it."""
_MAX_UNEXPECTED = 3
"""The number of unexpected responses in a row, to requests that the client then made successfully,
after which only the client is asked."""


class UnexpectedResponseError(Exception):
    """A response is not the expected one, so the client has to be asked."""


class _Target(NamedTuple):
    """The server of an object, and the begin of requests for the object."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    head: bytes
    """The begin of all requests for the object, up to the headers that differ."""


class _Connection(asyncio.BufferedProtocol):
    """A connection that serves one request at a time."""

    def __init__(self) -> None:
        self.used_at = 0.0
        """The time at which the last response was complete."""
        self._transport: asyncio.Transport | None = None
        self._head = bytearray(_HEAD_BYTES)
        self._view = memoryview(self._head)
        self._num_received = 0
        """The number of bytes received into `_head`: of the head, and of the body if some came along."""
        self._rest: memoryview | None = None
        """The memory for the rest of the body; None until the head is complete."""
        self._status = 0
        self.pause = 0.0
        """The seconds of the pause that the last response asks for."""
        self._is_kept = False
        self._request: Request | None = None
        self._done: asyncio.Future[int] | None = None

    @property
    def is_open(self) -> bool:
        """Whether a request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def ask(self, head: bytes, request: Request) -> asyncio.Future[int]:
        """Send a request. Returns: a future of the status once the bytes are in their memory, or of
        ConnectionError or UnexpectedResponseError."""
        assert self._transport is not None
        self._request = request
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(head)
        return self._done

    def abort(self) -> None:
        """Close the connection: nothing is written to a request's memory any longer."""
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
        return self._view[self._num_received :] if self._rest is None else self._rest

    def buffer_updated(self, nbytes: int) -> None:
        """See asyncio.BufferedProtocol."""
        request = self._request
        if request is None:  # nothing was requested
            self.abort()
            return
        request.last_byte_at = asyncio.get_running_loop().time()
        if self._rest is not None:
            self._rest = self._rest[nbytes:]
        else:
            self._num_received += nbytes
            end = self._head.find(b"\r\n\r\n", 0, self._num_received)
            if end < 0 and self._num_received < _HEAD_BYTES:
                return
            self._rest = self._begin_body(request, end) if end >= 0 else None
            if self._rest is None:
                self._end(UnexpectedResponseError)
                return
        if not self._rest:
            self._end(None)

    def _begin_body(self, request: Request, end: int) -> memoryview | None:
        """Parse the head of a response, which ends at byte `end`, and store the bytes of the body
        that came along. Returns: the memory for the rest of the body; None if the response is
        unexpected."""
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
        body = self._view[end + 4 : self._num_received]
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
            memory = wanted.into
            request.first_byte_at = request.last_byte_at
        elif int(length) <= _HEAD_BYTES:
            memory = memoryview(bytearray(int(length)))
        else:
            return None
        if len(body) > len(memory):
            return None
        memory[: len(body)] = body
        return memory[len(body) :]

    def _end(self, error: Exception | type[Exception] | None) -> None:
        """End the request: its response is complete, or will not be because of `error`."""
        done = self._done
        self._done = None
        self._request = self._rest = None
        self._num_received = 0
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
        find_url: returns the URL of a key, signed for SIGNED_SECONDS if need be.
        make_tls: returns the certificates that are trusted.
        connect_timeout: the seconds within which a connection has to be made.
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
        """The number of unexpected responses in a row; see _MAX_UNEXPECTED."""
        self._generation = 0
        """The number of the present generation of signed URLs: a new one begins when a response is
        unexpected, since credentials may have expired."""

    @property
    def is_usable(self) -> bool:
        """Whether the source's responses are as this reader expects."""
        return self._unexpected < _MAX_UNEXPECTED

    async def read(
        self, request: Request, ask_client: Callable[[Request], Awaitable[T | Failure]]
    ) -> T | Failure | None:
        """Read the requested range into its memory, or else ask the client.

        Returns: None if the bytes are in their memory; otherwise a failure, or the client's response.
        """
        generation = self._generation
        try:
            failure = await self._read(request)
        except (UnexpectedResponseError, OSError):
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
        """Read the requested range into its memory. Returns: a failure after which another attempt
        may succeed; None if the bytes are there.

        Raises: UnexpectedResponseError; OSError if there is no connection.
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
                if is_new or request.first_byte_at is not None:
                    return read_failure(error)
                continue  # the connection was closed while it was idle
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
            raise UnexpectedResponseError

    async def _find_target(self, request: Request) -> _Target:
        """Return the target of a request, kept or made. Raises: UnexpectedResponseError."""
        loop = asyncio.get_running_loop()
        key = request.wanted.key
        period = int(loop.time() // (SIGNED_SECONDS / 3))
        found = self._targets.get(
            (key, period, self._generation), lambda: loop.create_task(self._make_target(key))
        )
        request.waits_for = waiting = asyncio.shield(found)  # others wait for it, too
        try:
            return await waiting
        except Exception as error:  # raised by the client, which is asked again
            raise UnexpectedResponseError from error

    async def _make_target(self, key: str) -> _Target:
        """Return the target of requests for an object. Raises: the client's errors;
        UnexpectedResponseError if a proxy is to be used."""
        url = urlsplit(await self._find_url(key))
        proxies = urllib.request.getproxies()
        assert url.hostname is not None
        if {url.scheme, "all"} & proxies.keys() and not urllib.request.proxy_bypass(url.netloc):
            raise UnexpectedResponseError
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
        """Return the idle connection that was used last, None if there is none; close those that
        were idle for too long."""
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
