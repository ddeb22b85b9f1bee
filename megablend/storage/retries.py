"""How many requests of this process were tried again after a failure, by whichever storage."""

from __future__ import annotations

import os
import threading
from typing import NamedTuple


class Mark(NamedTuple):
    """A number of retries, and the process that counted it."""

    process: int
    retries: int


_lock = threading.Lock()
_retries = 0


def count_retry() -> None:
    """Count a request that is tried again."""
    global _retries
    with _lock:
        _retries += 1


def retries_since(mark: Mark | None) -> tuple[int, Mark]:
    """Retries since a mark (since the process began, where the mark is another process's, or None), and the mark of now."""
    now = Mark(os.getpid(), _retries)
    before = 0 if mark is None or mark.process != now.process else mark.retries
    return now.retries - before, now


def _forget() -> None:
    global _lock, _retries
    _lock, _retries = threading.Lock(), 0


os.register_at_fork(after_in_child=_forget)
