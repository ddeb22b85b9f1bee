"""The time that a request may take before it is tried again. It is learned from earlier responses.

A fixed time-out would repeat requests that a slow source would still have answered, which makes the
source even slower. So requests get more time if responses usually take longer, for example because
their rate is limited.
"""

from __future__ import annotations

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

    def note(self, seconds: float, size: int) -> None:
        """Record the time that a response took.

        Args:
            seconds: the time from the request to the end of the response.
            size: the size of the response in bytes.
        """
        self.num_responses += 1
        self._slowest = max(seconds, _SLOWEST_DECAY * self._slowest)
        if size > _RATED_BYTES:
            rate = size / max(seconds, 0.001)
            self._rate += _RATE_WEIGHT * (rate - self._rate) if self._rate else rate
        if size <= LARGE_BYTES:
            self._largest = max(self._largest, size)

    def allow(self, size: int) -> float:
        """Return the number of seconds without a byte after which a request counts as stalled. It
        is longer than the read time-out if responses have been slow.

        Args:
            size: the number of bytes that arrive together, such as all bytes of a small response; 0
                if the bytes arrive in several parts, each of which shows that the source responds.
        """
        patience = max(self._read_timeout, _SLOWEST_FACTOR * self._slowest)
        # A response that is larger than all earlier ones may take longer
        more_bytes = max(0, size - self._largest)
        return patience + more_bytes / max(self._rate / _RATE_DIVISOR, _SLOW_RATE)
