"""What megablend asks of a place where files lie: list names, tell a file's size and identity, read ranges of bytes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from megablend.storage.find import Found

Int64s: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Allocate: TypeAlias = Callable[[int], Bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStat:
    """What identifies a version of a file without reading it."""

    size: int
    """Bytes."""
    etag: str
    """Changes whenever the file may have changed; on a local disk made of mtime_ns, ctime_ns and inode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLimits:
    """How a storage likes to be read."""

    max_gap_bytes: int
    """Bytes between two ranges are read along, up to so many: a read of its own costs more."""
    max_merged_bytes: int
    """Neighbouring ranges are read together up to so many bytes; a single range may be larger."""
    max_reads: int
    """Reads of a process that may be in flight at a time; as many threads fetch where `fetch` waits for the bytes."""


class Storage(Protocol):
    """Ranges of bytes from files named by strings (`storage.location`). Safe to share between threads, to pickle, and
    after a fork.

    Made once, by `make_storage`, and handed to all that read. One that changes another storage's answers, or notes them,
    derives from `storage.wrapper.WrapperStorage`.
    """

    def limits(self, path: str) -> ReadLimits:
        """How the storage of `path` likes to be read; takes no time."""
        ...

    def for_checking(self) -> Storage:
        """The storage itself, without caches, for those who check files while others read them: asking it for a file's
        state changes nothing for the readers of this one."""
        ...

    def find(self, pattern: str) -> Found:
        """Files that match `pattern` (`*`, `?`, `[]`, `**`), sorted, links resolved; and what could not be looked into."""
        ...

    def glob(self, pattern: str) -> list[str]:
        """Paths of files that match `pattern` (`*`, `?`, `[]`, `**`), sorted; a plain existing path matches itself."""
        ...

    def is_folder(self, path: str) -> bool:
        """Whether `path` is a folder that is there."""
        ...

    def is_readable(self, path: str) -> bool:
        """Whether this process is permitted to read the file at `path`, as far as that is known beforehand."""
        ...

    def stat(self, path: str) -> FileStat:
        """Size and identity. Raises MissingFileError."""
        ...

    def stat_opened(self, path: str) -> FileStat:
        """The same of the file that reads of `path` go to, whatever `path` names by now. Raises as `read` does."""
        ...

    def read(self, path: str, offset: int, size: int) -> bytes:
        """Exactly `size` bytes from `offset`.

        Raises: MissingFileError; ChangedFileError where it was replaced since `stat`, as far as that is seen; CorruptFileError
            where it ends before.
        """
        ...

    def read_ranges(self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate) -> tuple[Bytes, Int64s]:
        """Several ranges by one call.

        Args:
            offsets, sizes: int64 [n], in bytes.
            allocate: gives a uint8 array of so many bytes; it need not be filled with anything.

        Returns: a uint8 array; where in it each range begins, int64 [n].
        Raises: as `read` does.
        """
        ...

    def fetch(self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate) -> Future[tuple[Bytes, Int64s]]:
        """`read_ranges`, without waiting where the storage can: many such calls are in flight at a time, from any thread.

        A storage of synchronous reads reads before it returns (`storage.futures.call_now`); its callers have a thread for each of
        the `max_reads` that may be in flight. One with an event loop returns at once; how many requests it has in flight is then
        its own business. Cancelling the future is a hint that nobody waits any more.

        Args and result: as of `read_ranges`. The future has the exceptions that `read` raises.
        """
        ...

    def descriptor(self, path: str) -> AbstractContextManager[int]:
        """Lends a descriptor of the file, for kernels that read by themselves; -1 where the storage has none.

        Raises: MissingFileError; DataError where it cannot be opened.
        """
        ...
