"""Limit the requests to a source: the number in flight, the bytes that they ask for, and their
rate. Each process has a share of the job's limits."""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

FIRST_REQUESTS = 256
"""The number of requests of a process that may be in flight before any latency has been measured.
With 30 ms and 64 KB per request, this gives about 500 MB/s. A long latency alone does not reduce
the number below this: with many requests in flight, a busy client and server need less CPU time for
each request."""
MAX_REQUESTS = 1024
"""The maximum number of requests of a process in flight at a time, however short the latency."""
MAX_BYTES = 256 << 20
"""The maximum number of bytes that a process has requested and not yet received."""
_MIN_REQUESTS = 4
"""The minimum number of requests in flight of a process, even if the source is busy."""
_SHORT_RATIO = 1.5
"""If the latency is less than this many times the shortest latency, more requests increase the
throughput."""
_LONG_RATIO = 3.0
"""If the latency is more than this many times the shortest latency, further requests only wait in
line."""
_GROWTH = 1.25
_SHRINKING = 0.9
"""The factors by which the number of admitted requests is multiplied, to raise it or to lower
it."""
MAX_PAUSE_SECONDS = 300.0
"""The maximum length of a pause, even if a source asks for a longer one."""
_LATENCY_SECONDS = 10.0
"""The minimum time for which the shortest latency is remembered."""
JOB_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
"""Environment variables with the number of processes of a job."""


def count_processes() -> int:
    """Return the number of the job's processes that read: its ranks, times the workers of this
    process's DataLoader."""
    sizes = [os.environ.get(variable, "") for variable in JOB_SIZES]
    valid_sizes = [int(size) for size in sizes if size.isdigit()]
    num_ranks = valid_sizes[0] if valid_sizes else 1
    worker = _find_worker()
    num_workers = 1 if worker is None else worker.num_workers
    return max(1, num_ranks) * num_workers


def is_loader_worker() -> bool:
    """Return whether this process is a worker of a DataLoader."""
    return _find_worker() is not None


def _find_worker() -> Any:
    """Return torch's description of this DataLoader worker; None in any other process."""
    data = sys.modules.get("torch.utils.data")  # torch is not imported for this
    return data.get_worker_info() if data is not None else None


class Failing(NamedTuple):
    """The failures of a source since it last gave a proper response."""

    since: float
    """The time of the first failure, by the clock of the event loop."""
    cause: str
    """The reason why the last request failed."""


class RateLimiter:
    """A limiter that admits the requests to one source; used in the event loop only.

    The number of admitted requests depends on the latency, the time until a response begins. While
    the latency is close to the shortest one that was measured, the network has room, and more
    requests are admitted. When it is several times as long, requests wait for one another, and
    fewer are admitted, but at least FIRST_REQUESTS. The number is less than that only if a source
    says that it is busy; it then grows by one after each round of successes. While a source has
    asked for a pause, no request is admitted.

    Args:
        max_requests: the limit of the whole job.
        max_rate: the limit of the whole job, in bytes per second; None for no limit.
        processes: the number of processes that share these limits.
        max_request_rate: the limit of the whole job, in requests per second; None for no limit.
    """

    def __init__(
        self,
        max_requests: int,
        max_rate: int | None,
        processes: int,
        max_request_rate: float | None = None,
    ) -> None:
        self._job_requests = max_requests
        self._job_rate = max_rate
        self._job_request_rate = max_request_rate
        self.on_busy: Callable[[float], None] | None = None
        """A function that is called when the source asks for fewer requests. Its argument is the
        number of seconds of the pause that the source asks for."""
        self.limit: float = MAX_REQUESTS
        """The number of requests that may be in flight now."""
        self._aim: float = self.limit
        """The value that `limit` would have if the source had never said that it is busy."""
        self.divide(processes)
        self._until_adjusted: float = self.limit
        """The number of responses until `_aim` is adjusted."""
        self._latency = 0.0
        """The moving average of the latency, in seconds."""
        self._shortest_now = math.inf
        """The shortest latency of the current period of _LATENCY_SECONDS."""
        self._shortest_before = math.inf
        """The shortest latency of the previous period."""
        self._period_end = 0.0
        """The end of the current period."""
        self.requests = 0
        """The number of requests in flight."""
        self.bytes = 0
        """The number of bytes that requests in flight ask for."""
        self.backlog = 0
        """The number of items for which `call_each` has not started a call yet. Their requests
        follow as soon as others are done."""
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        """Requests that are not yet admitted: the bytes of each, and a future that is done once the
        request is admitted."""
        self._paid_until = 0.0
        """The time until which the requests so far use up the allowed rates."""
        self._slowed_at = 0.0
        """The time at which the source last said that it is busy."""
        self.paused_until = 0.0
        """The time of the event loop before which no request is admitted."""
        self.failing: Failing | None = None
        """The failures of the source, of any kind, since its last proper response; None if there
        are none."""

    def divide(self, processes: int) -> None:
        """Divide the limits of the whole job between `processes` processes from now on."""
        is_slowed = self.is_slowed
        # A low limit was set on purpose, and holds for all processes together
        min_requests = _MIN_REQUESTS if self._job_requests >= MAX_REQUESTS else 1
        self.max_requests = max(min_requests, min(MAX_REQUESTS, self._job_requests // processes))
        self._aim = min(FIRST_REQUESTS, self.max_requests)
        self.limit = min(self.limit, self._aim) if is_slowed else self._aim
        self._seconds_a_byte = processes / (self._job_rate or math.inf)
        self._seconds_a_request = processes / (self._job_request_rate or math.inf)

    async def enter(self, size: int) -> None:
        """Wait until a request for `size` bytes is admitted."""
        if self._waiting or not self._has_room(size):
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append((size, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self.leave(size)
                raise
        else:
            self._add(size)
        try:
            await self.pay(size)
        except asyncio.CancelledError:
            self.leave(size)
            raise

    def leave(self, size: int) -> None:
        """Report that a request for `size` bytes has ended, so that others can be admitted."""
        self.requests -= 1
        self.bytes -= size
        self._admit()

    def slow_down(self, now: float, pause: float = 0.0, *, is_told: bool = False) -> None:
        """Admit fewer requests, since the source is busy. Several calls within a second count as
        one.

        Args:
            pause: the number of seconds for which no request is admitted.
            is_told: whether another process has reported that the source is busy. `on_busy` is then
                not called.
        """
        until = now + min(pause, MAX_PAUSE_SECONDS)
        is_new = now - self._slowed_at >= 1 or until >= self.paused_until + 1
        self.paused_until = max(self.paused_until, until)
        if now - self._slowed_at >= 1:
            self._slowed_at = now
            min_requests = min(_MIN_REQUESTS, self.max_requests)
            # An idle process, which another one may notify, has no requests to reduce: its limit is
            # reduced instead
            in_use = min(self.limit, self.requests or self.limit)
            self.limit = max(min_requests, 0.7 * in_use)
        if is_new and not is_told and self.on_busy is not None:
            self.on_busy(until - now)

    @property
    def is_slowed(self) -> bool:
        """Whether fewer requests are admitted because the source said that it is busy."""
        return self.limit < self._aim

    def speed_up(self) -> None:
        """Admit more requests again, since a request has succeeded."""
        if self.limit < self._aim:
            self.limit = min(self._aim, self.limit + 1 / self.limit)

    def note_latency(self, seconds: float, now: float) -> None:
        """Record that a response began `seconds` after its request was sent."""
        if now >= self._period_end:
            self._shortest_before = self._shortest_now
            self._shortest_now = seconds
            self._period_end = now + _LATENCY_SECONDS
        self._shortest_now = min(self._shortest_now, seconds)
        self._latency += 0.05 * (seconds - self._latency) if self._latency else seconds
        self._until_adjusted -= 1
        if self._until_adjusted <= 0:
            self._until_adjusted = self._aim
            self._adjust(self._latency / max(1e-6, min(self._shortest_before, self._shortest_now)))

    def _adjust(self, latency_ratio: float) -> None:
        """Raise or lower the target number of requests, given the ratio of the latency to the
        shortest latency."""
        is_slowed = self.is_slowed
        aim = self._aim
        if latency_ratio < _SHORT_RATIO and (self._waiting or self.backlog):
            aim = min(self.max_requests, aim * _GROWTH)
        elif latency_ratio > _LONG_RATIO:
            aim = max(min(FIRST_REQUESTS, self.max_requests), aim * _SHRINKING)
        self._aim = aim
        self.limit = min(self.limit, aim) if is_slowed else aim

    def _has_room(self, size: int) -> bool:
        return self.requests < int(self.limit) and (
            self.bytes + size <= MAX_BYTES or not self.requests
        )

    def _add(self, size: int) -> None:
        self.requests += 1
        self.bytes += size

    def _admit(self) -> None:
        """Admit waiting requests in order, as long as there is room."""
        while self._waiting:
            size, turn = self._waiting[0]
            is_cancelled = turn.done()
            if not is_cancelled and not self._has_room(size):
                break
            self._waiting.popleft()
            if not is_cancelled:
                self._add(size)
                turn.set_result(None)

    async def pay(self, size: int = 0) -> None:
        """Wait until the allowed rates have room for a request of `size` bytes, and until any pause
        has ended. The requests of one second may be sent at once."""
        now = asyncio.get_running_loop().time
        until = 0.0
        cost = max(size * self._seconds_a_byte, self._seconds_a_request)
        if cost:
            until = max(self._paid_until, now() - 1) + cost
            self._paid_until = until
        while now() < max(until, self.paused_until):  # the pause may grow meanwhile
            await asyncio.sleep(max(until, self.paused_until) - now())
