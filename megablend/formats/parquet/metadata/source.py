"""The bytes of one file: checked reads, and errors that name the file and the offset of malformed
bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa

from megablend.arrays import Int64s
from megablend.errors import CorruptFileError, UnsupportedFileError
from megablend.formats.buffers import empty_from_arrow_pool
from megablend.formats.parquet.metadata.thrift import MalformedError, UnsupportedError
from megablend.storage.base import Bytes, ReadLimits, Storage
from megablend.storage.prefetched import PrefetchedStorage, request_ranges, stream_portions
from megablend.storage.ranges import merge_ranges, portions

PORTION_BYTES = 32 << 20
"""Approximate number of bytes of the ranges that are streamed together; a larger range is streamed
by itself."""


@dataclass(slots=True)
class ErrorLocation:
    """The place in the file that an error names."""

    offset: int
    """Offset in the file."""


@dataclass(frozen=True, slots=True)
class FileBytes:
    """A file of known size within a storage."""

    path: str
    storage: Storage
    size: int

    @property
    def limits(self) -> ReadLimits:
        """The read limits of the storage."""
        return self.storage.limits(self.path)

    @property
    def is_prefetched(self) -> bool:
        """Whether reads have to be announced by `request` to be fast; see `storage.prefetched`."""
        return isinstance(self.storage, PrefetchedStorage)

    def request(self, offsets: Int64s, sizes: Int64s) -> None:
        """Announce reads of ranges, given as arrays of int64 [n]. Ranges outside the file are left
        out: reading them will raise the error."""
        inside = (offsets >= 0) & (sizes > 0) & (offsets <= self.size - sizes)
        request_ranges(self.storage, self.path, offsets[inside], sizes[inside])

    def stream(self, offsets: Int64s, sizes: Int64s) -> Iterator[slice]:
        """Read neighbouring ranges, int64 [n], ahead of the code that uses them, if reads are
        prefetched.

        Yields: slices of the ranges, whose bytes are in memory until the next slice is taken.
        """
        parts = portions(sizes, PORTION_BYTES)
        ranges = [(offsets[part], sizes[part]) for part in parts]
        return (parts[i] for i in stream_portions(self.storage, self.path, ranges))

    def read(self, offset: int, size: int, what: str) -> bytes:
        """Read exactly `size` bytes from `offset` on. Raises: CorruptFileError if they are not
        within the file; `what` describes the bytes in its message."""
        self._check(offset, size, what)
        return self.storage.read(self.path, offset, size)

    def read_ranges(self, offsets: Int64s, sizes: Int64s, what: str) -> tuple[pa.Buffer, Int64s]:
        """Read several ranges.

        Args:
            offsets, sizes: int64 [n].

        Returns: a buffer, and the position in it at which each range begins, int64 [n].
        Raises: CorruptFileError if a range is not within the file; `what` describes the bytes.
        """
        self.check_ranges(offsets, sizes, what)
        out, begins = self.storage.read_ranges(
            self.path, offsets, sizes, partial(empty_from_arrow_pool, dtype=np.uint8)
        )
        return pa.py_buffer(out), begins

    def read_coalesced(self, offsets: Int64s, sizes: Int64s, what: str) -> tuple[Bytes, Int64s]:
        """Read ranges as `read_ranges` does, but read adjacent ranges together.

        Returns: bytes, uint8, and the position in them at which each range begins, int64 [n].
        """
        starts, stops, runs = merge_ranges(offsets, sizes, self.limits)
        data, begins = self.read_ranges(starts, stops - starts, what)
        return np.frombuffer(data, np.uint8), begins[runs] + offsets - starts[runs]

    def check_ranges(self, offsets: Int64s, sizes: Int64s, what: str) -> None:
        """Check that ranges, int64 [n], are within the file. Raises: CorruptFileError."""
        for i in ((offsets < 0) | (sizes < 0) | (offsets > self.size - sizes)).nonzero()[0]:
            self._check(int(offsets[i]), int(sizes[i]), what)

    def _check(self, offset: int, size: int, what: str) -> None:
        if offset < 0 or size < 0 or offset + size > self.size:
            problem = f"{what} should have {size} bytes here, but the file has only {self.size}; rewrite or re-download the file"
            raise CorruptFileError(self.path, problem, offset=offset)

    @contextlib.contextmanager
    def error_context(self, offset: int, what: str) -> Iterator[ErrorLocation]:
        """Convert MalformedError and UnsupportedError into errors that name the file, the offset
        and `what`.

        `offset` is the first byte of `what`; a loop over many items sets it in the yielded object.
        """
        location = ErrorLocation(offset)
        try:
            yield location
        except MalformedError as error:
            problem = f"{what} is damaged: {error}; rewrite or re-download the file"
            raise CorruptFileError(self.path, problem, offset=location.offset) from error
        except MemoryError as error:
            problem = f"{what} needs more memory than is available: its size is damaged, or it is too large; rewrite the file"
            raise CorruptFileError(self.path, problem, offset=location.offset) from error
        except UnsupportedError as error:
            raise UnsupportedFileError(
                self.path, f"{what}: {error}", offset=location.offset
            ) from error

    @contextlib.contextmanager
    def error_context_of_items(
        self, offsets: Int64s, row_groups: Int64s, what: str
    ) -> Iterator[None]:
        """Convert errors as `error_context` does, for items of many row groups that are processed
        together. The error's `item` is an index into `offsets` and `row_groups`, arrays of int64
        [n]."""
        try:
            yield
        except (MalformedError, UnsupportedError, MemoryError) as error:
            item = 0 if isinstance(error, MemoryError) else error.item
            with self.error_context(int(offsets[item]), f"{what} of row group {row_groups[item]}"):
                raise
