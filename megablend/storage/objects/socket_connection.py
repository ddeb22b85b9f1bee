"""A connection that requests ranges over HTTP/1.1, and receives their bytes directly into the
memory where they are needed. It accepts only the expected response to a request."""

from __future__ import annotations

import asyncio

from megablend.storage.objects.in_flight import Request
from megablend.storage.objects.object_version import normalise_etag

_HEAD_BYTES = 8 << 10
"""The maximum size of the head of a response."""


class UnexpectedResponseError(Exception):
    """An error for an unexpected response. obstore's client then has to send the request again."""


class RangeConnection(asyncio.BufferedProtocol):
    """A connection that serves one request at a time."""

    def __init__(self) -> None:
        self.used_at = 0.0
        """The time at which the last response was complete."""
        self._transport: asyncio.Transport | None = None
        self._head = bytearray(_HEAD_BYTES)
        self._view = memoryview(self._head)
        self._num_received = 0
        """The number of bytes received into `_head`: the bytes of the head, and those of the body
        that arrived with it."""
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
        """Send a request. Returns: a future of the HTTP status, which is done once the bytes are in
        memory. It may fail with ConnectionError or UnexpectedResponseError."""
        assert self._transport is not None
        self._request = request
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(head)
        return self._done

    def abort(self) -> None:
        """Close the connection. Nothing is written to a request's memory afterwards."""
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
        """See asyncio.BufferedProtocol. The head comes first."""
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
        that arrived with it. Returns: the memory for the rest of the body; None if the response is
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
        """End the request. Its response is complete, unless `error` is given."""
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
