"""What megablend asks of a place where files lie: list names, tell a file's size and identity, read ranges of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStat:
    """What identifies a version of a file without reading it."""

    size: int
    """Bytes."""
    etag: str
    """Changes whenever the file may have changed; on a local disk made of mtime_ns, ctime_ns and inode."""


class Storage(Protocol):
    """Ranges of bytes from files named by plain strings. Safe to share between threads, to pickle, and after a fork."""

    def glob(self, pattern: str) -> list[str]:
        """Paths of files that match `pattern` (`*`, `?`, `[]`, `**`), sorted; a plain existing path matches itself."""
        ...

    def stat(self, path: str) -> FileStat:
        """Size and identity. Raises MissingFileError."""
        ...

    def read(self, path: str, offset: int, size: int) -> bytes:
        """Exactly `size` bytes from `offset`.

        Raises: MissingFileError; ChangedFileError where it was replaced since `stat`, as far as that is seen; CorruptFileError
            where it ends before.
        """
        ...

    def read_into(self, path: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer with bytes of the file from its offset on. Raises as `read` does."""
        ...

    def descriptor(self, path: str) -> AbstractContextManager[int]:
        """Lends a descriptor of the file, for kernels that read by themselves; -1 where the storage has none.

        Raises: MissingFileError; DataError where it cannot be opened.
        """
        ...
