"""Tables of files, which hold a listing of a million files in a few arrays instead of a million
objects."""

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
    """A column of n texts, which are stored in one array of bytes."""

    letters: Uint8s
    """The bytes of all texts, in UTF-8. Surrogates are encoded like other characters."""
    begins: Int64s
    """The offset in `letters` at which each text begins (int64 [n])."""
    stops: Int64s
    """The offset in `letters` at which each text ends (int64 [n])."""

    @classmethod
    def of(cls, texts: Iterable[str]) -> Texts:
        """Return a column of the given texts."""
        builder = TextsBuilder()
        for text in texts:
            builder.append(text)
        return builder.build()

    def get(self, row: int) -> str:
        """Return the text in a row."""
        return str(self.letters[self.begins[row] : self.stops[row]].data, *_ENCODING)

    def list_all(self, begin: int = 0, stop: int | None = None) -> list[str]:
        """Return the texts in the rows from `begin` to `stop`, by default in all rows."""
        stop = len(self.begins) if stop is None else min(stop, len(self.begins))
        texts: list[str] = []
        for first in range(begin, stop, _DECODED_ROWS):
            begins = self.begins[first : min(first + _DECODED_ROWS, stop)]
            stops = self.stops[first : min(first + _DECODED_ROWS, stop)]
            low = int(begins.min())
            high = int(stops.max())
            places = zip((begins - low).tolist(), (stops - low).tolist(), strict=True)
            letters = self.letters[low:high].data
            # Most texts are ASCII and adjacent: decode them together, then cut
            if high - low <= _MAX_DECODED_BYTES and (whole := bytes(letters)).isascii():
                text = whole.decode("ascii")
                texts += [text[start:end] for start, end in places]
            else:
                texts += [str(letters[start:end], *_ENCODING) for start, end in places]
        return texts

    def take(self, rows: npt.NDArray[Any]) -> Texts:
        """Return a column of the texts in the given rows. The bytes are shared, not copied."""
        return Texts(self.letters, self.begins[rows], self.stops[rows])

    def find(self, text: str) -> Int64s:
        """Return the indices of the rows whose text equals `text`, in ascending order (int64)."""
        letters = text.encode(*_ENCODING)
        rows = np.flatnonzero(self.stops - self.begins == len(letters))
        # From the end, since many texts have the same beginning
        for back, letter in enumerate(reversed(letters), 1):
            rows = rows[self.letters[self.stops[rows] - back] == letter]
        return rows

    def find_rows(self, mark: Callable[[Uint8s, Uint8s], Bools]) -> Int64s:
        """Return the indices of the rows whose text contains a marked byte, in ascending order
        (int64).

        Args:
            mark: returns whether each byte is marked. Its arguments are an array of bytes, and an
                array with the byte before each of them.
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
    """A builder of a column of texts. It keeps only one copy of the texts in memory."""

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
        """Return the column. Nothing may be added afterwards."""
        return Texts(
            np.frombuffer(self._letters, np.uint8),
            np.frombuffer(self._begins, np.int64),
            np.frombuffer(self._stops, np.int64),
        )


class FileTable(NamedTuple):
    """A table of files, with one row for each file."""

    paths: Texts
    sizes: Int64s
    """The size of each file in bytes (int64 [n])."""
    etags: Texts
    """The etag of each file; see `FileStat.etag`."""

    def take(self, rows: npt.NDArray[Any]) -> FileTable:
        """Return a table with only the given rows."""
        return FileTable(self.paths.take(rows), self.sizes[rows], self.etags.take(rows))


class TableStorage(Storage, Protocol):
    """A storage that lists files as a table."""

    def find_table(self, pattern: str) -> FileTable | None:
        """Return a table of the files that match `pattern`, in any order; None if `find` and `stat`
        have to be called instead. Other calls do not use the sizes and etags in the table.

        Raises: the same errors as Storage.find.
        """
        ...


def find_table(storage: Storage, pattern: str) -> FileTable | None:
    """Return the result of `TableStorage.find_table`; None if the storage is not a TableStorage."""
    find = getattr(storage, "find_table", None)
    return None if find is None else find(pattern)
