"""How many requests of this process, to any storage, were tried again after a failure."""

from __future__ import annotations

import os
import threading

_lock = threading.Lock()
_retries = 0


def count_retry() -> None:
    """Count a request that is tried again."""
    global _retries
    with _lock:
        _retries += 1


def get_retries() -> int:
    """Retries so far; a forked child goes on from its parent's number."""
    return _retries


def _unlock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_unlock)
