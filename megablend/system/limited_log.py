"""Warnings that others can cause as often as they like: each of them is logged once a minute."""

from __future__ import annotations

import time

from megablend.system.log import LOG

_WARN_SECONDS = 60.0
_MOST_WARNED = 1000


class LimitedLog:
    """Logs at most one warning a minute of each who causes some."""

    def __init__(self) -> None:
        self._warned_at: dict[str, float] = {}

    def warn(self, who: str | None, text: str, error: BaseException | None = None) -> None:
        """Log what somebody has caused, with the traceback of an error."""
        now = time.monotonic()
        if now - self._warned_at.get(str(who), -_WARN_SECONDS) >= _WARN_SECONDS:
            if len(self._warned_at) > _MOST_WARNED:
                self._warned_at.clear()
            self._warned_at[str(who)] = now
            LOG.warning("mirror: %s: %s", who, text, exc_info=error)
