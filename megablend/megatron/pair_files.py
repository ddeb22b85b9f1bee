"""Sizes and times of the local files of `.bin/.idx` pairs. They are recorded when a job builds its
datasets, and compared later to check that the files have not changed.

A dataset of a blend is opened when it is first used, perhaps hours after the cache was compared
with the data. Inodes are not compared: some file systems (FUSE) make new ones for the same file.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import NamedTuple

from megablend.errors import ChangedFileError, MissingFileError
from megablend.storage.local import without_inodes

_SUFFIXES = (".idx", ".bin")


class FileState(NamedTuple):
    """Size and modification time of an existing file."""

    size: int
    """Size in bytes."""
    modified: int
    """Time of the last modification, in nanoseconds since 1970."""


PairState = tuple[FileState | None, ...]
"""The states of the `.idx` and the `.bin` of a pair. The state of a file that is missing or not
local is None."""


def look_at_pair(prefix: str) -> PairState:
    """Return the current states of the files of a pair."""
    return tuple([_look_at(prefix + suffix) for suffix in _SUFFIXES])


def look_at_pairs(prefixes: Collection[str]) -> dict[str, PairState]:
    """Return the current states of the files of pairs, by prefix."""
    return {prefix: look_at_pair(prefix) for prefix in sorted(prefixes)}


def sizes_of(pair: PairState) -> list[int | None]:
    """Return the sizes of both files in bytes; None for a file that is missing or not local."""
    return [None if state is None else state.size for state in pair]


def times_of(pair: PairState) -> list[int | None]:
    """Return the modification times of both files, in nanoseconds since 1970; None for a file that
    is missing or not local."""
    return [None if state is None else state.modified for state in pair]


def check_pair(prefix: str, before: PairState) -> None:
    """Check that the files of a pair still have their earlier states. Raises: MissingFileError,
    ChangedFileError."""
    for suffix, expected, now in zip(_SUFFIXES, before, look_at_pair(prefix), strict=True):
        path = prefix + suffix
        if expected is None or expected == now:
            continue
        if now is None:
            raise MissingFileError(
                path, "is missing, but existed when this job built its datasets: restore the file"
            )
        raise _changed(path, expected, now.size)


def check_etags(prefix: str, before: Sequence[str | None], now: Sequence[str | None]) -> None:
    """Check that the etags of the files of a pair are still the earlier ones: the lengths of its
    documents may have been read again, from other files, by another job. Raises:
    ChangedFileError."""
    for suffix, expected, etag in zip(_SUFFIXES, before, now, strict=True):
        # A catalog of an earlier release has inodes in them
        if without_inodes(etag or "") != without_inodes(expected or ""):
            raise ChangedFileError(
                prefix + suffix,
                "was replaced after this job began to build its datasets, and another job has built the cache from the "
                "new file: restart the job",
            )


def check_open_size(path: str, descriptor: int, before: FileState | None) -> None:
    """Check that an open file still has its earlier size.

    Times are not compared, since touching a file changes no tokens. A file of an object store,
    whose descriptor is negative, is not checked. Raises: ChangedFileError.
    """
    if descriptor < 0 or before is None:
        return
    try:
        size = os.fstat(descriptor).st_size
    except OSError:  # such as a stale handle of NFS: what is read next explains it
        return
    if size != before.size:
        raise _changed(path, before, size)


def _changed(path: str, before: FileState, size: int) -> ChangedFileError:
    change = "modified since"
    if size != before.size:
        change = f"{size:,} bytes now, {before.size:,} before"
    return ChangedFileError(
        path,
        f"was replaced or written to after this job began to build its datasets ({change}): restart the job, which builds "
        "its cache from the new file, or restore the file first",
    )


def _look_at(path: str) -> FileState | None:
    try:
        # There may be thousands of files, and a Path takes as long as the call
        status = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return FileState(status.st_size, status.st_mtime_ns)
