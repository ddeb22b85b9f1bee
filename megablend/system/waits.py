"""Log long waits, which might puzzle somebody who watches a job, and wait for files that appear a
few seconds late on a network file system."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from megablend.errors import CacheError
from megablend.system.log import LOG

SLOW_SECONDS = 1.0
"""The time after which a wait is logged."""
SEEN_SECONDS = 10.0
"""The time within which a file becomes visible on a network file system."""


@contextlib.contextmanager
def log_slow_wait(reason: str) -> Iterator[None]:
    """Log at level INFO how long the body of the `with` statement took, if it took at least
    SLOW_SECONDS, whether or not it succeeded.

    Args:
        reason: what the body waits for, including the path of the file.
    """
    begin = time.monotonic()
    try:
        yield
    finally:
        seconds = time.monotonic() - begin
        if seconds >= SLOW_SECONDS:
            LOG.info("waited %.1f s for %s", seconds, reason)


def await_file(path: Path, seconds: float = SEEN_SECONDS) -> None:
    """Wait until a file exists. Raises: CacheError if it does not appear in time."""
    deadline = time.monotonic() + seconds
    while not path.is_file():
        if time.monotonic() > deadline:
            raise CacheError(
                f"{path}: rank 0 does not see this file, which another rank wrote; use a cache on a file system that all ranks "
                "share, or run all ranks on one node"
            )
        time.sleep(0.1)
