"""Threads go by the CPUs that a process may use."""

from __future__ import annotations

import os
import subprocess
import sys


def test_a_process_that_is_bound_to_a_cpu_counts_one() -> None:
    script = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from megablend.system import count_cpus; from megablend.storage.local import LIMITS;"
        "print(count_cpus(), LIMITS.max_reads)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=500, check=True
    )
    assert done.stdout.split() == ["1", "1"]


def test_the_cpus_of_this_process() -> None:
    from megablend.system import count_cpus

    assert count_cpus() == len(os.sched_getaffinity(0))
