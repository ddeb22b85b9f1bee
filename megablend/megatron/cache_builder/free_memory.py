"""Determine how much memory is free for this process, considering the limits of its control groups
(cgroups)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_VERSION_2 = ("memory.max", "memory.current", "inactive_file")
"""The names of the limit, the usage, and the inactive pages of files in version 2 of control
groups."""
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
"""The same names in version 1."""


def free_memory(root: Path = Path("/")) -> int:
    """Return the number of bytes of memory that are free for this process.

    Args:
        root: the folder that contains proc and sys.
    """
    (available,) = _numbers(root / "proc/meminfo", "MemAvailable:")
    return min([1024 * available, *_left_in_groups(root)])


def _left_in_groups(root: Path) -> Iterator[int]:
    """Yield the number of free bytes in each control group of this process that has a memory
    limit."""
    # Raised by a kernel without control groups
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                base = root / "sys/fs/cgroup"
                names = _VERSION_2
            elif "memory" in controllers.split(","):
                base = root / "sys/fs/cgroup/memory"
                names = _VERSION_1
            else:
                continue
            own = PurePosixPath(path)
            for group in (own, *own.parents):
                # In a container, groups above its own do not exist, and its own may be at the top.
                # ValueError: the limit is "max", which means none.
                with contextlib.suppress(OSError, ValueError):
                    yield _left(base / str(group).lstrip("/"), *names)


def _left(group: Path, limit_file: str, usage_file: str, inactive: str) -> int:
    """Return the number of bytes that a control group may still use. Inactive pages of files do not
    count as used, because the system frees them on demand."""
    limit = int((group / limit_file).read_text(encoding="ascii"))
    usage = int((group / usage_file).read_text(encoding="ascii"))
    (idle,) = _numbers(group / "memory.stat", inactive)
    return max(0, limit - max(0, usage - idle))


def _numbers(path: Path, name: str) -> list[int]:
    """Return the number in each line of a file that begins with `name`."""
    lines = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
    return [int(words[1]) for words in lines if words and words[0] == name]
