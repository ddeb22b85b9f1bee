"""Temporary folders of tests are in memory where there is much of it: on a disk, a third of the time is waiting for `fsync`.

Set TMPDIR, or give `--basetemp`, to have them elsewhere. `tempfile` goes on to make its files on the disk.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path

IN_MEMORY = Path("/dev/shm")
FREE_BYTES = 4 << 30
"""What a run without the slow tests takes at most is a quarter of this."""
ROOT = "PYTEST_DEBUG_TEMPROOT"
"""Where pytest makes its folders, if this is in the environment."""


def use_memory(
    environment: MutableMapping[str, str], folder: Path = IN_MEMORY, free_bytes: int = FREE_BYTES
) -> None:
    """Have pytest make its folders in `folder`, unless it was told where, or there is too little memory."""
    if not (environment.get("TMPDIR") or environment.get(ROOT)) and is_suitable(folder, free_bytes):
        environment[ROOT] = str(folder)


def is_suitable(folder: Path, free_bytes: int = FREE_BYTES) -> bool:
    """Whether files there can be read directly and have attributes, as on a disk, and so much memory is free."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            os.close(os.open(file.name, os.O_RDONLY | os.O_DIRECT))
            os.setxattr(file.name, "user.megablend", bytes(2000))
        left = os.statvfs(folder)
        available = read_memory()["MemAvailable"]
    except (OSError, AttributeError, KeyError):  # not Linux, an older one, or not writable
        return False
    return left.f_bavail * left.f_frsize >= free_bytes and available >= 2 * free_bytes


def read_memory() -> Mapping[str, int]:
    """Bytes by name, as the kernel tells them."""
    found = {}
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        name, _, amount = line.partition(":")
        with contextlib.suppress(ValueError, IndexError):
            found[name] = int(amount.split()[0]) * 1024
    return found
