"""Logging of waits that somebody watching a job would ask about."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from megablend.system.log import LOG

SLOW_SECONDS = 1.0
"""Shorter waits are not logged."""


@contextlib.contextmanager
def log_slow_wait(reason: str) -> Iterator[None]:
    """Log, at level INFO, how long the body took if it took longer than SLOW_SECONDS, whether it succeeded or not.

    Args:
        reason: what is waited for, with the file's path.
    """
    begin = time.monotonic()
    try:
        yield
    finally:
        if (seconds := time.monotonic() - begin) >= SLOW_SECONDS:
            LOG.info("waited %.1f s for %s", seconds, reason)
