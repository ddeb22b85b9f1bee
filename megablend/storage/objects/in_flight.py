"""Requests in flight, which are checked several times a second: stalled requests are cancelled, and
late requests are sent a second time.

One timer serves all requests of a source: a timer for each request, and a task that waits for it,
would cost more CPU time than the request.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megablend.storage.objects.object_version import ObjectVersion
from megablend.storage.objects.rate_limiter import RateLimiter
from megablend.storage.objects.timing import LARGE_BYTES, Timing

_TICK_SECONDS = 0.05
"""The maximum time between two checks of all requests."""


@dataclass(slots=True)
class RangeRequest:
    """A range of an object to request. It may be requested several times."""

    key: str
    start: int
    """The first byte. If negative, the last `-start` bytes are requested, and `stop` is 0."""
    stop: int
    version: ObjectVersion | None
    """The version that the bytes must belong to; None for any version."""
    timeout_factor: float = 1.0
    """The factor by which the usual time-out is multiplied."""
    into: memoryview | None = None
    """Memory for the bytes, if they may be written to it before all of them have arrived."""

    @property
    def size(self) -> int:
        """The number of requested bytes."""
        return self.stop - self.start


class Request:
    """A ranged GET in flight. All times are by the clock of the event loop."""

    __slots__ = (
        "check_at",
        "first_byte_at",
        "hedge",
        "hedge_response",
        "is_stalled",
        "last_byte_at",
        "late_at",
        "num_responses",
        "sent_at",
        "waits_for",
        "wanted",
    )

    def __init__(
        self, now: float, wanted: RangeRequest, *, num_responses: int, late_at: float = math.inf
    ) -> None:
        self.wanted = wanted
        """The range that is requested."""
        self.num_responses = num_responses
        """The number of responses from the source before this request was sent."""
        self.sent_at = now
        """The time at which this request was sent."""
        self.last_byte_at = now
        """The time at which a byte of the response last arrived; at first, `sent_at`."""
        self.check_at = 0.0
        """The time at which to check next whether this request has stalled. By then, more is known
        about how long other requests take."""
        self.first_byte_at: float | None = None
        """The time at which the response began."""
        self.waits_for: asyncio.Future[Any] | None = None
        """The future that the coroutine of this request waits for."""
        self.is_stalled = False
        self.late_at = late_at
        """The time at which a second request for the same range, the hedge, is sent. It is set when
        this request is sent."""
        self.hedge: asyncio.Task[Any] | None = None
        """The task of the second request."""
        self.hedge_response: Any = None

    @property
    def is_large(self) -> bool:
        """Whether the response is received in parts."""
        return self.wanted.size > LARGE_BYTES

    def interrupt(self) -> None:
        """Interrupt the coroutine of this request. The coroutine gets a CancelledError, and finds
        the reason in this object."""
        if self.waits_for is not None:
            self.waits_for.cancel()


class InFlightMonitor:
    """A monitor that checks the requests in flight to one source; used in the event loop only.

    Args:
        hedge: called with a late request; may send it a second time.
    """

    def __init__(
        self,
        timing: Timing,
        limiter: RateLimiter,
        read_timeout: float,
        hedge: Callable[[Request], None],
    ) -> None:
        self._timing = timing
        self._limiter = limiter
        self._read_timeout = read_timeout
        self._hedge = hedge
        self._requests = set[Request]()
        self._is_running = False

    def add(self, request: Request) -> None:
        """Watch a request from now on."""
        self._requests.add(request)
        if not self._is_running:
            self._is_running = True
            self._schedule()

    def remove(self, request: Request) -> None:
        """Stop watching a request that is done."""
        self._requests.discard(request)

    def _schedule(self) -> None:
        tick = min(_TICK_SECONDS, self._read_timeout / 10)
        asyncio.get_running_loop().call_later(tick, self._check_all)

    def _check_all(self) -> None:
        """Interrupt requests that have stalled or whose hedge was faster, and hedge late
        requests."""
        if not self._requests:
            self._is_running = False
            return
        now = asyncio.get_running_loop().time()
        for request in list(self._requests):
            if request.hedge_response is not None:
                request.interrupt()
                continue
            is_due = now >= max(request.check_at, request.last_byte_at + self._read_timeout)
            if is_due and self._has_stalled(request, now):
                request.is_stalled = True
                request.interrupt()
            elif now >= request.late_at:
                request.late_at = math.inf
                self._hedge(request)
        self._schedule()

    def _has_stalled(self, request: Request, now: float) -> bool:
        """Return whether a request has stalled; if not, set the time of its next check."""
        end = request.last_byte_at + self._allow(request)
        request.check_at = min(end, now + self._read_timeout)
        return now >= end

    def _allow(self, request: Request) -> float:
        """Return the number of seconds that may pass without a byte of the response. It is shorter
        if the request has been overtaken; see Timing.is_overtaken."""
        size = 0 if request.first_byte_at is None or request.is_large else request.wanted.size
        if self._timing.is_overtaken(request.sent_at, self._limiter.requests):
            return self._timing.allow_stalled(size)
        return request.wanted.timeout_factor * self._timing.allow(size)
