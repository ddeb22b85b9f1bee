"""Helpers for child processes.

After a fork, the child replaces its locks, since a thread that exists only in the parent may have
held them. A fork waits for modules of this package that other threads are importing.
`start_uninterrupted` starts a process that Ctrl-C does not reach, such as one of `python_command`;
`fill_standard_streams` comes before the pipes to it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol
from weakref import WeakSet


class Unlockable(Protocol):
    """An object whose locks are replaced in a forked child."""

    def unlock_after_fork(self) -> None:
        """Replace the locks in a forked child, and repair data that another thread of the parent
        was changing, under a lock, at the time of the fork."""
        ...


_objects: WeakSet[Unlockable] = WeakSet()


def unlock_in_children(unlockable: Unlockable) -> None:
    """Register an object, so that its `unlock_after_fork` is called in each forked child as long as
    the object exists."""
    _objects.add(unlockable)


class ProcessLock:
    """A reentrant lock for the threads of one process. A forked child gets a new lock, which no
    thread holds."""

    def __init__(self) -> None:
        self.unlock_after_fork()
        unlock_in_children(self)

    def unlock_after_fork(self) -> None:
        """Replace the lock."""
        self.lock = threading.RLock()


def _unlock_all() -> None:
    for registered in list(_objects):
        registered.unlock_after_fork()


def _finish_imports() -> None:
    """Wait until other threads have imported the modules of this package that they have begun to
    import: the child could not replace Python's locks of these modules, and would wait for ever."""
    for name, module in list(sys.modules.items()):
        if not name.startswith("megablend."):  # to look at a lazy module would import it
            continue
        if getattr(getattr(module, "__spec__", None), "_initializing", False):
            with contextlib.suppress(Exception):  # raised in the other thread, too
                import_module(name)


os.register_at_fork(before=_finish_imports, after_in_child=_unlock_all)


def fill_standard_streams() -> None:
    """Open /dev/null in place of each standard stream that this process has closed. A pipe to a
    child would otherwise get its descriptor, which the child uses for the stream itself."""
    while (null := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(null, True)
    os.close(null)


def python_command(module: str, function: str, *arguments: str) -> list[str]:
    """Return the command of a new Python process that calls a function with strings. It imports
    from where this process does. Python would otherwise search the working directory first, and run
    a file `random.py` there, whoever wrote it."""
    paths = [path for path in sys.path if path]
    code = f"from {module} import {function}; {function}(*sys.argv[1:])"
    code = f"import sys; sys.path[:] = {paths!a}; {code}"
    return [sys.executable, "-c", code, *arguments]


def start_uninterrupted(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that Ctrl-C does not reach, not even while it starts. The caller must stop
    it.

    Args:
        options: the keyword arguments of `subprocess.Popen`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(command, **options)  # inherits the signals that are blocked
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
