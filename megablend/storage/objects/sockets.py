"""Ranged GETs over sockets of the event loop, directly into the memory where the bytes are needed.

obstore's client needs two calls for a range of one version, each with a thread that passes on the
response. This takes five times the CPU time of reading the same bytes from a socket. So this module
sends the most frequent requests, for ranges of known versions, to URLs that the client signs. It
accepts only the expected response. Otherwise the client sends the request: it knows redirects,
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
from megablend.storage.objects.socket_connection import RangeConnection, UnexpectedResponseError

T = TypeVar("T")
SIGNED_SECONDS = 900
"""The time for which a URL is signed. It is used for a third of this time."""
_MAX_TARGETS = 4096
"""The maximum number of objects whose URLs are kept."""
_IDLE_SECONDS = 45.0
"""The time after which an idle connection is not used again, since a device on the route may have
forgotten it."""
_MAX_UNEXPECTED = 3
"""The maximum number of consecutive unexpected responses, counting only requests for which the
client then succeeded. After that, all requests are left to the client."""


class _Target(NamedTuple):
    """The server of an object, and the beginning of requests for the object."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    head: bytes
    """The beginning of all requests for the object, up to the headers that differ."""


class SocketReader:
    """A reader of ranges of one source's objects; used in the event loop only.

    Args:
        find_url: returns the URL of a key, signed for SIGNED_SECONDS if necessary.
        make_tls: returns a TLS context with the trusted certificates.
        connect_timeout: the maximum number of seconds for opening a connection.
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
        self._idle = deque[RangeConnection]()
        self._unexpected = 0
        """The number of unexpected responses in a row; see _MAX_UNEXPECTED."""
        self._generation = 0
        """The number of the current generation of signed URLs: a new one begins when a response is
        unexpected, since credentials may have expired."""

    @property
    def is_usable(self) -> bool:
        """Whether the source responds as this reader expects."""
        return self._unexpected < _MAX_UNEXPECTED

    async def read(
        self, request: Request, ask_client: Callable[[Request], Awaitable[T | Failure]]
    ) -> T | Failure | None:
        """Read the requested range into the request's memory, or leave the request to the client.

        Returns: None if the bytes are in memory; otherwise a failure, or the client's response.
        """
        generation = self._generation
        try:
            failure = await self._read(request)
        except (UnexpectedResponseError, OSError):
            outcome = await ask_client(request)
            # Counted once, although many requests with the same URLs may be in flight
            if not isinstance(outcome, Failure) and generation == self._generation:
                self._generation += 1
                self._unexpected += 1
            return outcome
        if failure is None:
            self._unexpected = 0
        return failure

    async def _read(self, request: Request) -> Failure | None:
        """Read the requested range into the request's memory. Returns: a failure after which
        another attempt may succeed; None if the bytes have arrived.

        Raises: UnexpectedResponseError; OSError if there is no connection.
        """
        wanted = request.wanted
        assert wanted.version is not None
        target = await self._find_target(request)
        head = b"%bIf-Match: %b\r\nRange: bytes=%d-%d\r\n\r\n" % (
            target.head,
            wanted.version.conditions["if_match"].encode("latin-1"),
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
        """Return the target of a request from the cache, or make it. Raises:
        UnexpectedResponseError if it cannot be made."""
        loop = asyncio.get_running_loop()
        key = request.wanted.key
        period = int(loop.time() // (SIGNED_SECONDS / 3))
        task = self._targets.get(
            (key, period, self._generation), lambda: loop.create_task(self._make_target(key))
        )
        request.waits_for = waiting = asyncio.shield(task)  # other requests also wait for it
        try:
            return await waiting
        except Exception as error:  # raised by the client, which is asked again
            raise UnexpectedResponseError from error

    async def _make_target(self, key: str) -> _Target:
        """Return the target of requests for an object. Raises: the client's errors;
        UnexpectedResponseError if a proxy must be used."""
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

    def _take_idle(self) -> RangeConnection | None:
        """Return the most recently used idle connection; None if there is none. Connections that
        have been idle for too long are closed."""
        oldest_use = asyncio.get_running_loop().time() - _IDLE_SECONDS
        while self._idle and self._idle[0].used_at < oldest_use:
            self._idle.popleft().abort()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self, request: Request, target: _Target) -> RangeConnection:
        """Open a connection. Raises: OSError, such as TimeoutError."""
        loop = asyncio.get_running_loop()

        async def connect() -> RangeConnection:
            connecting = loop.create_connection(
                RangeConnection, target.host, target.port, ssl=target.tls
            )
            return (await asyncio.wait_for(connecting, self._connect_timeout))[1]

        request.waits_for = made = loop.create_task(connect())
        try:
            return await made
        except (TimeoutError, asyncio.TimeoutError) as error:  # not the same before Python 3.11
            raise TimeoutError from error
