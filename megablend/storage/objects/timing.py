"""How long a request may take before it is tried again, or sent a second time: learned from the answers before.

A fixed time-out sends requests again that a slow source would still have answered, which makes it slower. So more time is given
where answers usually take longer, as they do behind a limited rate.
"""

from __future__ import annotations

from collections import deque

LARGE_BYTES = 1 << 20
"""Larger answers are taken in parts, each of which shows that the source is there."""
_MANY_TIMES = 4.0
_SLOW_RATE = 4096.0
"""Bytes a second of one request that are assumed to be possible before any were measured."""
_KEPT = 200
_LEAST_KEPT = 100


class Timing:
    """Times of one source's answers; used in the event loop only.

    Args:
        read_timeout: seconds of silence that are always allowed.
    """

    def __init__(self, read_timeout: float) -> None:
        self._read_timeout = read_timeout
        self._wait, self._rate = 0.0, 0.0
        self._recent: deque[float] = deque(maxlen=_KEPT)
        self._slow = 0.0
        self._until_sorted = _LEAST_KEPT

    def note(self, wait: float, body: float, size: int) -> None:
        """An answer came: its first byte after `wait` seconds, the rest `body` seconds later."""
        self._wait += 0.1 * (wait - self._wait)
        if size > 1024:
            rate = size / max(body, 0.001)
            self._rate += 0.1 * (rate - self._rate) if self._rate else rate
        if size > LARGE_BYTES:
            return
        self._recent.append(wait + body)
        self._until_sorted -= 1
        if self._until_sorted <= 0:
            self._until_sorted = _LEAST_KEPT
            self._slow = sorted(self._recent)[int(0.99 * len(self._recent))]

    def allow_silence(self) -> float:
        """Seconds in which an answer may not begin, or not go on."""
        return max(self._read_timeout, _MANY_TIMES * self._wait)

    def allow_body(self, size: int) -> float:
        """Seconds in which `size` bytes have to come that are waited for at once."""
        rate = max(self._rate / 8, 512.0) if self._rate else _SLOW_RATE
        return self.allow_silence() + size / rate

    def hedge_after(self) -> float | None:
        """Seconds after which an answer is late, as 1 of 100 are; None where too few are known."""
        return 2 * self._slow if self._slow else None
