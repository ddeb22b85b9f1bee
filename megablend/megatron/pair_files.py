"""The files of a pair as they are on a local disk: whether they are still those that a job's
datasets were built from.

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
    """Bytes."""
    modified: int
    """Nanoseconds since 1970."""


PairState = tuple[FileState | None, ...]
"""Of `.idx` and `.bin`; None for one that is not a local file, or missing."""


def look_at_pair(prefix: str) -> PairState:
    """The state of a pair's files."""
    return tuple([_look_at(prefix + suffix) for suffix in _SUFFIXES])


def look_at_pairs(prefixes: Collection[str]) -> dict[str, PairState]:
    """The states of the files of pairs, by prefix."""
    return {prefix: look_at_pair(prefix) for prefix in sorted(prefixes)}


def sizes_of(pair: PairState) -> list[int | None]:
    """Bytes of both files."""
    return [None if state is None else state.size for state in pair]


def times_of(pair: PairState) -> list[int | None]:
    """When both files were written, in nanoseconds since 1970."""
    return [None if state is None else state.modified for state in pair]


def check_pair(prefix: str, before: PairState) -> None:
    """Check that a pair's files are as they were before. Raises: MissingFileError,
    ChangedFileError."""
    for suffix, state, now in zip(_SUFFIXES, before, look_at_pair(prefix), strict=True):
        path = prefix + suffix
        if state is None or state == now:
            continue
        if now is None:
            raise MissingFileError(
                path, "is missing, but was there when this job built its datasets: restore the file"
            )
        sizes = (
            f"{now.size:,} bytes now, {state.size:,} before"
            if now.size != state.size
            else "modified since"
        )
        raise ChangedFileError(
            path,
            f"was replaced or written to after this job began to build its datasets ({sizes}): restart the job, which builds "
            "its cache for the data as it is now, or restore the file first",
        )


def _look_at(path: str) -> FileState | None:
    try:
        found = os.stat(path)  # noqa: PTH116 of thousands of files; a Path takes as long as the call
    except OSError:
        return None
    return FileState(found.st_size, found.st_mtime_ns)
