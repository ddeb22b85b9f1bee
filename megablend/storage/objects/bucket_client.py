"""The client for one bucket or server: it reads ranges of one version of an object by GET requests,
with retries and hedging, and keeps statistics of the requests."""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar, cast

from megablend.errors import (
    CHANGED_REMEDY,
    ChangedFileError,
    CorruptFileError,
    DataError,
    MissingFileError,
    RefusedFileError,
    UnsupportedFileError,
)
from megablend.storage.objects.failures import Failure, Kind, read_failure
from megablend.storage.objects.in_flight import InFlightMonitor, RangeRequest, Request
from megablend.storage.objects.object_version import ObjectVersion, version_of_response
from megablend.storage.objects.rate_limiter import RateLimiter
from megablend.storage.objects.retry_policy import RetryPolicy
from megablend.storage.objects.sockets import SocketReader
from megablend.storage.objects.timing import LARGE_BYTES, Timing
from megablend.storage.store_options import StoreOptions
from megablend.system.log import LOG

T = TypeVar("T")
_MAX_TIMEOUT_FACTOR = 16.0
"""The largest value of RangeRequest.timeout_factor."""
_MAX_HEDGED = 0.005
"""The maximum share of all requests that are sent a second time."""
_STREAM_BYTES = 1 << 20
"""The number of bytes of a large response that are received at a time."""
_MAX_TAIL_REFUSALS = 3
"""The number of consecutive refusals after which `get_tail` sends no more requests."""


class RangeResponse(NamedTuple):
    """Bytes of an object, and the version that they belong to."""

    parts: list[Any]
    """Buffers with consecutive bytes; empty if the bytes are already in the request's memory."""
    version: ObjectVersion

    def join(self) -> bytes:
        """Return the bytes of all parts."""
        return b"".join(self.parts)


class BucketClient:
    """A client for one bucket, container or server, with one set of options. Used in the event loop
    only.

    Args:
        root: the location of the bucket for messages, such as s3://bucket.
        store: obstore's client of the bucket, which does not retry requests itself.
        options: the settings for reading from the bucket.
        limiter: limits the requests of all clients of this bucket with these options.
        sockets: reads ranges of known versions; None if only obstore's client can read them.
    """

    def __init__(
        self,
        root: str,
        store: Any,
        options: StoreOptions,
        limiter: RateLimiter,
        sockets: SocketReader | None = None,
    ) -> None:
        self.root = root
        self.store = store
        self.options = options
        self._sockets = sockets
        self.limiter = limiter
        self.timing = Timing(options.read_timeout)
        self.policy = RetryPolicy(root, options.give_up_after, self.limiter)
        """Retries requests. Callers of `get` do not need it, since `get` retries by itself."""
        self.counts = self.policy.counts
        """The counts of requests so far."""
        self._warned_of_etags = False
        self._tail_refusals = 0
        self._monitor = InFlightMonitor(
            self.timing, self.limiter, options.read_timeout, self._hedge
        )

    async def get(
        self,
        location: str,
        key: str,
        start: int,
        stop: int,
        version: ObjectVersion | None,
        into: memoryview | None = None,
    ) -> RangeResponse:
        """Return the bytes from `start` to `stop` of one version of an object.

        Args:
            version: the version that the bytes must belong to; None for any version.
            into: memory for these bytes. The response contains only bytes that are not in this
                memory yet.

        Raises: MissingFileError; ChangedFileError; CorruptFileError if the object ends before
            `stop`; DataError.
        """
        wanted = RangeRequest(key, start, stop, version, into=into)
        outcome = await self._attempt(wanted)
        if isinstance(outcome, Failure):
            outcome = await self.policy.retry(location, lambda: self._attempt(wanted), outcome)
            if isinstance(outcome, Failure):
                raise _error_of(location, outcome, version, start, stop)
        else:
            self.policy.note_success()
        return outcome

    async def get_tail(self, key: str, size: int) -> RangeResponse | None:
        """Return the last `size` bytes of an object of unknown size, or all bytes of a smaller
        object; None if the server does not send them for any reason. The request is not retried.
        After several consecutive refusals, it is not even sent."""
        if self._tail_refusals >= _MAX_TAIL_REFUSALS:
            return None
        outcome = await self._attempt(RangeRequest(key, -size, 0, None))
        if not isinstance(outcome, Failure):
            self._tail_refusals = 0
            return outcome
        if outcome.kind not in (Kind.MISSING, Kind.EMPTY):
            self._tail_refusals += 1
        return None

    async def _attempt(self, wanted: RangeRequest) -> RangeResponse | Failure:
        """Make one attempt: send a request, and a second one if the first is late."""
        await self.limiter.enter(wanted.size)
        responses_before = self.timing.num_responses
        request = self._start(wanted, self._hedge_after(wanted.size))
        try:
            outcome = await self._receive(request)
            if isinstance(outcome, Failure) and request.hedge is not None:
                return cast("RangeResponse | Failure", await request.hedge)
            return outcome
        finally:
            if request.hedge is not None:
                request.hedge.cancel()
            self.limiter.leave(wanted.size)
            # If no response has come meanwhile, all requests are slow. `timing` does not learn this
            # from cancelled requests, so the next attempt gets more time
            if self.timing.num_responses == responses_before:
                wanted.timeout_factor = min(_MAX_TIMEOUT_FACTOR, 2 * wanted.timeout_factor)

    def _start(self, wanted: RangeRequest, hedge_after: float = math.inf) -> Request:
        """Count a request that is about to be sent, and return its Request."""
        now = asyncio.get_running_loop().time()
        self.counts.requests += 1
        self.counts.bytes += wanted.size
        return Request(
            now, wanted, num_responses=self.timing.num_responses, late_at=now + hedge_after
        )

    def _hedge_after(self, size: int) -> float:
        """Return the number of seconds after which a request is sent a second time; infinity if it
        must not be sent again, for example because the config limits the rate of requests."""
        rates = (self.options.max_source_rate, self.options.max_request_rate)
        is_sparing = not self.options.hedges or rates != (None, None)
        if size > LARGE_BYTES or is_sparing or self.limiter.is_slowed:
            return math.inf
        return self.timing.hedge_after() or math.inf

    def _hedge(self, request: Request) -> None:
        """Send a late request a second time, unless too many requests have been sent twice."""
        if self.counts.hedges < _MAX_HEDGED * self.counts.requests:
            self.counts.hedges += 1
            request.hedge = asyncio.get_running_loop().create_task(
                self._receive(self._start(replace(request.wanted, into=None)))
            )
            request.hedge.add_done_callback(lambda done: _take_hedge(request, done))

    async def _receive(self, request: Request) -> RangeResponse | Failure:
        """Return the response to a request, or the response to its hedge if that comes first."""
        self._monitor.add(request)
        try:
            return await self._exchange(request)
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            if request.hedge_response is not None:
                return cast(RangeResponse, request.hedge_response)
            if request.is_stalled:
                return self._explain_stall(request)
            raise
        except Exception as error:  # the client may raise anything
            return read_failure(error)
        finally:
            self._monitor.remove(request)

    def _explain_stall(self, request: Request) -> Failure:
        """Return the failure of a request that has stalled."""
        if self.timing.num_responses > request.num_responses:
            failure_kind = Kind.AGAIN  # others got responses meanwhile
        elif self.timing.num_responses:
            failure_kind = Kind.BUSY
        else:
            failure_kind = Kind.CONNECT
        silence = asyncio.get_running_loop().time() - request.last_byte_at
        return Failure(failure_kind, f"no response for {silence:.0f} s", "")

    async def _exchange(self, request: Request) -> RangeResponse | Failure:
        """Send a request over a socket if that is possible, or else through obstore's client."""
        sockets = self._sockets
        if sockets is None or not sockets.is_usable:
            return await self._ask_client(request)
        wanted = request.wanted
        version = wanted.version
        if wanted.into is None or version is None or not version.etag:
            return await self._ask_client(request)
        outcome = await sockets.read(request, self._ask_client)
        if outcome is not None:
            return outcome
        self._note(request, wanted.size)
        return RangeResponse([], version)

    def _note(self, request: Request, size: int) -> None:
        """Record that a request got a response of `size` bytes."""
        assert request.first_byte_at is not None
        self.timing.note(request.sent_at, asyncio.get_running_loop().time() - request.sent_at, size)
        self.limiter.note_latency(request.first_byte_at - request.sent_at, request.first_byte_at)

    async def _ask_client(self, request: Request) -> RangeResponse | Failure:
        """Send a request through obstore's client, and check that the response has the version and
        the length that were requested."""
        import obstore

        loop = asyncio.get_running_loop()
        wanted = request.wanted
        version = wanted.version
        start = wanted.start
        stop = wanted.stop
        options: Any = {
            "range": (start, stop) if start >= 0 else {"suffix": -start},
            **(version.conditions if version is not None else {}),
        }
        request.waits_for = cast(
            "asyncio.Future[Any]", obstore.get_async(self.store, wanted.key, options=options)
        )
        result = await request.waits_for
        request.first_byte_at = request.last_byte_at = loop.time()
        received = version_of_response(result.meta, version, versions=self.options.versions)
        difference = None if version is None else version.find_difference(received)
        if difference is not None:
            return Failure(Kind.CHANGED, difference, "")
        begin, end = result.range
        if start < 0:
            start = max(0, received.size + start)
            stop = received.size
        parts = await _take_body(request, result)
        if not received.etag and not self._warned_of_etags:
            self._warn_of_etags()
        if begin != start or sum(map(len, parts)) != end - begin:
            return explain_encoding(result) or Failure(
                Kind.AGAIN, "the response had the wrong length", ""
            )
        if end != stop and end != received.size:
            return Failure(Kind.AGAIN, "the response ended early", "")
        # `wanted.size` was counted when it was sent; the object may be shorter
        self.counts.bytes += end - begin - wanted.size
        self._note(request, stop - start)
        return RangeResponse(parts, received)

    def _warn_of_etags(self) -> None:
        self._warned_of_etags = True
        LOG.warning(
            "%s: the server does not send strong etags, so only the size or modification time (in seconds) of an object "
            "shows that it was replaced",
            self.root,
        )


async def _take_body(request: Request, result: Any) -> list[Any]:
    """Receive the body of a response. A large body is received in parts."""
    if not request.is_large:
        request.waits_for = body = result.bytes_async()
        return [await body]
    parts: list[Any] = []
    stream = result.stream(min_chunk_size=_STREAM_BYTES).__aiter__()
    with contextlib.suppress(StopAsyncIteration):
        while True:
            request.waits_for = part = stream.__anext__()
            parts.append(await part)
            request.last_byte_at = asyncio.get_running_loop().time()
    return parts


def explain_encoding(result: Any) -> Failure | None:
    """Return the failure of a response that is compressed, and not as requested; None if it is not
    compressed."""
    encoding = result.attributes.get("Content-Encoding")
    if not encoding:
        return None
    return Failure(
        Kind.UNUSABLE,
        f"the server compresses its responses (Content-Encoding: {str(encoding)[:20]})",
        "turn off compression for these files, or copy them to another server",
    )


def _is_cancelled() -> bool:
    """Return whether this task itself was cancelled, not just the future that it waited for. Python
    before 3.11 does not record this, so the result is False there."""
    count_requests = getattr(asyncio.current_task(), "cancelling", None)
    return count_requests is not None and count_requests() > 0


def _take_hedge(request: Request, second: asyncio.Task[RangeResponse | Failure]) -> None:
    """Store the response to a completed hedge, and stop waiting for the late request."""
    if second.cancelled():
        return
    outcome = second.result()
    if isinstance(outcome, RangeResponse):
        request.hedge_response = outcome
        request.interrupt()


def _error_of(
    location: str, failure: Failure, version: ObjectVersion | None, start: int, stop: int
) -> DataError:
    """Return the error for a request that failed and is not retried."""
    if failure.kind is Kind.MISSING:
        if version is None:
            return MissingFileError(location, "no such object")
        return MissingFileError(location, f"was deleted while it was in use; {CHANGED_REMEDY}")
    if failure.kind is Kind.CHANGED:
        cause = "" if failure.cause == "was replaced" else f" ({failure.cause})"
        return ChangedFileError(
            location, f"was replaced while it was in use{cause}; {CHANGED_REMEDY}"
        )
    if failure.kind is Kind.EMPTY:
        return CorruptFileError(
            location,
            f"is truncated (expected {stop - start} bytes here, but the object ends before that); "
            "restore the object",
            offset=start,
        )
    error_class = (
        UnsupportedFileError
        if failure.kind in (Kind.NO_RANGES, Kind.UNUSABLE)
        else RefusedFileError
    )
    return error_class(location, f"cannot be read: {failure.cause}; {failure.remedy}")
