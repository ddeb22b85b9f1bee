"""The only event loop of this process for object stores. It runs all requests in a thread of its
own.

obstore's client is not safe to use after a fork: its threads do not exist in the child, which would
wait for them forever. So a child of a process that has used the client gets an error at once.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from megablend.errors import ConfigError
from megablend.storage.waits import wait_for

T = TypeVar("T")

FORK_REMEDY = (
    "start processes with `forkserver` or `spawn` (multiprocessing_context='forkserver' of a DataLoader), or fork "
    "before the first file of an object store is read"
)
"""The remedy for a child of a process that has used the client."""
_CLOSE_SECONDS = 2.0
"""The maximum time for cancelling requests in flight when the process exits."""
_REST_SECONDS = 10.0
"""The maximum time to wait afterwards for the client's threads to become idle."""
_TASKS = Path("/proc/self/task")
_NUM_LOOKS = 10
_LOOK_SECONDS = 0.01


class _Loop:
    """An event loop that runs in a thread until the process exits."""

    def __init__(self) -> None:
        # Not of the program's policy: uvloop's transports, for example, are not those of asyncio
        self.loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(
            target=self.loop.run_forever, name="megablend-objects", daemon=True
        )
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Cancel requests in flight, and stop the loop. Otherwise the client aborts the process if
        one of its threads has a response for an interpreter that has shut down."""
        with contextlib.suppress(Exception):  # the process exits in any case
            asyncio.run_coroutine_threadsafe(_cancel_all(), self.loop).result(
                timeout=_CLOSE_SECONDS + _REST_SECONDS + 1.0
            )
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=5)


async def _cancel_all() -> None:
    """Cancel all other tasks of the loop, and give the client's threads time to notice."""
    now = asyncio.get_running_loop().time
    end = now() + _CLOSE_SECONDS
    max_tasks = 0
    while now() < end:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if not tasks:
            break
        max_tasks = max(max_tasks, len(tasks))
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=0.2)
    if _TASKS.exists():
        await _wait_until_client_rests()
    else:
        await asyncio.sleep(0.1 + 0.0005 * max_tasks)


async def _wait_until_client_rests() -> None:
    """Wait until several checks in a row find all of the client's threads asleep. On a busy
    machine, the threads may wait for a core for seconds before they drop a cancelled request."""
    end = asyncio.get_running_loop().time() + _REST_SECONDS
    num_asleep = 0
    while num_asleep < _NUM_LOOKS and asyncio.get_running_loop().time() < end:
        num_asleep = 0 if _is_client_active() else num_asleep + 1
        await asyncio.sleep(_LOOK_SECONDS)


def _is_client_active() -> bool:
    """Return whether one of the client's threads is running or waiting for a core (Linux)."""
    for task in _TASKS.iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
            if name.startswith("tokio") and rest.split()[0] != "S":
                return True
    return False


_lock = threading.Lock()
_running: _Loop | None = None
_forked_after_use = False


def check_fork() -> None:
    """Check that this process was not forked from a process that had used the client before.
    Raises: ConfigError."""
    if _forked_after_use:
        raise ConfigError(
            f"this process was forked from one that has read from an object store: {FORK_REMEDY}"
        )


def is_used() -> bool:
    """Return whether this process has used the client, in which case children forked from now on cannot
    use it."""
    return _running is not None


def submit(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Run a coroutine in the loop. Raises: ConfigError in a forked child of a process that has used
    the loop."""
    global _running
    if _forked_after_use:
        work.close()
        check_fork()
    if _running is None:
        with _lock:
            if _running is None:
                _running = _Loop()
    return asyncio.run_coroutine_threadsafe(_retrieve(work), _running.loop)


async def _retrieve(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine, and see that asyncio does not print its exception: nobody takes it if the
    future was cancelled meanwhile, as those are that read for a call that has failed already."""
    task = asyncio.current_task()
    assert task is not None
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await work


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in the loop, and wait for its result; see `wait_for`."""
    return wait_for(submit(work))


def _after_fork() -> None:
    """Reset the state in a forked child: it has no loop, and a new lock."""
    global _running, _lock, _forked_after_use
    _forked_after_use = _forked_after_use or _running is not None
    _running = None
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
