"""The table of a snapshot's files, which is read completely and checked for consistency when the
snapshot is opened."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.errors import CacheError, DamagedCacheError
from megablend.formats.base import OpenedFile
from megablend.formats.buffers import as_numpy
from megablend.index.tables.manifest import FILES, TOKEN_RANGES
from megablend.index.tables.sealed_numbers import pack_numbers, read_numbers
from megablend.index.tables.source_entry import ColumnEntry
from megablend.index.tables.tables import FILE_SCHEMA, read_batch
from megablend.lazy import cached_property
from megablend.system.digest import hex_digest
from megablend.system.limited_json import parse_json

_MAGIC = b"megablend tokens"
_UNKNOWN = (1, 0)
"""The token range that is stored for a file whose tokens are unknown. Its start is larger than its
end."""
Ranges = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file of a snapshot, with one of its indexed columns: a row of the file table."""

    name: str
    """The file's name, relative to the source's root."""
    column: int
    """Index of the entry's column among the snapshot's columns."""
    rows: int
    tokens: int
    first_block: int
    num_blocks: int
    first_chunk: int
    num_chunks: int
    body: str
    """Digest of sampled ranges of the file's body, as a hex string."""
    opened: OpenedFile
    """The data that the file's format needs to open it."""

    @property
    def blocks(self) -> Int64s:
        """The numbers of the file's blocks: int64 [num_blocks]."""
        return np.arange(self.first_block, self.first_block + self.num_blocks)


class FileTable:
    """The files of a snapshot by number. A file is listed once for each of its indexed columns.

    Args:
        folder: folder of the snapshot.
        num_files, num_columns, num_blocks, num_chunks: counts of the snapshot.

    Attributes:
        columns: int32 [num_files], index of each file's column.
        first_block, first_chunk: int64 [num_files + 1], numbers of each file's first block and
            first chunk; the last values are the totals.

    Raises: CacheError if the table is damaged.
    """

    def __init__(
        self, folder: Path, *, num_files: int, num_columns: int, num_blocks: int, num_chunks: int
    ) -> None:
        self._path = f"{folder}/{FILES}"
        self._files = read_batch(self._path, FILE_SCHEMA)
        self.columns: npt.NDArray[np.int32] = as_numpy(self._files.column("source"))
        if self._files.num_rows != num_files or (
            num_files and not 0 <= self.columns.min() <= self.columns.max() < num_columns
        ):
            raise self._damaged(f"it does not contain the {num_files} files of the sources")
        self.first_block = self._offsets("first_block", num_blocks)
        self.first_chunk = self._offsets("first_chunk", num_chunks)

    def __len__(self) -> int:
        return int(self._files.num_rows)

    def entry(self, i: int) -> FileEntry:
        """Return file number i. Raises: IndexError if there is no such file."""
        i = self._checked_number(i)
        (row,) = self._files.slice(i, 1).to_pylist()
        try:
            meta = parse_json(row["meta"])
        except ValueError as error:
            raise self._damaged(f"the metadata of a file is not valid JSON ({error})") from error
        if not isinstance(meta, dict):
            raise self._damaged("the metadata of a file is not a JSON object")
        return FileEntry(
            name=row["name"],
            column=row["source"],
            rows=row["rows"],
            tokens=row["tokens"],
            first_block=row["first_block"],
            num_blocks=int(self.first_block[i + 1]) - row["first_block"],
            first_chunk=row["first_chunk"],
            num_chunks=int(self.first_chunk[i + 1]) - row["first_chunk"],
            body=row["body"],
            opened=OpenedFile(
                size=row["size"],
                token_dtype=row["token_dtype"],
                structure=row["structure"],
                meta=meta,
            ),
        )

    def name(self, i: int) -> str:
        """Return the name of file i, relative to its source's root. Raises: IndexError if there is
        no such file."""
        name: str = self._files.column("name")[self._checked_number(i)].as_py()
        return name

    def names(self) -> list[str]:
        """Return the names of all files, relative to their sources' roots."""
        names: list[str] = self._files.column("name").to_pylist()
        return names

    def keys(self, column: ColumnEntry) -> list[str]:
        """Return a key for the content of each file of a column. Files with the same content that
        are read in the same way have the same key in all snapshots, wherever they are stored."""
        files = self._files.slice(column.files.start, len(column.files))
        columns = [
            files.column(name).to_pylist()
            for name in ("size", "rows", "tokens", "structure", "body")
        ]
        settings = [
            column.format,
            column.column,
            *([column.read.options] if column.read.options else []),
        ]
        texts = (json.dumps([*settings, *row]) for row in zip(*columns, strict=True))
        return [hex_digest(text) for text in texts]

    def contents(self) -> list[tuple[str, str]]:
        """Return two digests for each file, of its structure and of its body, which together
        identify its content."""
        structures, bodies = (
            self._files.column(name).to_pylist() for name in ("structure", "body")
        )
        return list(zip(structures, bodies, strict=True))

    def token_dtypes(self, files: range) -> Sequence[str]:
        """Return the names of the numpy dtypes in which the tokens of files are stored, sorted and
        without duplicates (`files`: a range of file numbers)."""
        dtypes = self._files.column("token_dtype").slice(files.start, len(files))
        # pyarrow's `unique` would import pyarrow.compute
        return sorted(set(dtypes.to_pylist()))

    @property
    def sizes(self) -> Int64s:
        """The size of each file in bytes (int64 [num_files]); for a `.bin/.idx` pair, the size of
        the data file."""
        sizes: Int64s = as_numpy(self._files.column("size"))
        return sizes

    @cached_property
    def token_bytes(self) -> Int64s:
        """The size in bytes of a decoded token of each file (int64 [num_files])."""
        # pyarrow's `dictionary_encode` would import pyarrow.compute
        names = self._files.column("token_dtype").to_pylist()
        sizes = dict[str, int]()
        for name in set(names):
            sizes[name] = np.dtype(name).itemsize
        return np.fromiter(map(sizes.__getitem__, names), np.int64, len(names))

    def _checked_number(self, i: int) -> int:
        i = operator.index(i)
        num_files = len(self.columns)
        if not 0 <= i < num_files:
            raise IndexError(f"file {i} is out of range: the index has {num_files} files")
        return i

    def _offsets(self, column: str, total: int) -> Int64s:
        offsets: Int64s = np.append(as_numpy(self._files.column(column)), total)
        if offsets[0] or (offsets[1:] < offsets[:-1]).any():
            raise self._damaged(f"its {column} does not ascend from 0 to {total}")
        return offsets

    def _damaged(self, problem: str) -> CacheError:
        return DamagedCacheError.of(f"{self._path}: damaged table: {problem}")


def pack_ranges(digest: str, ranges: Iterable[tuple[int, int] | None]) -> bytes:
    """Serialize the token ranges of a snapshot's files; an unknown range is None."""
    numbers = np.array([known or _UNKNOWN for known in ranges], np.int64)
    return pack_numbers(numbers, _MAGIC, digest.encode())


def read_ranges(folder: Path, num_files: int) -> Ranges:
    """Read the smallest and the largest token of each file (int64 [num_files, 2]). If they are
    unknown, the first number is larger than the second. Raises: CacheError."""
    numbers = read_numbers(
        folder / TOKEN_RANGES, np.dtype(np.int64), 2 * num_files, _MAGIC, folder.name.encode()
    )
    if numbers is None:
        return np.tile(np.array(_UNKNOWN), (num_files, 1))
    return numbers.reshape(-1, 2)
