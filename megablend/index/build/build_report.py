"""The reports of a build: its progress, and its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of a build, over all ranks."""

    files: int
    """Number of files that are done."""
    num_files: int
    """Number of all files."""
    bytes: int = 0
    """Total size of the files and parts of files that are done."""
    num_bytes: int = 0
    """Total size of all files."""
    tokenised: str = ""
    """While text is tokenised: the documents so far, and the speed, as text; otherwise empty."""
    message: str = ""
    """A message to print at once; empty if there is none."""
    waiting_for: str = ""
    """While this build waits for the cache's lock: the build that holds it; otherwise empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildReport:
    """Result of a build; the same on all ranks."""

    digest: str
    """Digest of the snapshot."""
    created: bool
    """False if the same snapshot existed already."""
    num_files: int
    """Number of files of all columns."""
    read: int
    """Number of files indexed by this build."""
    reused: int
    """Number of files whose fragments were reused."""
    changed: tuple[str, ...]
    """Files (source/name) that changed since they were indexed, and were indexed again."""
    added: int
    """Number of files that the previous snapshot does not contain."""
    removed: int
    """Number of files of these sources in the previous snapshot that no longer exist."""
    scanned_bytes: int
    """Bytes of file bodies that had to be read for counting."""
    seconds: float
    notes: tuple[str, ...]
    """Non-fatal warnings: damaged fragments, a file system without locks, files found under several
    names."""
    skipped: tuple[str, ...]
    """Paths left out because they cannot be read (`on_unreadable: skip`): source, path and
    reason."""
    columns: dict[str, str | None]
    """Token column of each source; None if its format has no columns, or an older index did not
    record it."""


def report_waiting(progress: Callable[[Progress], None] | None) -> Callable[[str], None] | None:
    """Return a callback that reports to `progress` the build that this one waits for."""
    if progress is None:
        return None
    return lambda holder: progress(Progress(files=0, num_files=0, waiting_for=holder))
