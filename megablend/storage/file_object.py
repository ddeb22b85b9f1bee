"""A file of a storage as a file object, for libraries that read from file objects."""

from __future__ import annotations

import io
from collections.abc import Callable


class FileObject(io.RawIOBase):
    """A readable file object of a known size.

    Args:
        size: the size of the file, in bytes.
        read: returns the bytes of a range within the file, given its offset and size.
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
        bases = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}
        self._position = bases[whence] + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        """See io.RawIOBase."""
        remaining = max(0, self._size - self._position)
        num_bytes = remaining if size < 0 else min(size, remaining)
        data = self._read(self._position, num_bytes)
        self._position += len(data)
        return data
