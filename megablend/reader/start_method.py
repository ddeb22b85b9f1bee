"""How a DataLoader's workers start and end.

They do not start by fork if files or the cache are in an object store, since its client does not
survive that. They end with the trainer, however that ends.

Workers that a fork server has started are not children of the trainer, so that neither torch nor
the system ends them when it is killed; they would wait for it for ever, with all their memory.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megablend.errors import ConfigError
from megablend.run.run import Run
from megablend.storage.location import find_scheme
from megablend.storage.registry import OBJECT_SCHEMES

_POLL_SECONDS = 5.0
"""How often a worker looks whether its parent is alive, if the parent's end does not wake it."""


class WorkerStart:
    """A `worker_init_fn`: the worker ends when its parent does,
    also while it is blocked in a read. Picklable.

    Args:
        own: the user's `worker_init_fn`.
    """

    def __init__(self, own: Callable[[int], Any] | None) -> None:
        self._own = own

    def __call__(self, worker_id: int) -> None:
        """Begin to watch the parent, and do what the user's function does."""
        parent = multiprocessing.parent_process()
        if parent is not None and parent.pid is not None:
            arguments = (parent.sentinel, parent.pid, _find_start(parent.pid))
            threading.Thread(
                target=_end_with, args=arguments, name="megablend-parent", daemon=True
            ).start()
        if self._own is not None:
            self._own(worker_id)


def _end_with(sentinel: int, pid: int, started: str | None) -> None:
    """End this process when its parent has ended: its sentinel is ready then, and its number is
    nobody's, or another's."""
    while not multiprocessing.connection.wait([sentinel], timeout=_POLL_SECONDS):
        if _find_start(pid) != started:
            break
    os._exit(1)  # other threads may be blocked, and nobody waits for what they do


def _find_start(pid: int) -> str | None:
    """When a process was started, in the kernel's ticks;
    None if there is none, or the kernel does not say."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    after_name = status.rpartition(")")[2].split()
    return None if after_name[0] == "Z" else after_name[19]


def choose_start_method(options: Mapping[str, Any], run: Run) -> dict[str, Any]:
    """Options for a DataLoader, with the `multiprocessing_context` that the sources require.

    Raises: ConfigError if `fork` is requested but cannot work, or if a worker runs the script
        that started it.
    """
    remote = next(
        (path for path in _list_locations(run) if find_scheme(path) in OBJECT_SCHEMES), None
    )
    if not options["num_workers"] or remote is None:
        return dict(options)
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(
            "the script is run again by a worker that it started: put its code under `if __name__ == '__main__':`, which is "
            "required for workers that read from an object store"
        )
    context = options.get("multiprocessing_context")
    if context is None:
        return {**options, "multiprocessing_context": "forkserver"}
    method = context if isinstance(context, str) else context.get_start_method()
    if method == "fork":
        raise ConfigError(
            f"multiprocessing_context: found 'fork', expected 'forkserver' or 'spawn': {remote} is read through a client that "
            "does not work after a fork"
        )
    return dict(options)


def _list_locations(run: Run) -> list[str]:
    """Where the cache is, and the files of the sources."""
    roots = {**run.store.snapshot.roots, **run.store.roots}
    return [run.runtime.cache.location, *roots.values()]
