"""Requests in flight, checked several times a second:
stalled ones are ended, late ones are sent a second time.

One timer serves all requests of a source: a timer, and a task that waits for it, would cost more
CPU time than a request.
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
"""Longest time between two checks of all requests."""


@dataclass(slots=True)
class RangeRequest:
    """Bytes of an object that are requested, once or several times."""

    key: str
    start: int
    """The first byte. If negative, the last `-start` bytes are requested, and `stop` is 0."""
    stop: int
    version: ObjectVersion | None
    """The version that the bytes must be of; None for any."""
    timeout_factor: float = 1.0
    """What the usual time-out is multiplied by."""
    into: memoryview | None = None
    """Memory for the bytes, if they may be written there before all have come."""

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.stop - self.start


class Request:
    """A ranged GET in flight."""

    __slots__ = (
        "began",
        "check_at",
        "first",
        "hedge",
        "hedge_answer",
        "is_stalled",
        "last",
        "late_at",
        "num_answers",
        "waits_for",
        "wanted",
    )

    def __init__(
        self, now: float, wanted: RangeRequest, *, num_answers: int, late_at: float = math.inf
    ) -> None:
        self.wanted = wanted
        self.num_answers = num_answers
        """How many answers the source had given when it was sent."""
        self.began = now
        """When it was sent."""
        self.last = now
        """When something of its answer last arrived; at first, when it was sent."""
        self.check_at = 0.0
        """When it is next checked whether it has stalled: how long others take is known better by
        then."""
        self.first: float | None = None
        """When its answer began."""
        self.waits_for: asyncio.Future[Any] | None = None
        """What its coroutine waits for."""
        self.is_stalled = False
        self.late_at = late_at
        """When it is sent a second time, as decided when it was sent first."""
        self.hedge: asyncio.Task[Any] | None = None
        """The second request."""
        self.hedge_answer: Any = None

    @property
    def is_large(self) -> bool:
        """Whether the response is received in parts."""
        return self.wanted.size > LARGE_BYTES

    def interrupt(self) -> None:
        """End the wait; its coroutine gets a CancelledError, and looks up why."""
        if self.waits_for is not None:
            self.waits_for.cancel()


class InFlightMonitor:
    """Watches the requests of one source; used in the event loop only.

    Args:
        hedge: sends a request a second time if that is appropriate.
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
        """Watch a request no longer, which is done."""
        self._requests.discard(request)

    def _schedule(self) -> None:
        tick = min(_TICK_SECONDS, self._read_timeout / 10)
        asyncio.get_running_loop().call_later(tick, self._look)

    def _look(self) -> None:
        if not self._requests:
            self._is_running = False
            return
        now = asyncio.get_running_loop().time()
        for request in list(self._requests):
            if request.hedge_answer is not None:
                request.interrupt()
                continue
            is_due = now >= max(request.check_at, request.last + self._read_timeout)
            if is_due and self._has_stalled(request, now):
                request.is_stalled = True
                request.interrupt()
            elif now >= request.late_at:
                request.late_at = math.inf
                self._hedge(request)
        self._schedule()

    def _has_stalled(self, request: Request, now: float) -> bool:
        """Return whether a request has stalled; if not, when to check it again is noted."""
        end = request.last + self._allow(request)
        request.check_at = min(end, now + self._read_timeout)
        return now >= end

    def _allow(self, request: Request) -> float:
        """Return seconds that may pass after the last sign of an answer: few if a whole round of
        later requests was answered."""
        size = 0 if request.first is None or request.is_large else request.wanted.size
        if self._timing.is_overtaken(request.began, self._limiter.requests):
            return self._timing.allow_stalled(size)
        return request.wanted.timeout_factor * self._timing.allow(size)
