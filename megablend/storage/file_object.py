"""A file of a storage as a file object, for libraries that read from one."""

from __future__ import annotations

import io
from collections.abc import Callable


class FileObject(io.RawIOBase):
    """Reads a file of known size.

    Args:
        size: of the file, bytes.
        read: returns `size` bytes from `offset`, all of which are in the file.
    """

    def __init__(self, size: int, read: Callable[[int, int], bytes]) -> None:
        self._size = size
        self._read = read
        self._position = 0

    def readable(self) -> bool:
        """See io.RawIOBase."""
        return True

    def seekable(self) -> bool:
        """See io.RawIOBase."""
        return True

    def tell(self) -> int:
        """See io.RawIOBase."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """See io.RawIOBase."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        """See io.RawIOBase."""
        left = max(0, self._size - self._position)
        data = self._read(self._position, left if size < 0 else min(size, left))
        self._position += len(data)
        return data
