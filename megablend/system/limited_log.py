"""A log for warnings that other programs can cause as often as they like. It is limited to one
warning a minute for each program."""

from __future__ import annotations

import time

from megablend.system.log import LOG

_WARN_SECONDS = 60.0
"""The shortest time between two warnings about the same program."""
_MAX_CAUSES = 1000
"""The maximum number of programs that are remembered. If there are more, all are forgotten, to
limit memory."""


class LimitedLog:
    """A log that takes at most one warning a minute for each program that causes warnings."""

    def __init__(self) -> None:
        self._warned_at: dict[str, float] = {}

    def warn(self, who: str | None, text: str, error: BaseException | None = None) -> None:
        """Log a warning about the program `who`, with the traceback of an error if one is given."""
        now = time.monotonic()
        if now - self._warned_at.get(str(who), -_WARN_SECONDS) >= _WARN_SECONDS:
            if len(self._warned_at) > _MAX_CAUSES:
                self._warned_at.clear()
            self._warned_at[str(who)] = now
            LOG.warning("mirror: %s: %s", who, text, exc_info=error)
