"""The states of the files of `.bin/.idx` pairs on a local disk, to check that they are still those
that a job's datasets were built from.

A dataset of a blend is opened when it is first used, perhaps hours after the cache was compared
with the data. Inodes are not compared: some file systems (FUSE) make new ones for the same file.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import NamedTuple

from megablend.errors import ChangedFileError, MissingFileError

_SUFFIXES = (".idx", ".bin")


class FileState(NamedTuple):
    """The state of a file that exists."""

    size: int
    """Size in bytes."""
    modified: int
    """Time of the last modification, in nanoseconds since 1970."""


PairState = tuple[FileState | None, ...]
"""The states of the `.idx` and the `.bin` of a pair; None for one that is missing, or not local."""


def look_at_pair(prefix: str) -> PairState:
    """Return the states of a pair's files, as they are now."""
    return tuple([_look_at(prefix + suffix) for suffix in _SUFFIXES])


def look_at_pairs(prefixes: Collection[str]) -> dict[str, PairState]:
    """Return the states of the files of pairs, by prefix, as they are now."""
    return {prefix: look_at_pair(prefix) for prefix in sorted(prefixes)}


def sizes_of(pair: PairState) -> list[int | None]:
    """Return the sizes of both files in bytes; None for one that is missing, or not local."""
    return [None if state is None else state.size for state in pair]


def times_of(pair: PairState) -> list[int | None]:
    """Return when both files were modified, in nanoseconds since 1970; None for one that is
    missing, or not local."""
    return [None if state is None else state.modified for state in pair]


def check_pair(prefix: str, before: PairState) -> None:
    """Check that a pair's files are as they were before. Raises: MissingFileError,
    ChangedFileError."""
    for suffix, expected, now in zip(_SUFFIXES, before, look_at_pair(prefix), strict=True):
        _check(prefix + suffix, expected, now)


def check_open_file(path: str, descriptor: int, before: FileState | None) -> None:
    """Check that an open file is as it was before; not one of an object store, whose descriptor is
    negative. Raises: ChangedFileError."""
    if descriptor >= 0:
        _check(path, before, _state(os.fstat(descriptor)))


def _check(path: str, expected: FileState | None, now: FileState | None) -> None:
    if expected is None or expected == now:
        return
    if now is None:
        raise MissingFileError(
            path, "is missing, but was there when this job built its datasets: restore the file"
        )
    change = "modified since"
    if now.size != expected.size:
        change = f"{now.size:,} bytes now, {expected.size:,} before"
    raise ChangedFileError(
        path,
        f"was replaced or written to after this job began to build its datasets ({change}): restart the job, which builds "
        "its cache for the data as it is now, or restore the file first",
    )


def _look_at(path: str) -> FileState | None:
    try:
        # There may be thousands of files, and a Path takes as long as the call
        status = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return _state(status)


def _state(status: os.stat_result) -> FileState:
    return FileState(status.st_size, status.st_mtime_ns)
