"""The threads of loaders that a test starts: they end by themselves soon after their loader."""

from __future__ import annotations

import gc
import threading
import time

NAMES = tuple(f"megablend-{what}" for what in ("read", "fetch", "decode", "transform", "watch"))
"""Those for kernels and object stores belong to the process."""
SECONDS = 240


class LoaderThreads:
    """Those that were not there when this was created."""

    def __init__(self) -> None:
        gc.collect()
        self._before = set(threading.enumerate())

    def running(self) -> list[str]:
        """Their names."""
        new = set(threading.enumerate()) - self._before
        return sorted(each.name for each in new if each.name.startswith(NAMES))

    def await_end(self) -> None:
        """Check that all of them end."""
        deadline = time.monotonic() + SECONDS
        while self.running() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self.running() == []
