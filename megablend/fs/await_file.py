"""Waiting until a file that another rank has written is visible here: network file systems may show it seconds late."""

from __future__ import annotations

import time
from pathlib import Path

from megablend.errors import CacheError

SEEN_SECONDS = 10.0
"""How long a file may take to become visible."""


def await_file(path: Path, seconds: float = SEEN_SECONDS) -> None:
    """Wait until a file exists. Raises: CacheError after so many seconds."""
    deadline = time.monotonic() + seconds
    while not path.is_file():
        if time.monotonic() > deadline:
            raise CacheError(
                f"{path}: another rank wrote this file, but rank 0 does not see it: the cache must be on a file system "
                "that all ranks share; choose such a directory, or build with the ranks of one node"
            )
        time.sleep(0.1)
