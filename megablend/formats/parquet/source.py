"""One file's bytes: checked reads, and the place at which malformed bytes are blamed on the file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from megablend.errors import CorruptFileError, UnsupportedFileError
from megablend.formats.parquet.thrift import MalformedError, UnsupportedError
from megablend.storage.base import Storage


@dataclass(slots=True)
class Place:
    """The byte of the file that is to be blamed."""

    offset: int


@dataclass(frozen=True, slots=True)
class ByteSource:
    """A file of known size within a storage."""

    path: str
    storage: Storage
    size: int

    def read(self, offset: int, size: int, what: str) -> bytes:
        """Exactly `size` bytes from `offset`. Raises CorruptFileError where `what` does not lie within the file."""
        self._check(offset, size, what)
        return self.storage.read(self.path, offset, size)

    def read_ranges(self, ranges: Sequence[tuple[int, int]], what: str) -> list[memoryview]:
        """The bytes of each (offset, size). Raises CorruptFileError where `what` does not lie within the file."""
        buffers = []
        for offset, size in ranges:
            self._check(offset, size, what)
            # Arrow's pool keeps freed memory at hand; fresh pages from the system cost more than the copy into them.
            buffers.append(memoryview(pa.allocate_buffer(size)).cast("B"))
        self.storage.read_into(
            self.path, [(offset, buffer) for (offset, _), buffer in zip(ranges, buffers, strict=True)]
        )
        return [buffer.toreadonly() for buffer in buffers]

    def _check(self, offset: int, size: int, what: str) -> None:
        if offset < 0 or size < 0 or offset + size > self.size:
            problem = f"{what} should take {size} bytes, but the file has {self.size}; write it again or fetch it anew"
            raise CorruptFileError(self.path, problem, offset=offset)

    @contextlib.contextmanager
    def blamed(self, offset: int, what: str) -> Iterator[Place]:
        """Turn what is found malformed or unsupported within into an error that names file, place and `what`.

        The place is that of the first byte of `what`; a loop over many may move it on.
        """
        place = Place(offset)
        try:
            yield place
        except MalformedError as error:
            problem = f"{what} is damaged: {error}; write the file again or fetch it anew"
            raise CorruptFileError(self.path, problem, offset=place.offset) from error
        except MemoryError as error:
            problem = f"{what} asks for more memory than there is: a damaged size, or a page far too large"
            raise CorruptFileError(self.path, problem, offset=place.offset) from error
        except UnsupportedError as error:
            raise UnsupportedFileError(self.path, f"{what}: {error}", offset=place.offset) from error
