"""A text file as it was found, and the bytes of its uncompressed text."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa

from megablend.errors import REWRITE_REMEDY, CorruptFileError
from megablend.storage.base import Storage
from megablend.storage.portions import read_portions

CODECS = {".gz": "gzip", ".zst": "zstd"}
PORTION_BYTES = 4 << 20
"""The number of bytes that are requested from the storage at a time."""
Piece = bytes | memoryview
"""Consecutive bytes of a file, as they arrive."""
_COMPRESSION = 4
"""A typical compression ratio of text. Only estimates, and the costs of tasks, depend on it."""
_MEASURED_BYTES = 16 << 20
"""The number of bytes of text from which the compression ratio is measured."""
_ZSTD_REMEDIES = {
    "too much memory": "its window is longer than 128 MiB; compress it again, with at most `zstd --long=27`",
    "Dictionary mismatch": "it needs a dictionary; compress it again without one",
}


class TextFile(NamedTuple):
    """The name, path, size and version of a text file, at the time when it was listed."""

    name: str
    """The path of the file relative to the source's root."""
    path: str
    size: int
    etag: str

    @property
    def codec(self) -> str | None:
        """The compression of the file; None if it is not compressed."""
        for suffix, codec in CODECS.items():
            if self.path.lower().endswith(suffix):
                return codec
        return None

    @property
    def cost(self) -> int:
        """The approximate number of bytes of uncompressed text."""
        return self.size * (_COMPRESSION if self.codec else 1)


def open_text(file: TextFile, storage: Storage, start: int = 0) -> Iterator[Piece]:
    """Read the uncompressed bytes of a file, piece by piece.

    Args:
        start: the offset of the first byte, if the file is not compressed; a compressed file is
            read from its beginning.

    Raises: CorruptFileError if a compressed file is truncated or damaged.
    """
    stored = _open_stored(file, storage, start)
    return stored if file.codec is None else _decompress(_Pieces(stored), file)


def count_line_ends(file: TextFile, storage: Storage, start: int, stop: int) -> int:
    """Return the number of lines of a file's uncompressed text that end within the bytes [start,
    stop)."""
    position = 0 if file.codec is not None else start
    ends = 0
    for piece in open_text(file, storage, position):
        in_range = piece[max(0, start - position) : max(0, stop - position)]
        ends += bytes(in_range).count(b"\n")
        position += len(piece)
        if position >= stop:
            break
    return ends


def measure_compression(file: TextFile, storage: Storage) -> tuple[int, int]:
    """Decompress the beginning of a compressed file, to measure its compression. Returns: the
    number of compressed bytes, and the number of bytes of text in them. Raises: the same errors as
    `open_text`."""
    stored = _Pieces(_open_stored(file, storage, 0))
    num_bytes = 0
    for data in _decompress(stored, file):
        num_bytes += len(data)
        if num_bytes >= _MEASURED_BYTES:
            break
    return stored.position, num_bytes


def _open_stored(file: TextFile, storage: Storage, start: int) -> Iterator[Piece]:
    """Read the bytes of a file as they are stored, from `start` on."""
    for _, data in read_portions(storage, file.path, file.size, PORTION_BYTES, start):
        yield data


def _decompress(stored: _Pieces, file: TextFile) -> Iterator[Piece]:
    try:
        with pa.CompressedInputStream(pa.PythonFile(stored, "r"), file.codec) as stream:
            while data := stream.read(PORTION_BYTES):
                yield data
    except OSError as error:
        if isinstance(error, ValueError):  # raised by the storage; pyarrow's is a plain OSError
            raise
        reason = str(error).strip().splitlines()[0]
        remedy = f"truncated, damaged, or not {file.codec}; {REWRITE_REMEDY}"
        for cause, zstd_remedy in _ZSTD_REMEDIES.items():
            if cause in reason:
                remedy = zstd_remedy
        raise CorruptFileError(
            file.path,
            f"cannot be decompressed ({reason}); {remedy}, or set `on_unreadable: skip`",
            offset=stored.position,
        ) from error


class _Pieces(io.RawIOBase):
    """A file object that reads the pieces of a file."""

    def __init__(self, pieces: Iterator[Piece]) -> None:
        self._pieces = pieces
        self._rest: Piece = b""
        self.position = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if not self._rest:
            self._rest = next(self._pieces, b"")
        data = bytes(self._rest if size < 0 else self._rest[:size])
        self._rest = self._rest[len(data) :]
        self.position += len(data)
        return data
