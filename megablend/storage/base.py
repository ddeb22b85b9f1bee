"""The interface of a storage: list names, return a file's size and identity, read ranges of
bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s as Int64s
from megablend.storage.find import Found

Bytes: TypeAlias = npt.NDArray[np.uint8]
Allocate: TypeAlias = Callable[[int], Bytes]
"""A function that returns an array for a number of bytes (uint8 [size])."""
KnownFiles: TypeAlias = Mapping[str, Any]
"""Facts about files, such as their versions, by path or by scheme; picklable, without credentials."""


def allocate_bytes(size: int) -> Bytes:
    """Return a new array for `size` bytes. This is the usual `Allocate`."""
    return np.empty(size, np.uint8)


def read_range(storage: Storage, path: str, offset: int, size: int) -> bytes:
    """Read one range through `Storage.read_ranges`. Some storages implement `Storage.read` by this
    function."""
    out, begins = storage.read_ranges(path, np.array([offset]), np.array([size]), allocate_bytes)
    return out[begins[0] : begins[0] + size].tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStat:
    """The size and the identity of a version of a file. Both are found without reading the file."""

    size: int
    """The size in bytes."""
    etag: str
    """A string that changes whenever the file may have changed; on a local disk it is made of
    mtime_ns, ctime_ns and inode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLimits:
    """The limits of a storage for its callers: which reads to merge, and how many to have in
    flight."""

    max_gap_bytes: int
    """The largest gap between two ranges that is read along with them, since a separate read would
    cost more."""
    max_merged_bytes: int
    """The largest number of bytes of nearby ranges that are read together; a single range may be
    larger."""
    separate_bytes: int | None = None
    """The minimum size of ranges that are read separately if different blocks keep them: copying
    them out of a joint read costs more than another read. None if ranges of any size are read
    together."""
    max_reads: int
    """The number of reads that a process may have in flight at a time. If `fetch` blocks until the
    bytes are read, callers use this number of threads."""
    is_synchronous: bool = False
    """Whether `fetch` blocks until the bytes are read. `read_ranges` then does the same without the
    cost of a future."""
    max_files: int = 1
    """The number of files that a process indexes at a time. It is more than 1 if reads mostly wait
    for a network: the reads of a file are then requested together, before they are needed
    (`storage.prefetched`)."""


class Storage(Protocol):
    """A place where data files are kept, such as a file system or an object store. It finds files
    by names (strings, see `storage.location`), and reads ranges of their bytes. Thread-safe,
    picklable, and usable after a fork. See `storage.head_and_tail` for an optional extension.

    A storage is created once, by `make_storage`, and passed to everything that reads. A storage
    that changes or records another storage's results derives from `storage.wrapper.WrapperStorage`.
    """

    def limits(self, path: str) -> ReadLimits:
        """Return the read limits for `path`, without waiting."""
        ...

    def for_checking(self) -> Storage:
        """Return a view of the storage without caches, for checking files while others read them: a
        request for a file's state has no effect on readers."""
        ...

    def for_reading(self) -> Storage:
        """Return a view of the storage for one reader, such as an open run: it keeps reading the
        files that it opened first, whatever this storage finds or opens for others."""
        ...

    def find(self, pattern: str) -> Found:
        """Return the files that match `pattern` (`*`, `?`, `[]`, `**`), sorted, with links
        resolved, and the folders that could not be read.

        Reads through this object keep to the version of a file that was read first. After `find`
        has returned the file again, they use the version that existed then.
        """
        ...

    def glob(self, pattern: str) -> list[str]:
        """Return the sorted paths of the files that match `pattern` (`*`, `?`, `[]`, `**`); a plain
        existing path matches itself."""
        ...

    def is_folder(self, path: str) -> bool:
        """Return whether `path` is an existing folder."""
        ...

    def is_readable(self, path: str) -> bool:
        """Return whether this process has permission to read the file at `path`, as far as the
        storage can tell without reading."""
        ...

    def stat(self, path: str) -> FileStat:
        """Return the size and the identity of a file. Raises: MissingFileError; ChangedFileError if
        `path` no longer refers to the file that is being read."""
        ...

    def stat_opened(self, path: str) -> FileStat:
        """Return the size and the identity of the file that reads of `path` use, even if `path` now
        refers to another file. Raises: the same errors as `read`."""
        ...

    def known_files(self) -> KnownFiles:
        """Return the facts about files that listings and requests have found since the last call,
        to pass to `add_known_files` in other processes. Empty if such facts cost little to find."""
        ...

    def add_known_files(self, known: KnownFiles) -> None:
        """Add facts about files that another process of the same job has found, so that this
        process need not request them."""
        ...

    def read(self, path: str, offset: int, size: int) -> bytes:
        """Return exactly `size` bytes from `offset`.

        Raises: MissingFileError; ChangedFileError if the file was replaced since it was first read,
            as far as that is detected; CorruptFileError if the file ends before this range does.
        """
        ...

    def read_ranges(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate
    ) -> tuple[Bytes, Int64s]:
        """Read several ranges in one call.

        Args:
            offsets, sizes: the offset and size of each range in bytes (int64 [n]).
            allocate: returns an array for a number of bytes (uint8 [size]), which may be
                uninitialised.

        Returns: an array with the bytes (uint8), and the start of each range in it (int64 [n]).
        Raises: the same errors as `read`.
        """
        ...

    def fetch(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate
    ) -> Future[tuple[Bytes, Int64s]]:
        """Start to read several ranges, and return a future of the result of `read_ranges`. Many
        such calls may be in flight at a time, from any thread.

        A storage with synchronous reads blocks until the bytes are read
        (`storage.futures.call_now`); callers use one thread for each of the `max_reads` that may be
        in flight. A storage with an event loop returns at once, and decides by itself how many
        requests it has in flight. Cancelling the future is a hint that the result is no longer
        needed.

        Args: as in `read_ranges`.

        Returns: a future, which has the exceptions that `read` raises.
        """
        ...

    def descriptor(self, path: str) -> AbstractContextManager[int]:
        """Return a descriptor of the file, for compiled kernels that read the file themselves; -1
        if the storage has no descriptors.

        Raises: MissingFileError; DataError if the file cannot be opened.
        """
        ...
