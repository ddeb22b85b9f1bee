"""Waiting: logging long waits, since somebody who watches a job would wonder; and waiting for files
that a network file system shows some seconds late."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from megablend.errors import CacheError
from megablend.system.log import LOG

SLOW_SECONDS = 1.0
"""The time from which waits are logged."""
SEEN_SECONDS = 10.0
"""The time in which a file becomes visible on a network file system."""


@contextlib.contextmanager
def log_slow_wait(reason: str) -> Iterator[None]:
    """Log, at level INFO, the seconds that the body took if they were SLOW_SECONDS or more, whether
    the body succeeded or not.

    Args:
        reason: the thing that is waited for, with the file's path.
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
                f"{path}: another rank wrote this file, but rank 0 does not see it: the cache must be on a file system "
                "that all ranks share; choose such a directory, or build with the ranks of one node"
            )
        time.sleep(0.1)
