"""How long a request may take before it is tried again, or sent a second time:
learned from the answers before.

A fixed time-out sends requests again that a slow source would still have answered, which makes it
slower. So more time is given if answers usually take longer, as they do behind a limited rate.
"""

from __future__ import annotations

from collections import deque

from megablend.storage.objects.rate_limiter import FIRST_REQUESTS

LARGE_BYTES = 1 << 20
"""Larger responses are received in parts, each of which shows that the source is alive."""
_MANY_TIMES = 3.0
_FORGET = 0.95
"""What the slowest answer counts for after each further one."""
_SLOW_RATE = 4096.0
"""Bytes a second of one request that are assumed to be possible before any were measured."""
_MIN_LATER = 8
_KEPT = 200
_MIN_KEPT = 100


class Timing:
    """Times of one source's answers; used in the event loop only.

    Args:
        read_timeout: seconds of silence that are always allowed.
    """

    def __init__(self, read_timeout: float) -> None:
        self._read_timeout = read_timeout
        self.num_answers = 0
        self._largest = 0
        self._slowest = 0.0
        self._rate = 0.0
        self._recent: deque[float] = deque(maxlen=_KEPT)
        self._began: deque[float] = deque(maxlen=2 * FIRST_REQUESTS)
        self._late = 0.0
        self._until_sorted = _MIN_KEPT

    def note(self, began: float, seconds: float, size: int) -> None:
        """A request was answered with `size` bytes, `seconds` after it was sent at `began`."""
        self._began.append(began)
        self.num_answers += 1
        self._slowest = max(seconds, _FORGET * self._slowest)
        if size > 1024:
            rate = size / max(seconds, 0.001)
            self._rate += 0.1 * (rate - self._rate) if self._rate else rate
        if size > LARGE_BYTES:
            return
        self._largest = max(self._largest, size)
        self._recent.append(seconds)
        self._until_sorted -= 1
        if self._until_sorted <= 0:
            self._until_sorted = _MIN_KEPT
            self._late = sorted(self._recent)[int(0.99 * len(self._recent))]

    def is_overtaken(self, began: float, in_flight: int) -> bool:
        """Whether as many later requests were answered as are in flight: a request sent at `began`
        is not just waiting for its turn. Requests that were sent at about the same time are
        answered in any order."""
        later = began + self._read_timeout / 5
        return sum(other > later for other in self._began) >= max(_MIN_LATER, in_flight)

    def allow(self, size: int) -> float:
        """Seconds in which an answer may not begin, or not go on, or `size` bytes may come that are
        waited for at once."""
        return max(self._read_timeout, _MANY_TIMES * self._slowest) + self._seconds_of(size)

    def allow_stalled(self, size: int) -> float:
        """The same for a request although later ones were answered first."""
        return self._read_timeout + self._seconds_of(size)

    def hedge_after(self) -> float | None:
        """Seconds after which an answer is late, as 1 of 100 are; None if too few are known."""
        return 2 * self._late if self._late else None

    def _seconds_of(self, size: int) -> float:
        """For more bytes than the answers had that the other times were learned from."""
        return max(0, size - self._largest) / max(self._rate / 4, _SLOW_RATE)
