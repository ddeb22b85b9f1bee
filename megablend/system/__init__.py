"""Helpers for the operating system: atomic writes, file locks, private folders, translation of
system errors, and JSON with limits."""

from __future__ import annotations

import os


def count_cpus() -> int:
    """Return the number of CPUs that this process may use. This is less than the machine has if the
    launcher binds the process to some of its CPUs."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
