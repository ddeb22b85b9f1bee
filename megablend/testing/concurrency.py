"""Run checks in threads and in a forked process, for contract suites."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


def run_threads(work: Callable[[int], None], count: int = 4) -> None:
    """Call `work` in `count` threads, with the number of the thread, and wait at most a minute for
    each thread."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


def succeeds_in_a_fork(check: Callable[[], bool]) -> bool:
    """Return whether a check returns True in a forked child."""
    child = os.fork()
    if not child:
        status = 1
        try:
            status = 0 if check() else 1
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0
