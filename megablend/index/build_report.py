"""What a build says: how far it has come, and what it did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a build has come, over all ranks."""

    files: int
    num_files: int
    bytes: int
    """Sizes of the files and parts of files that are done."""
    num_bytes: int
    waiting_for: str = ""
    """The other build that holds the cache, while this one waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildReport:
    """What a build did; the same on all ranks."""

    digest: str
    """The generation's."""
    created: bool
    """False where the same generation was there before."""
    num_files: int
    read: int
    """Files indexed now."""
    reused: int
    """Files whose fragments served."""
    changed: tuple[str, ...]
    """Files (source/name) that were indexed before in another version, and are read again."""
    added: int
    """Files that the newest generation before did not have."""
    removed: int
    """Files that the newest generation before had in these sources, and that are gone."""
    scanned_bytes: int
    """Bytes of bodies that had to be read to count."""
    seconds: float
    notes: tuple[str, ...]
    """Things worth telling that ended nothing: damaged fragments, a file system without locks, files met under several names."""
    skipped: tuple[str, ...]
    """Paths that were left out because they cannot be read (`on_unreadable: skip`): source, path and reason."""
    columns: dict[str, str | None]
    """Token column of each source; None where its format has no columns, or an older index did not record its name."""


def report_waiting(progress: Callable[[Progress], None] | None) -> Callable[[str], None] | None:
    """What tells `progress` for whom a build waits."""
    if progress is None:
        return None
    return lambda holder: progress(Progress(files=0, num_files=0, bytes=0, num_bytes=0, waiting_for=holder))
