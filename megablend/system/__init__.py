"""The operating system: files that are complete or absent, locks, safe folders, its errors, JSON with limits."""

from __future__ import annotations

import os


def count_cpus() -> int:
    """Return the CPUs that this process may use: a rank that its launcher binds to some has fewer than
    the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
