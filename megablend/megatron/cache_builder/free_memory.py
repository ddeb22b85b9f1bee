"""Memory that this process may still take: what its node has, or less where control groups bound it
(containers, Slurm).

A group's bound holds for all below it, so those above the process's own count, too. What it uses
includes files that the kernel keeps as long as the memory is not needed; pages that were not used
lately count as free.

Source: Linux, Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that are free for this process. `root` is the folder that contains /proc and /sys."""
    (available,) = _numbers(root / "proc/meminfo", "MemAvailable:")
    return min([1024 * available, *_left_in_groups(root)])


def _left_in_groups(root: Path) -> Iterator[int]:
    """Bytes that each control group with a bound still has."""
    with contextlib.suppress(OSError):  # a kernel without control groups
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                base = root / "sys/fs/cgroup"
                names = _V2
            elif "memory" in controllers.split(","):
                base = root / "sys/fs/cgroup/memory"
                names = _V1
            else:
                continue
            own = PurePosixPath(path)
            for group in (own, *own.parents):
                # inside a container the groups above it are not to be seen, and its own may lie at
                # the top
                with contextlib.suppress(OSError, ValueError):  # "max" means no limit
                    yield _left(base / str(group).lstrip("/"), *names)


def _left(group: Path, limit: str, usage: str, inactive: str) -> int:
    bound, used = (int((group / name).read_text(encoding="ascii")) for name in (limit, usage))
    (idle,) = _numbers(group / "memory.stat", inactive)
    return max(0, bound - max(0, used - idle))


def _numbers(path: Path, name: str) -> list[int]:
    """The numbers of the lines that begin with this word."""
    lines = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
    return [int(words[1]) for words in lines if words and words[0] == name]
