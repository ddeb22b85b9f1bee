"""Read the lines of a part of a text file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import NamedTuple

from megablend.text.text_file import Piece

BATCH_BYTES = 16 << 20
"""The maximum number of bytes of lines that are read, tokenised and written together. The bytes of
token files depend on this number."""


class Lines(NamedTuple):
    """Consecutive lines of a text file."""

    data: memoryview | None
    """The bytes of the lines; None for a single line that was skipped because it is too long."""
    offset: int
    """The offset of the lines in the uncompressed file."""
    size: int
    """The number of bytes of the lines."""


class LineReader:
    """A reader of consecutive lines of a file. It returns the lines in batches, which depend on the
    file and on the first byte of the part, but not on how the bytes arrive.

    Args:
        pieces: the file's bytes from `offset` on.
        max_bytes: the maximum size of a line. Longer lines are skipped.
    """

    def __init__(self, pieces: Iterator[Piece], offset: int, max_bytes: int) -> None:
        self.offset = offset
        """The position of the first byte that has not been returned."""
        self._pieces = pieces
        self._max_bytes = max_bytes
        self._buffer = b""
        self._start = 0
        """The index in `_buffer` of the byte at `offset`."""
        self._is_at_end = False

    def pass_line(self) -> None:
        """Skip the rest of a line that belongs to the previous part."""
        self._pass_line(lambda _: None)

    def at_end(self) -> bool:
        """Return whether the file has no more bytes."""
        return self._fill(1) == 0

    def read(self, stop: int, digest: blake2b) -> Lines | None:
        """Read the next lines that begin before the offset `stop`, and add their bytes to `digest`.

        Returns: lines of at most BATCH_BYTES, or one longer line; None if there are no more lines.
        """
        if self.offset >= stop:
            return None
        # One byte more than a batch shows whether the file ends within the batch
        num_buffered = self._fill(BATCH_BYTES + 1)
        if not num_buffered:
            return None
        offset = self.offset
        end = self._find_batch_end(stop, num_buffered) or self._find_long_end()
        if end is None:
            self._pass_line(digest.update)
            return Lines(None, offset, self.offset - offset)
        data = memoryview(self._buffer)[self._start : end]
        digest.update(data)
        self._start = end
        self.offset += len(data)
        return Lines(data, offset, len(data))

    def _find_batch_end(self, stop: int, num_buffered: int) -> int:
        """Return the index in the buffer at which a batch of lines ends; 0 if the first line does
        not fit into a batch."""
        start = self._start
        batch_end = start + min(num_buffered, BATCH_BYTES)
        end = 0
        last = start + stop - 1 - self.offset  # in the last line that begins before `stop`
        if last < batch_end:
            end = self._buffer.find(b"\n", last, batch_end) + 1
        if not end and num_buffered <= BATCH_BYTES:  # the file ends here
            return batch_end
        return end or self._buffer.rfind(b"\n", start, batch_end) + 1

    def _find_long_end(self) -> int | None:
        """Return the index in the buffer at which the first line ends; None if the line is longer
        than `max_bytes`."""
        size = BATCH_BYTES
        while True:
            num_buffered = self._fill(size)
            end = self._buffer.find(b"\n", self._start) + 1
            if not end and num_buffered < size:  # the last line of the file
                end = len(self._buffer)
            if end:
                return end if end - self._start <= self._max_bytes else None
            if num_buffered > self._max_bytes:
                return None
            size *= 2

    def _pass_line(self, use: Callable[[Piece], object]) -> None:
        """Skip the rest of a line of any length. `use` is called with the bytes that are
        skipped."""
        while self._fill(1):
            end = self._buffer.find(b"\n", self._start) + 1
            data = memoryview(self._buffer)[self._start : end or None]
            use(data)
            self._start += len(data)
            self.offset += len(data)
            if end:
                return

    def _fill(self, size: int) -> int:
        """Read until `size` bytes are buffered, or the file ends. Returns: the number of buffered
        bytes."""
        num_buffered = len(self._buffer) - self._start
        if num_buffered >= size or self._is_at_end:
            return num_buffered
        pieces: list[Piece] = [memoryview(self._buffer)[self._start :]]
        while num_buffered < size:
            piece = next(self._pieces, b"")
            if not piece:
                self._is_at_end = True
                break
            pieces.append(piece)
            num_buffered += len(piece)
        self._buffer = b"".join(pieces)
        self._start = 0
        return num_buffered
