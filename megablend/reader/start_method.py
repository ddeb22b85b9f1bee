"""Start and stop a DataLoader's workers.

Workers are not forked if files or the cache are in an object store, since the store's client does
not survive a fork. They exit with the trainer, however it exits.

Workers that a fork server has started are not children of the trainer, so neither torch nor the
system stops them when the trainer is killed; they would wait forever, and keep all their memory.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from pickle import PicklingError
from types import FunctionType
from typing import Any

from megablend.errors import ConfigError
from megablend.run.run import Run
from megablend.storage.location import find_scheme
from megablend.storage.registry import OBJECT_SCHEMES

_POLL_SECONDS = 5.0
"""Time in seconds between two checks of a worker that its parent is alive. (Usually, the exit of
the parent wakes the worker earlier.)"""


def start_worker(own: Callable[[int], Any] | None, worker_id: int) -> None:
    """Initialize a worker: make it exit when its parent exits, even while it is blocked in a read,
    and then call `own`, the user's `worker_init_fn`."""
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        arguments = (parent.sentinel, parent.pid, _find_start(parent.pid))
        threading.Thread(
            target=_end_with, args=arguments, name="megablend-parent", daemon=True
        ).start()
    if own is not None:
        own(worker_id)


def _end_with(sentinel: int, pid: int, started: str | None) -> None:
    """Exit this process when its parent has exited.

    Args:
        sentinel: the sentinel of the parent process, which becomes ready when the parent exits.
        pid: the id of the parent process. Another process may get the same id after the parent's
            exit.
        started: the start time of the parent, as returned by `_find_start`.
    """
    while not multiprocessing.connection.wait([sentinel], timeout=_POLL_SECONDS):
        if _find_start(pid) != started:
            break
    os._exit(1)  # other threads may be blocked, and nobody waits for what they do


def _find_start(pid: int) -> str | None:
    """Return the start time of a process in clock ticks of the kernel; None if there is no such
    process, if it has exited, or if the kernel does not provide the time."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # Fields after the name, which may contain anything: see proc_pid_stat(5)
    fields = status.rpartition(")")[2].split()
    state = fields[0]
    start_time = fields[19]
    return None if state == "Z" else start_time


def choose_start_method(
    options: Mapping[str, Any], run: Run, transform: Callable[..., Any] | None
) -> dict[str, Any]:
    """Return the options for a DataLoader with the `multiprocessing_context` that the storage of
    the sources requires.

    Raises: ConfigError if `fork` is requested but cannot work, if a worker runs the script that
        started it, or if the transform or another function cannot be sent to workers.
    """
    remote = [path for path in _list_locations(run) if find_scheme(path) in OBJECT_SCHEMES]
    if not options["num_workers"] or not remote:
        return dict(options)
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(
            "a worker process runs the whole script again: put the script's code under `if __name__ == '__main__':`, which is "
            "required for workers that read from an object store"
        )
    for name in ("collate_fn", "worker_init_fn"):
        _check_function(name, options.get(name))
    _check_function("transform", transform)
    context = options.get("multiprocessing_context")
    if context is None:
        return {**options, "multiprocessing_context": "forkserver"}
    method = context if isinstance(context, str) else context.get_start_method()
    if method == "fork":
        raise ConfigError(
            f"multiprocessing_context: found 'fork', expected 'forkserver' or 'spawn': {remote[0]} is read through a client that "
            "does not work after a fork"
        )
    return dict(options)


def _check_function(name: str, function: Callable[..., Any] | None) -> None:
    """Check that workers that are not forked can import a function. Raises: ConfigError."""
    while isinstance(function, partial):
        function = function.func
    if not isinstance(function, FunctionType):
        return  # it may be large
    try:
        ForkingPickler.dumps(function)
    except (PicklingError, AttributeError) as error:
        raise ConfigError(
            f"{name}: found {function.__qualname__}, expected a function at the top of a module: workers that read from an "
            "object store are not forked, and import it by its name"
        ) from error


def _list_locations(run: Run) -> list[str]:
    """Return the locations of the cache and of the sources' files."""
    roots = {**run.store.snapshot.roots, **run.store.roots}
    return [run.runtime.cache.location, *roots.values()]
