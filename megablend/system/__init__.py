"""The operating system: files that are complete or absent, locks, safe folders, its errors, JSON with limits."""

from __future__ import annotations

import os


def count_cpus() -> int:
    """Return the number of CPUs that this process may use: a rank that its launcher binds to some
    CPUs has fewer than the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
