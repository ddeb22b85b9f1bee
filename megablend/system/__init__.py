"""Services of the operating system: atomic files, locks, private folders, its errors, JSON with
limits."""

from __future__ import annotations

import os


def count_cpus() -> int:
    """Return the number of CPUs that this process may use. It is lower than the machine's if the
    launcher binds the process to some CPUs."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
