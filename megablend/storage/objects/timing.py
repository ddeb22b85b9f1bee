"""How long a request may take before it is tried again, or sent a second time: learned from earlier
answers.

A fixed time-out sends requests again that a slow source would still have answered, which makes it
slower. So more time is given if answers usually take longer, as they do behind a limited rate.
"""

from __future__ import annotations

from collections import deque

from megablend.storage.objects.rate_limiter import FIRST_REQUESTS

LARGE_BYTES = 1 << 20
"""Larger responses are received in parts, each of which shows that the source is alive."""
_SLOWEST_FACTOR = 3.0
"""An answer may take as long as the slowest one before it, multiplied by this."""
_SLOWEST_DECAY = 0.95
"""The time of the slowest answer is multiplied by this after each further one, so that a bad moment
is forgotten."""
_RATE_WEIGHT = 0.1
"""The weight of a new answer in the average of the rate."""
_RATED_BYTES = 1024
"""Smaller answers tell nothing of the rate: they take as long as a round trip."""
_RATE_DIVISOR = 4
"""An answer may come as slowly as at the average rate divided by this."""
_SLOW_RATE = 4096.0
"""Bytes a second of one request that are assumed to be possible before any were measured."""
_MIN_LATER = 8
"""Fewest later answers by which a request is overtaken, if fewer requests are in flight."""
_SAME_TIME_DIVISOR = 5
"""Requests that are sent within the read time-out divided by this count as sent at the same time."""
_LATE_QUANTILE = 0.99
_RECENT = 200
"""The quantile is that of so many last answers."""
_RANK_EVERY = 100
"""Answers after which the quantile is taken again: sorting costs more than an answer."""


class Timing:
    """Times of one source's answers; used in the event loop only.

    Args:
        read_timeout: seconds of silence that are always allowed.
    """

    def __init__(self, read_timeout: float) -> None:
        self._read_timeout = read_timeout
        self.num_answers = 0
        self._slowest = 0.0
        """Seconds that the slowest answer took, which decay with each further one."""
        self._largest = 0
        """Bytes of the largest answer that came at once, whose time `_slowest` covers."""
        self._rate = 0.0
        """Average bytes per second of one request; 0 before any was measured."""
        self._began: deque[float] = deque(maxlen=2 * FIRST_REQUESTS)
        """When the requests that were answered last had been sent."""
        self._recent: deque[float] = deque(maxlen=_RECENT)
        """Seconds of the last answers that came at once."""
        self._until_ranked = _RANK_EVERY
        self._late = 0.0
        """Seconds that 99 of 100 answers take at most; 0 if too few are known."""

    def note(self, began: float, seconds: float, size: int) -> None:
        """Note that a request, sent at `began`, was answered with `size` bytes after `seconds`."""
        self._began.append(began)
        self.num_answers += 1
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

    def is_overtaken(self, began: float, in_flight: int) -> bool:
        """Return whether as many later requests were answered as are in flight, so that a request
        sent at `began` is not just waiting for its turn. Requests that were sent at about the same
        time are answered in any order."""
        later = began + self._read_timeout / _SAME_TIME_DIVISOR
        return sum(other > later for other in self._began) >= max(_MIN_LATER, in_flight)

    def allow(self, size: int) -> float:
        """Return the seconds without a byte after which a request counts as stalled: longer than
        the read time-out where answers have been slow.

        Args:
            size: bytes that are waited for together, as those of a small answer; 0 if any byte is a
                sign of life.
        """
        patience = max(self._read_timeout, _SLOWEST_FACTOR * self._slowest)
        return patience + self._transfer_seconds(size)

    def allow_stalled(self, size: int) -> float:
        """Like `allow`, of a request that later ones have overtaken: the source is not slow, so the
        time of other answers is no reason to wait longer."""
        return self._read_timeout + self._transfer_seconds(size)

    def hedge_after(self) -> float | None:
        """Return the seconds after which an answer is late enough to send its request a second
        time: twice what 99 in 100 take; None if too few are known."""
        return 2 * self._late if self._late else None

    def _transfer_seconds(self, size: int) -> float:
        """Return the seconds that `size` bytes may take in addition, if no answer so far had as
        many."""
        more_bytes = max(0, size - self._largest)
        return more_bytes / max(self._rate / _RATE_DIVISOR, _SLOW_RATE)
