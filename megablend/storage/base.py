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
"""A function that allocates an array of a given number of bytes (uint8 [size])."""
KnownFiles: TypeAlias = Mapping[str, Any]
"""Information about files, such as their versions, by path or by scheme. It can be pickled, and
contains no credentials."""


def allocate_bytes(size: int) -> Bytes:
    """Return a new array of `size` bytes (uint8). Most callers pass this function as `Allocate`."""
    return np.empty(size, np.uint8)


def read_range(storage: Storage, path: str, offset: int, size: int) -> bytes:
    """Read one range by calling `Storage.read_ranges`. Some storages use this function to implement
    `Storage.read`."""
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
    """The limits that a storage sets for reads: which reads to merge, and how many may be in
    flight."""

    max_gap_bytes: int
    """The maximum gap between two ranges that are read together. Reading a gap of this size costs
    less than a second read."""
    max_merged_bytes: int
    """The maximum number of bytes that nearby ranges read together have in total. A single range
    may be larger."""
    separate_bytes: int | None = None
    """Ranges of at least this size are read separately if different blocks keep their bytes, since
    copying the bytes out of a joint read costs more than a second read. None if ranges of any size
    are read together."""
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
        """Return a view of the storage without caches, for checking files while others read them.
        Requesting the state of a file through the view does not affect readers."""
        ...

    def for_reading(self) -> Storage:
        """Return a view of the storage for one reader, such as an open run. The view keeps reading
        the files that it opened first, even if this storage later finds or opens new versions of
        them."""
        ...

    def find(self, pattern: str) -> Found:
        """Find the files that match `pattern` (`*`, `?`, `[]`, `**`), and the folders that may not
        be read. The files are sorted, and their links are resolved. Raises: DataError if the
        storage fails.

        Reads through this object use the version of a file that was read first. If a later call of
        `find` returns the file, reads use the version that exists at that call.
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
        storage can tell without reading. Raises: DataError if the storage fails."""
        ...

    def stat(self, path: str) -> FileStat:
        """Return the size and the identity of a file. Raises: MissingFileError; ChangedFileError if
        `path` no longer refers to the file that is being read."""
        ...

    def stat_opened(self, path: str) -> FileStat:
        """Return the size and the identity of the file that is read at `path`, even if `path` now
        refers to another file. Raises: the same errors as `read`."""
        ...

    def known_files(self) -> KnownFiles:
        """Return the information about files that was found since the last call, for
        `add_known_files` in other processes. It is empty if the information is cheap to find."""
        ...

    def add_known_files(self, known: KnownFiles) -> None:
        """Add information about files that another process of the same job has found, so that this
        process does not have to request it."""
        ...

    def read(self, path: str, offset: int, size: int) -> bytes:
        """Return exactly `size` bytes from `offset`.

        Raises: MissingFileError; ChangedFileError if the file is known to have been replaced since
            it was first read; CorruptFileError if the range extends beyond the end of the file.
        """
        ...

    def read_ranges(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate
    ) -> tuple[Bytes, Int64s]:
        """Read several ranges in one call.

        Args:
            offsets, sizes: the offset and size of each range in bytes (int64 [n]).
            allocate: allocates an array of a given number of bytes (uint8 [size]), which may be
                uninitialised.

        Returns: an array with the bytes of all ranges (uint8), and the offset of each range in this
            array (int64 [n]).
        Raises: the same errors as `read`.
        """
        ...

    def fetch(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate
    ) -> Future[tuple[Bytes, Int64s]]:
        """Start to read several ranges, and return a future. Many such calls may be in flight at a
        time, from any thread.

        A storage with synchronous reads blocks until the bytes are read
        (`storage.futures.call_now`); callers use one thread for each of the `max_reads` that may be
        in flight. A storage with an event loop returns at once, and decides by itself how many
        requests it has in flight. Cancelling the future is a hint that the result is no longer
        needed.

        Args: as in `read_ranges`.

        Returns: a future of the result of `read_ranges`. It fails with the errors that `read`
            raises.
        """
        ...

    def descriptor(self, path: str) -> AbstractContextManager[int]:
        """Return a descriptor of the file, for compiled kernels that read the file themselves; -1
        if the storage has no descriptors.

        Raises: MissingFileError; DataError if the file cannot be opened.
        """
        ...
