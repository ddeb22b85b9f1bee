"""Tables of files: a listing of a million files as a few arrays, instead of a million objects."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from megablend.arrays import Bools, Int64s, Uint8s
from megablend.storage.base import Storage

_SCANNED_BYTES = 1 << 20
_DECODED_ROWS = 4096
_MAX_DECODED_BYTES = 1 << 20
_ENCODING = ("utf-8", "surrogatepass")


class Texts(NamedTuple):
    """A column of texts, each a part of the same bytes."""

    letters: Uint8s
    """The bytes of all texts: UTF-8, in which surrogates are encoded like other characters."""
    begins: Int64s
    """The offset at which each text begins: int64 [n]."""
    stops: Int64s
    """The offset at which each text ends: int64 [n]."""

    @classmethod
    def of(cls, texts: Iterable[str]) -> Texts:
        """Return a column of the given texts."""
        builder = TextsBuilder()
        for text in texts:
            builder.append(text)
        return builder.build()

    def get(self, row: int) -> str:
        """Return a text."""
        return str(self.letters[self.begins[row] : self.stops[row]].data, *_ENCODING)

    def list_all(self, begin: int = 0, stop: int | None = None) -> list[str]:
        """Return the texts of some rows, by default of all."""
        stop = len(self.begins) if stop is None else min(stop, len(self.begins))
        texts: list[str] = []
        for first in range(begin, stop, _DECODED_ROWS):
            begins = self.begins[first : min(first + _DECODED_ROWS, stop)]
            stops = self.stops[first : min(first + _DECODED_ROWS, stop)]
            low = int(begins.min())
            high = int(stops.max())
            places = zip((begins - low).tolist(), (stops - low).tolist(), strict=True)
            letters = self.letters[low:high].data
            # Most are ASCII, and next to one another: decoded as one, and cut
            if high - low <= _MAX_DECODED_BYTES and (whole := bytes(letters)).isascii():
                text = whole.decode("ascii")
                texts += [text[start:end] for start, end in places]
            else:
                texts += [str(letters[start:end], *_ENCODING) for start, end in places]
        return texts

    def take(self, rows: npt.NDArray[Any]) -> Texts:
        """Return the texts of some rows. The bytes are shared."""
        return Texts(self.letters, self.begins[rows], self.stops[rows])

    def find(self, text: str) -> Int64s:
        """Return the rows of a text: int64, ascending."""
        letters = text.encode(*_ENCODING)
        rows = np.flatnonzero(self.stops - self.begins == len(letters))
        # From the end, since many begin alike
        for back, letter in enumerate(reversed(letters), 1):
            rows = rows[self.letters[self.stops[rows] - back] == letter]
        return rows

    def find_rows(self, mark: Callable[[Uint8s, Uint8s], Bools]) -> Int64s:
        """Return the rows of texts that contain bytes of a kind: int64, ascending.

        Args:
            mark: returns which bytes are of this kind, given the bytes and the byte before each.
        """
        places = [np.empty(0, np.int64)]
        last = np.zeros(1, np.uint8)
        for begin in range(0, len(self.letters), _SCANNED_BYTES):
            part = self.letters[begin : begin + _SCANNED_BYTES]
            marked = mark(part, np.concatenate([last, part[:-1]]))
            places.append(begin + np.flatnonzero(marked))
            last = part[-1:]
        found = np.concatenate(places)
        is_found = np.searchsorted(found, self.begins) < np.searchsorted(found, self.stops)
        return np.flatnonzero(is_found)


class TextsBuilder:
    """Builds a column of texts in place, so that no more than the column is in memory."""

    def __init__(self) -> None:
        self._letters = bytearray()
        self._begins = array("q")
        self._stops = array("q")

    def append(self, text: str) -> None:
        """Add a text."""
        self._begins.append(len(self._letters))
        self._letters += text.encode(*_ENCODING)
        self._stops.append(len(self._letters))

    def extend(self, texts: Texts) -> None:
        """Add the texts of another column."""
        place = len(self._letters)
        self._letters += texts.letters.data
        self._begins.frombytes((texts.begins + place).tobytes())
        self._stops.frombytes((texts.stops + place).tobytes())

    def build(self) -> Texts:
        """Return the column, to which nothing may be added any more."""
        return Texts(
            np.frombuffer(self._letters, np.uint8),
            np.frombuffer(self._begins, np.int64),
            np.frombuffer(self._stops, np.int64),
        )


class FileTable(NamedTuple):
    """A table of files, with one row for each file."""

    paths: Texts
    sizes: Int64s
    """The size of each file in bytes: int64 [n]."""
    etags: Texts
    """The etag of each file; see `FileStat.etag`."""

    def take(self, rows: npt.NDArray[Any]) -> FileTable:
        """Return some rows."""
        return FileTable(self.paths.take(rows), self.sizes[rows], self.etags.take(rows))


class TableStorage(Storage, Protocol):
    """A storage that lists files as a table."""

    def find_table(self, pattern: str) -> FileTable | None:
        """Return the files that match `pattern`, in any order, and their states; None if `find` and
        `stat` have to be called instead. Other calls do not use these states.

        Raises: the same errors as Storage.find.
        """
        ...


def find_table(storage: Storage, pattern: str) -> FileTable | None:
    """Return the result of `TableStorage.find_table`; None for other storages."""
    find = getattr(storage, "find_table", None)
    return None if find is None else find(pattern)
