"""Which snapshots of the index a cache contains, and in which order they were built."""

from __future__ import annotations

from pathlib import Path

from megablend.errors import CacheError
from megablend.fs.atomic_write import list_committed
from megablend.index.cache_folders import generations
from megablend.index.manifest import MANIFEST, read_roots


def list_snapshots(cache: str | Path) -> list[str]:
    """Digests of a cache's snapshots, the most recently built (or rebuilt) last; empty if there is no cache."""
    folder = generations(cache)
    names = [name for name in list_committed(folder) if is_committed(folder / name)]
    return sorted(names, key=lambda name: (build_sequence(folder / name), name))


def is_committed(folder: Path) -> bool:
    """Whether a folder contains a snapshot; assumed if it cannot be inspected."""
    try:
        return (folder / MANIFEST).is_file()
    except OSError:
        return True


def build_sequence(folder: Path) -> int:
    """Number of the last build that resulted in a snapshot; -1 if unknown."""
    try:
        return int(read_roots(folder)["arrival"])
    except CacheError:
        return -1
