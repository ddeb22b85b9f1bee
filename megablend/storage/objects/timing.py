"""The time that a request may take before it is tried again, or sent a second time. It is learned
from earlier responses.

A fixed time-out would repeat requests that a slow source would still have answered, which makes the
source even slower. So requests get more time if responses usually take longer, for example because
their rate is limited.
"""

from __future__ import annotations

from collections import deque

from megablend.storage.objects.rate_limiter import FIRST_REQUESTS

LARGE_BYTES = 1 << 20
"""The size above which a response is received in parts, each of which shows that the source is alive."""
_SLOWEST_FACTOR = 3.0
"""A response may take this many times as long as the slowest earlier response."""
_SLOWEST_DECAY = 0.95
"""The factor by which the time of the slowest response is multiplied after each further response,
so that a single slow response is forgotten."""
_RATE_WEIGHT = 0.1
"""The weight of a new response in the average of the rate."""
_RATED_BYTES = 1024
"""The size up to which responses say nothing about the rate, since they take only a round trip."""
_RATE_DIVISOR = 4
"""A response may arrive as slowly as at the average rate divided by this number."""
_SLOW_RATE = 4096.0
"""The rate of one request, in bytes per second, that is assumed until a rate is measured."""
_MIN_LATER = 8
"""The minimum number of later responses after which a request counts as overtaken."""
_SAME_TIME_DIVISOR = 5
"""Requests that are sent within the read time-out divided by this number count as sent at the same
time."""
_LATE_QUANTILE = 0.99
"""The quantile of the times of recent responses above which a response is late."""
_RECENT = 200
"""The number of recent responses from which the quantile is computed."""
_RANK_EVERY = 100
"""The number of responses after which the quantile is computed again: sorting costs more CPU time
than a response."""


class Timing:
    """The times that the responses of one source have taken; used in the event loop only.

    Args:
        read_timeout: the number of seconds without a byte that is always allowed.
    """

    def __init__(self, read_timeout: float) -> None:
        self._read_timeout = read_timeout
        self.num_responses = 0
        self._slowest = 0.0
        """The time of the slowest response in seconds, which decays with each further response."""
        self._largest = 0
        """The size of the largest response that was received in one piece; `_slowest` covers its
        time."""
        self._rate = 0.0
        """The average rate of one request, in bytes per second; 0 until a rate is measured."""
        self._sent_times: deque[float] = deque(maxlen=2 * FIRST_REQUESTS)
        """The times at which the requests for the last responses were sent."""
        self._recent: deque[float] = deque(maxlen=_RECENT)
        """The times in seconds of the last responses that were received in one piece."""
        self._until_ranked = _RANK_EVERY
        self._late = 0.0
        """The time in seconds within which 99 of 100 responses arrive; 0 if too few responses are
        known."""

    def note(self, sent_at: float, seconds: float, size: int) -> None:
        """Record the time that a response took.

        Args:
            sent_at: the time at which the request was sent, by the clock of the event loop.
            seconds: the time from the request to the end of the response.
            size: the size of the response in bytes.
        """
        self._sent_times.append(sent_at)
        self.num_responses += 1
        self._slowest = max(seconds, _SLOWEST_DECAY * self._slowest)
        if size > _RATED_BYTES:
            rate = size / max(seconds, 0.001)
            self._rate += _RATE_WEIGHT * (rate - self._rate) if self._rate else rate
        if size > LARGE_BYTES:
            return
        self._largest = max(self._largest, size)
        self._recent.append(seconds)
        self._until_ranked -= 1
        if self._until_ranked <= 0:
            self._until_ranked = _RANK_EVERY
            self._late = sorted(self._recent)[int(_LATE_QUANTILE * len(self._recent))]

    def is_overtaken(self, sent_at: float, in_flight: int) -> bool:
        """Return whether a request that was sent at `sent_at` has been overtaken: as many later
        requests have got responses as are in flight, so that the request is not just waiting for
        its turn. Requests that were sent at about the same time do not count as later, since they
        are answered in any order."""
        later = sent_at + self._read_timeout / _SAME_TIME_DIVISOR
        return sum(other > later for other in self._sent_times) >= max(_MIN_LATER, in_flight)

    def allow(self, size: int) -> float:
        """Return the number of seconds without a byte after which a request counts as stalled. It
        is longer than the read time-out if responses have been slow.

        Args:
            size: the number of bytes that arrive together, such as all bytes of a small response; 0
                if the bytes arrive in several parts, each of which shows that the source responds.
        """
        patience = max(self._read_timeout, _SLOWEST_FACTOR * self._slowest)
        return patience + self._transfer_seconds(size)

    def allow_stalled(self, size: int) -> float:
        """Return the number of seconds without a byte after which an overtaken request counts as
        stalled. Slow earlier responses are ignored, since the source responds to other requests."""
        return self._read_timeout + self._transfer_seconds(size)

    def hedge_after(self) -> float | None:
        """Return the number of seconds after which a request is sent a second time: twice the time
        within which 99 of 100 responses arrive. None if too few responses are known."""
        return 2 * self._late if self._late else None

    def _transfer_seconds(self, size: int) -> float:
        """Return the additional seconds that a response of `size` bytes may take because it is
        larger than all earlier responses."""
        more_bytes = max(0, size - self._largest)
        return more_bytes / max(self._rate / _RATE_DIVISOR, _SLOW_RATE)
