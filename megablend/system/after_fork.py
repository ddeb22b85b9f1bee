"""Child processes: replacing locks in a forked one, since a thread that it does not have may have
held them; and starting one that Ctrl-C does not reach."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakSet


class Unlockable(Protocol):
    """An object that has locks."""

    def unlock_after_fork(self) -> None:
        """Replace the locks, and repair data that a thread which held a lock may have left
        half-done."""
        ...


_objects: WeakSet[Unlockable] = WeakSet()


def unlock_in_children(unlockable: Unlockable) -> None:
    """Call `unlock_after_fork` of an object in forked children, as long as the object exists."""
    _objects.add(unlockable)


class ProcessLock:
    """A reentrant lock that a process and its threads share; a forked child begins with another,
    which nobody holds."""

    def __init__(self) -> None:
        self.unlock_after_fork()
        unlock_in_children(self)

    def unlock_after_fork(self) -> None:
        """Replace the lock."""
        self.lock = threading.RLock()


def _unlock_all() -> None:
    for each in list(_objects):
        each.unlock_after_fork()


os.register_at_fork(after_in_child=_unlock_all)


def start_uninterrupted(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that Ctrl-C does not reach, not even while it starts: its parent ends it.

    Args:
        options: of `subprocess.Popen`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(command, **options)  # inherits the signals that are blocked
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
