"""Child processes: replace locks after a fork, since a thread that the child does not have may have
held them, and start a process that Ctrl-C does not reach."""

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
        """Replace the locks, and repair data that a thread may have left inconsistent while it held
        one of them."""
        ...


_objects: WeakSet[Unlockable] = WeakSet()


def unlock_in_children(unlockable: Unlockable) -> None:
    """Call `unlock_after_fork` of an object in forked children, as long as the object exists."""
    _objects.add(unlockable)


class ProcessLock:
    """A reentrant lock that the threads of a process share; a forked child gets a new one, which no
    thread holds."""

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
    """Start a process that Ctrl-C does not reach, not even while it starts; its parent must stop
    it.

    Args:
        options: the keyword arguments of `subprocess.Popen`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(command, **options)  # inherits the signals that are blocked
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
