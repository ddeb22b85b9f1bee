"""Manifests. A manifest lists the files of a revision of a dataset.

A manifest is text: a line of JSON [path, location, etag, size] for each file, sorted by path. It is
stored compressed. The digest of the text names the revision, so revisions of equal files have equal
names on all machines.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, overload

import numpy as np

from megablend.arrays import Int64s, Uint8s
from megablend.mirror.disk.folder import FileKey
from megablend.storage.file_table import FileTable, list_texts
from megablend.system.limited_json import parse_json

_FIRST_LINE = b"1"
_NEWLINE = 10
_ZERO = 48
_SCANNED_BYTES = 1 << 24
_LINES_AT_A_TIME = 4096
_quote = json.encoder.encode_basestring_ascii


class DataFile(NamedTuple):
    """A file of a revision."""

    path: str
    """The path in the dataset, with slashes between its parts."""
    key: FileKey


class Manifest(Sequence[DataFile]):
    """The files of a revision, sorted by path.

    A dataset may have a million files. So this class stores the text of the manifest, with about
    120 bytes per file, and parses lines only when they are accessed.

    Args:
        text: the text of the manifest.
    """

    def __init__(self, text: bytes | bytearray) -> None:
        self._text = text
        self._begins = _find_lines(text)

    @classmethod
    def of_table(cls, files: FileTable) -> Manifest:
        """Make a manifest of files. The text is the same as that of `json.dumps`, but is made much
        faster.

        Args:
            files: a table of files sorted by `path`, the path in the dataset.
        """
        text = bytearray(_FIRST_LINE)
        # Some lines at a time, so that few strings are in memory
        for begin in range(0, len(files), _LINES_AT_A_TIME):
            part = files.slice(begin, _LINES_AT_A_TIME)
            columns = (_escape(list_texts(part[name])) for name in ("path", "location", "etag"))
            lines = [
                f'\n["{path}", "{location}", "{etag}", {size}]'
                for path, location, etag, size in zip(
                    *columns, part["size"].to_pylist(), strict=True
                )
            ]
            text += "".join(lines).encode("ascii")
        return cls(text)

    @classmethod
    def unpack(cls, revision: str, data: bytes) -> Manifest:
        """Decompress a manifest that `pack` has compressed. Raises: ValueError if the bytes are
        damaged, or belong to another revision."""
        try:
            text = zlib.decompress(data)
        except zlib.error as error:
            raise ValueError(f"is damaged: {error}") from None
        if _hash(text) != revision:
            raise ValueError("is damaged: its digest differs from the one in its name")
        return cls(text)

    def pack(self) -> bytes:
        """Return the compressed text, to store it or send it to another node."""
        # Twice as fast as usual, for a seventh more bytes
        return zlib.compress(self._text, 1)

    @cached_property
    def revision(self) -> str:
        """The digest of the text, which names the revision: a string of 32 hex digits."""
        return _hash(self._text)

    @property
    def num_text_bytes(self) -> int:
        """The size of the text in bytes."""
        return len(self._text)

    @cached_property
    def sizes(self) -> Int64s:
        """The size of each file in bytes (int64 [files])."""
        text = np.frombuffer(self._text, np.uint8)
        # Parse the digits before the `]` at the end of each line, the last digit first
        positions = self._begins[1:] - 3
        sizes = np.zeros(len(positions), np.int64)
        is_digit = np.ones(len(positions), np.bool_)
        factor = 1
        while True:
            digits = text[positions].astype(np.int64) - _ZERO
            is_digit &= (digits >= 0) & (digits <= 9)
            if not is_digit.any():
                return sizes
            sizes += digits * is_digit * factor
            factor *= 10
            positions -= 1

    @cached_property
    def digests(self) -> Uint8s:
        """The digest of each file's key (uint8 [files, 16])."""
        joined = bytearray()
        for file in self:
            joined += file.key.hash()
        return np.frombuffer(joined, np.uint8).reshape(-1, 16)

    def __len__(self) -> int:
        return len(self._begins) - 1

    @overload
    def __getitem__(self, index: int) -> DataFile: ...
    @overload
    def __getitem__(self, index: slice) -> list[DataFile]: ...
    def __getitem__(self, index: int | slice) -> DataFile | list[DataFile]:
        rows = range(len(self))[index]
        if isinstance(rows, int):
            return self._parse(rows, rows + 1)[0]
        return self._parse(rows.start, rows.stop)[:: rows.step]

    def __iter__(self) -> Iterator[DataFile]:
        for begin in range(0, len(self), _LINES_AT_A_TIME):
            yield from self._parse(begin, min(begin + _LINES_AT_A_TIME, len(self)))

    def _parse(self, begin: int, stop: int) -> list[DataFile]:
        lines = self._text[self._begins[begin] : self._begins[stop]].rstrip(b"\n")
        return [
            DataFile(path, FileKey(location, etag, size))
            for path, location, etag, size in parse_json(b"[" + lines.replace(b"\n", b",") + b"]")
        ]

    @cached_property
    def _by_location(self) -> tuple[Int64s, Int64s]:
        """The hashes of the files' locations in ascending order, and the index of the file of each
        hash (both int64 [files])."""
        hashes = np.fromiter((hash(file.key.location) for file in self), np.int64, len(self))
        order = np.argsort(hashes)
        return hashes[order], order

    def find_location(self, location: str) -> DataFile | None:
        """Return the file with this location; None if there is none."""
        hashes, order = self._by_location
        begin, stop = np.searchsorted(hashes, [hash(location), hash(location) + 1])
        for index in order[begin:stop].tolist():
            file: DataFile = self[index]
            if file.key.location == location:
                return file
        return None

    def list_gone(self, later: Manifest) -> Iterator[DataFile]:
        """Yield the files of this manifest whose paths are missing in `later`."""
        new_paths = (file.path for file in later)
        new_path = next(new_paths, None)
        for file in self:
            while new_path is not None and new_path < file.path:
                new_path = next(new_paths, None)
            if new_path != file.path:
                yield file


def _escape(texts: list[str]) -> list[str]:
    """Escape texts for ASCII JSON, without the quotes."""
    whole = "".join(texts)
    if len(_quote(whole)) == len(whole) + 2:
        return texts
    return [_quote(text)[1:-1] for text in texts]


def _find_lines(text: bytes | bytearray) -> Int64s:
    """Return the offset after the end of each line of the text, in ascending order."""
    ends = [
        begin
        + np.flatnonzero(np.frombuffer(text[begin : begin + _SCANNED_BYTES], np.uint8) == _NEWLINE)
        for begin in range(0, len(text), _SCANNED_BYTES)
    ]
    return np.concatenate([*ends, [len(text)]]) + 1


def _hash(text: bytes | bytearray) -> str:
    return hashlib.blake2b(text, digest_size=16).hexdigest()


NO_FILES = Manifest(_FIRST_LINE)
