"""A bound of what threads hold while they read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class ByteSemaphore:
    """Lets threads in as long as what they hold together stays within `max_bytes`; one is let in whatever it holds."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._changed = threading.Condition()

    @contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """Wait until there is room for `size` bytes, and hold them until the end of the context."""
        with self._changed:
            self._changed.wait_for(lambda: self._bytes == 0 or self._bytes + size <= self._max_bytes)
            self._bytes += size
        try:
            yield
        finally:
            with self._changed:
                self._bytes -= size
                self._changed.notify_all()
