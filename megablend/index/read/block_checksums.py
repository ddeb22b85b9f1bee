"""CRC-32 checksums of the byte ranges that are read for each block. `build` computes them on
request, in one pass over all data.

    <cache>/checksums/<digest>/   ranges.arrow   a row for each range of each file: its place, its size, its CRC-32
                                  files.arrow    the number of the first range of each file, and the total
                                  manifest.json  sizes and checksums of these tables

The *place* of a range identifies its first byte: the lower bits are the offset in a file, and the
upper bits are the index of the file in `Format.files`, since a pair has two files. The checksums
are not part of the snapshot's digest. Bytes that are read over a network, or from local files that
were moved, copied or touched since the build, are compared with their checksums: see
`index.blocks.open_files`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megablend.arrays import running_totals
from megablend.caches.base import CHECKSUMS
from megablend.errors import CacheError
from megablend.formats.fetch import BATCH_BYTES, FileRead, fetch_all
from megablend.index.read.snapshot import Snapshot
from megablend.index.tables.manifest import MANIFEST, damaged_tables, read_manifest
from megablend.index.tables.mapped_table import MappedTable
from megablend.index.tables.table_folder import commit_tables
from megablend.index.tables.tables import TableWriter
from megablend.storage.base import Bytes, Storage
from megablend.storage.ranges import portions

RANGES = "ranges.arrow"
FILES = "files.arrow"
RANGE_COLUMNS = np.dtype([("offset", "<i8"), ("size", "<u4"), ("crc32", "<u4")])
_POSITION_SHIFT = 56
"""Number of bits of a place that hold the offset in a file; the bits above hold the file's index in
`Format.files`."""
FILE_COLUMNS = np.dtype([("first_range", "<i8")])
Sums = npt.NDArray[np.void]
"""Checksums of ranges: RANGE_COLUMNS [n], sorted by the field `offset`, which contains places."""


def place_in_sums(position: int, offset: int) -> int:
    """Return the place of a byte, given its offset in a file, and the index of the file in
    `Format.files`."""
    return position << _POSITION_SHIFT | offset


def find_wrong(sums: Sums, start: int, data: Bytes) -> list[tuple[int, int]]:
    """Find the ranges within `data` that differ from their checksums. Ranges that are only partly
    in `data` are ignored.

    Args:
        start: place of the first byte of `data`.

    Returns: the position in `data` and the size of each such range.
    """
    stop = start + len(data)
    wrong = []
    first, last = np.searchsorted(sums["offset"], [start, stop]).tolist()
    for offset, size, crc in sums[first:last].tolist():
        begin = offset - start
        if offset + size <= stop and zlib.crc32(data[begin : begin + size].data) != crc:
            wrong.append((begin, size))
    return wrong


def compute_sums(snapshot: Snapshot, number: int, path: str, storage: Storage) -> Sums:
    """Compute the checksums of a file, given by its number. Read all of its blocks as readers do,
    and return the checksum of each range that is read. Raises: see BlockReader.byte_ranges and
    Storage.read."""
    file = snapshot.files.entry(number)
    column = snapshot.columns[file.column]
    reader = column.kind.open(path, column.column, file.opened, storage=storage)
    paths = column.kind.files(path)
    blocks = snapshot.blocks(file.blocks)
    chunks = snapshot.chunks(file)
    blocks = blocks[np.argsort(blocks["offset"], kind="stable")]
    rows = list[tuple[int, int, int]]()
    for part in portions(blocks["decoded_bytes"], BATCH_BYTES):
        read = FileRead(reader, blocks[part], chunks)
        fetch_all([read], storage)
        for fetched in read.fetched:
            position = paths.index(fetched.ranges.path)
            ranges = zip(
                fetched.ranges.offsets.tolist(), fetched.ranges.sizes.tolist(), strict=True
            )
            rows += [
                (place_in_sums(position, offset), size, zlib.crc32(fetched[i].data))
                for i, (offset, size) in enumerate(ranges)
            ]
    return np.unique(np.array(rows, RANGE_COLUMNS))


def commit_sums(snapshot: Snapshot, sums: Sequence[Sums]) -> None:
    """Store the results of `compute_sums` for all files of a snapshot. Raises: CacheError."""

    def write(folder: Path) -> None:
        with (
            TableWriter(folder / RANGES, RANGE_COLUMNS) as ranges,
            TableWriter(folder / FILES, FILE_COLUMNS) as files,
        ):
            # A row of zeros is appended, since a table must not be empty
            for rows in (*sums, np.zeros(1, RANGE_COLUMNS)):
                ranges.append(rows)
            files.append({"first_range": running_totals([len(rows) for rows in sums])})
            ranges.finish()
            files.finish()

    commit_tables(snapshot.store, CHECKSUMS, snapshot.digest, write)


class BlockChecksums:
    """The checksums of a snapshot. Raises: CacheError if they are damaged."""

    def __init__(self, snapshot: Snapshot) -> None:
        folder = find_folder(snapshot)
        problems = damaged_tables(folder, read_manifest(folder))
        if problems:
            raise CacheError(
                f"{problems[0]}; remove {folder} and run `megablend build CONFIG --checksums` to "
                "recompute them"
            )
        self._ranges = MappedTable(folder / RANGES, RANGE_COLUMNS)
        self._firsts = MappedTable(folder / FILES, FILE_COLUMNS)["first_range"]

    def of_file(self, number: int) -> Sums:
        """Return the checksums of a file, given by its number in the snapshot."""
        rows = np.arange(self._firsts[number], self._firsts[number + 1])
        sums = np.empty(len(rows), RANGE_COLUMNS)
        for name in RANGE_COLUMNS.names or ():
            sums[name] = self._ranges.take(name, rows)
        return sums


def open_checksums(snapshot: Snapshot) -> BlockChecksums | None:
    """Open the checksums of a snapshot; return None if there are none. Raises: CacheError if they
    are damaged."""
    exist = (find_folder(snapshot) / MANIFEST).is_file()
    return BlockChecksums(snapshot) if exist else None


def find_differences(
    snapshot: Snapshot, number: int, path: str, expected: Sums, storage: Storage
) -> Iterator[str]:
    """Compare the blocks of the file at `path` with their checksums, and yield one line if they
    differ.

    Args:
        number: the file's number in the snapshot.
        expected: the checksums that the index has for the file.

    Raises: see compute_sums.
    """
    same = np.isin(expected, compute_sums(snapshot, number, path, storage))
    if not same.all():
        first_place = int(expected["offset"][np.argmin(same)])
        position = first_place >> _POSITION_SHIFT
        offset = first_place & ((1 << _POSITION_SHIFT) - 1)
        num_wrong = len(same) - int(same.sum())
        paths = snapshot.columns[snapshot.files.entry(number).column].kind.files(path)
        yield (
            f"{paths[position]} at byte {offset}: {num_wrong:,} of {len(same):,} ranges differ from their "
            "checksums in the index; restore the file"
        )


def find_folder(snapshot: Snapshot) -> Path:
    """Return the folder of a snapshot's checksums on this node; it may not exist."""
    return snapshot.store.folder / CHECKSUMS / snapshot.digest
