"""Reports about the progress and the result of a build."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a build, over all ranks."""

    files: int
    """Number of completed files."""
    num_files: int
    """Number of files in total."""
    bytes: int = 0
    """Size of the completed files and parts of files in bytes."""
    num_bytes: int = 0
    """Size of all files in bytes."""
    tokenised: str = ""
    """While text is tokenised: the number of documents so far and the speed; otherwise empty."""
    message: str = ""
    """A message to print immediately; empty if there is none."""
    waiting_for: str = ""
    """While this build waits for the cache's lock: the build that holds it; otherwise empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildReport:
    """The result of a build; the same on all ranks."""

    digest: str
    """Digest of the snapshot."""
    created: bool
    """Whether the snapshot is new; False if it already existed."""
    num_files: int
    """Number of files of all columns."""
    read: int
    """Number of files indexed by this build."""
    reused: int
    """Number of files whose fragments were reused."""
    changed: tuple[str, ...]
    """Files (source/name) that changed after they were indexed, and were indexed again."""
    added: int
    """Number of files that the previous snapshot does not contain."""
    removed: int
    """Number of these sources' files that are in the previous snapshot but no longer exist."""
    scanned_bytes: int
    """Bytes of file bodies that had to be read for counting."""
    seconds: float
    notes: tuple[str, ...]
    """Warnings: damaged fragments, a file system without locks, files found under several names."""
    skipped: tuple[str, ...]
    """Paths that were left out because they cannot be read (`on_unreadable: skip`): source, path
    and reason."""
    columns: dict[str, str | None]
    """Token column of each source; None if its format has no columns or an old index lacks it."""


def report_waiting(progress: Callable[[Progress], None] | None) -> Callable[[str], None] | None:
    """Return a callback that reports to `progress` which build this one is waiting for."""
    if progress is None:
        return None
    return lambda holder: progress(Progress(files=0, num_files=0, waiting_for=holder))
