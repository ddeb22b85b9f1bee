"""How many requests to a source are in flight, how many bytes they ask for,
and at which rate: this process's share."""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

FIRST_REQUESTS = 256
"""Requests of a process in flight at a time, before anything was measured: at 30 ms and 64 KB each,
about 500 MB/s. Latency alone does not make them fewer: a client and a server that are busy take less
CPU time for each of many requests."""
MAX_REQUESTS = 1024
"""Most requests of a process in flight at a time, however short the latency."""
MAX_BYTES = 256 << 20
"""Most bytes that a process has requested and not yet received."""
_MIN_REQUESTS = 4
_SHORT_RATIO = 1.5
"""Below this ratio of the latency to the shortest one, more requests make more throughput."""
_LONG_RATIO = 3.0
"""Above this ratio of the latency to the shortest one, further requests only wait in line."""
_GROWTH = 1.25
_SHRINKING = 0.9
MAX_PAUSE_SECONDS = 300.0
"""Longest pause, even if a source asks for a longer one."""
_LATENCY_SECONDS = 10.0
"""How long the shortest latency counts, at least."""
JOB_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
"""Variables with the number of processes of a job."""


def count_processes() -> int:
    """Return the processes of the job that read: its ranks, times the workers of this process's
    DataLoader."""
    ranks = next(
        (int(os.environ[name]) for name in JOB_SIZES if os.environ.get(name, "").isdigit()), 1
    )
    worker = _find_worker()
    return max(1, ranks) * (worker.num_workers if worker is not None else 1)


def is_loader_worker() -> bool:
    """Return whether this process is a worker of a DataLoader."""
    return _find_worker() is not None


def _find_worker() -> Any:
    data = sys.modules.get("torch.utils.data")  # not imported for this
    return data.get_worker_info() if data is not None else None


class RateLimiter:
    """Admits requests of one source; used in the event loop only.

    How many are admitted follows from the latency, the time until an answer begins. While it is
    close to the shortest one that was measured, the network has room, and more requests are
    admitted. When it is several times as long, requests wait for one another, and fewer are
    admitted, but at least FIRST_REQUESTS. Only a source that says it is busy gets fewer than those,
    and then one more after each round of successes. While a source has asked for a pause, nothing
    is admitted.

    Args:
        max_requests: limit of the whole job.
        max_rate: limit of the whole job, in bytes per second; None for no limit.
        processes: how many processes share these limits.
        max_request_rate: limit of the whole job, in requests per second; None for no limit.
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
        """Called when the source asks for fewer requests, with the seconds of the pause that it asks
        for."""
        self.limit: float = MAX_REQUESTS
        """Requests that may be in flight now."""
        self._aim: float = self.limit
        """What `limit` would be if the source had never said that it is busy."""
        self.divide(processes)
        self._until_adjusted: float = self.limit
        """Answers until `_aim` is adjusted."""
        self._latency = 0.0
        """Moving average of the latency, in seconds."""
        # The shortest latency of this period of _LATENCY_SECONDS, of the one before, and its end
        self._shortest_now = math.inf
        self._shortest_before = math.inf
        self._period_end = 0.0
        self.requests = 0
        """Requests in flight."""
        self.bytes = 0
        """Bytes that these ask for."""
        self.backlog = 0
        """Items that a `call_each` has yet to call: requests that follow as soon as others are
        done."""
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        """Requests that are not admitted yet: their bytes, and what is done when they are."""
        self._paid_until = 0.0
        """When all requests so far will have been within the rates."""
        self._slowed_at = 0.0
        """When the source last said that it is busy."""
        self.paused_until = 0.0
        """Nothing is admitted before this time of the event loop."""

    def divide(self, processes: int) -> None:
        """From now on, divide the limits of the whole job between `processes` processes."""
        is_slowed = self.is_slowed
        # A low limit was set by somebody, and holds for all processes together
        min_requests = _MIN_REQUESTS if self._job_requests >= MAX_REQUESTS else 1
        self.max_requests = max(min_requests, min(MAX_REQUESTS, self._job_requests // processes))
        self._aim = min(FIRST_REQUESTS, self.max_requests)
        self.limit = min(self.limit, self._aim) if is_slowed else self._aim
        self._seconds_a_byte = processes / (self._job_rate or math.inf)
        self._seconds_a_request = processes / (self._job_request_rate or math.inf)

    async def enter(self, size: int) -> None:
        """Wait until `size` bytes may be requested."""
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
        """Give back what a request took."""
        self.requests -= 1
        self.bytes -= size
        self._admit()

    def slow_down(self, now: float, pause: float = 0.0, *, is_told: bool = False) -> None:
        """Admit fewer requests: the source is busy. Many answers within a second count once.

        Args:
            pause: seconds in which nothing is admitted.
            is_told: whether another process has told this one, so that `on_busy` is not called.
        """
        until = now + min(pause, MAX_PAUSE_SECONDS)
        is_new = now - self._slowed_at >= 1 or until >= self.paused_until + 1
        self.paused_until = max(self.paused_until, until)
        if now - self._slowed_at >= 1:
            self._slowed_at = now
            min_requests = min(_MIN_REQUESTS, self.max_requests)
            # An idle process may be told: it has no requests of which fewer would be admitted
            in_use = min(self.limit, self.requests or self.limit)
            self.limit = max(min_requests, 0.7 * in_use)
        if is_new and not is_told and self.on_busy is not None:
            self.on_busy(until - now)

    @property
    def is_slowed(self) -> bool:
        """Whether fewer requests are admitted since the source said that it is busy."""
        return self.limit < self._aim

    def speed_up(self) -> None:
        """Admit more requests again, since one has succeeded."""
        if self.limit < self._aim:
            self.limit = min(self._aim, self.limit + 1 / self.limit)

    def note_latency(self, seconds: float, now: float) -> None:
        """Note that an answer began `seconds` after its request was sent."""
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
        """Aim at more requests, or at fewer, by the ratio of the latency to the shortest one."""
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
        while self._waiting and (self._waiting[0][1].done() or self._has_room(self._waiting[0][0])):
            size, turn = self._waiting.popleft()
            if not turn.done():
                self._add(size)
                turn.set_result(None)

    async def pay(self, size: int = 0) -> None:
        """Wait until a request of `size` bytes is within the rates, and for the end of a pause. A
        second's worth of requests may go at once."""
        now = asyncio.get_running_loop().time
        until = 0.0
        cost = max(size * self._seconds_a_byte, self._seconds_a_request)
        if cost:
            until = max(self._paid_until, now() - 1) + cost
            self._paid_until = until
        while (wait := max(until, self.paused_until) - now()) > 0:
            await asyncio.sleep(wait)
