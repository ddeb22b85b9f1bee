"""Descriptions of the sources of a snapshot, and of their columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from megablend.arrays import Int64s
from megablend.config.read_spec import ReadSpec
from megablend.errors import DamagedCacheError
from megablend.formats import get_format
from megablend.formats.base import Format
from megablend.index.tables.manifest import MANIFEST
from megablend.lazy import LazyItems, cached_property


@dataclass(frozen=True, kw_only=True)
class ColumnEntry:
    """An indexed column of a source: the source's tokens, or an extra column. Each column has its
    own rows in the file table."""

    source_name: str
    """Name of the source that the column belongs to."""
    read: ReadSpec
    """How the column is read, as far as the index records it."""
    files: range
    """Numbers of the column's files in the snapshot."""
    blocks: range
    """Numbers of the column's blocks in the snapshot."""
    tokens: int
    rows: int
    """Number of documents, including empty and null ones."""
    ends: int
    """Number of documents with tokens; -1 if documents were not counted."""
    root: str
    """Folder to which the names of the column's files are relative, as of the last build."""
    column_taken: str | None
    """The column in the data files, if known: the requested one, or the one that was detected."""

    @cached_property
    def kind(self) -> Format:
        """The format of the column's files."""
        return get_format(self.read.format or "")

    @property
    def format(self) -> str:
        """Name of the format of the column's files."""
        return self.read.format or ""

    @property
    def column(self) -> str | None:
        """Dotted path of the column in the data files, as the config requests it."""
        return self.read.column

    @property
    def documents(self) -> bool:
        """Whether documents were counted. If so, `rows` and `ends`, and the rows, ends and flags of
        the column's blocks, are exact."""
        return self.read.count_documents


@dataclass(frozen=True, kw_only=True)
class SourceEntry(ColumnEntry):
    """A source of a snapshot: the column that contains its tokens, and its extra columns."""

    extra_columns: tuple[ColumnEntry, ...]
    skipped: tuple[str, ...]
    """Paths that the last build left out because they could not be read."""

    @property
    def name(self) -> str:
        """The source's name."""
        return self.source_name

    def find_extra(self, column: str) -> ColumnEntry | None:
        """Return the extra column with this name, or None if the index does not contain it."""
        return next(
            (candidate for candidate in self.extra_columns if candidate.column == column), None
        )


class Sources(LazyItems[SourceEntry]):
    """The sources of a snapshot. The entry of a source is made when it is first needed; if there
    are thousands of sources, most entries are never needed.

    Attributes:
        names: [num_sources], names of the sources.
        reads: [num_sources], how each source is read (`SourceEntry.read`); sources that are read in
            the same way share an object.
        numbers: number of each source, by its name.
        formats: names of the formats of all sources' files.
    """

    def __init__(
        self, names: Sequence[str], reads: Sequence[ReadSpec], make: Callable[[int], SourceEntry]
    ) -> None:
        super().__init__(len(names), make)
        self.names = tuple(names)
        self.reads = tuple(reads)
        self.numbers = dict(zip(names, range(len(names)), strict=True))
        self.formats: set[str] = set(map(attrgetter("format"), reads))

    def find(self, name: str) -> SourceEntry | None:
        """Return the source with this name, or None if the snapshot does not contain it."""
        number = self.numbers.get(name)
        return None if number is None else self[number]


def make_columns(
    folder: Path,
    records: Sequence[Mapping[str, Any]],
    last_build: Mapping[str, Any],
    measure: Callable[[], tuple[Int64s, Int64s]],
) -> tuple[Sources, Sequence[ColumnEntry]]:
    """Make the entries of the sources in a manifest. The manifest lists the sources first, then the
    extra columns. The field `extra_of` of an extra column is the name of its source.

    Args:
        folder: folder of the snapshot, for messages.
        records: the manifest's `sources`.
        last_build: results of the last build; see `manifest.read_roots`.
        measure: a function that returns, for each record, its first block and the block after its
            last one, int64 [num_records, 2]; and its tokens, rows and ends, int64 [3, num_records].
            It is called when an entry is first needed.

    Returns: the sources; and all columns in the order of the manifest: column i of the first
        num_sources belongs to source i.
    Raises: CacheError if an extra column belongs to no source, or precedes a source.
    """
    names = [record["name"] for record in records if record.get("extra_of") is None]
    reads = ReadSpec.from_records(records)
    extra_of_source = dict[str, list[ColumnEntry]]()
    measured = cache(measure)

    def make_fields(number: int, block_bounds: Int64s, counts: Int64s) -> dict[str, Any]:
        record = records[number]
        name = record["name"]
        return {
            "read": reads[number],
            "files": range(record["first_file"], record["first_file"] + record["num_files"]),
            "blocks": range(*block_bounds[number].tolist()),
            "tokens": int(counts[0, number]),
            "rows": record["rows"],
            "ends": int(counts[2, number]) if record["documents"] else -1,
            "root": last_build["roots"][name],
            "column_taken": record["column"] or last_build.get("columns", {}).get(name),
        }

    def make_source(number: int) -> SourceEntry:
        name = names[number]
        skipped = tuple(last_build.get("skipped", {}).get(name, ()))
        columns = tuple(extra_of_source.get(name, ()))
        return SourceEntry(
            source_name=name,
            extra_columns=columns,
            skipped=skipped,
            **make_fields(number, *measured()),
        )

    sources = Sources(names, reads[: len(names)], make_source)
    extra_columns = list[ColumnEntry]()
    for number in range(len(names), len(records)):
        owner = records[number].get("extra_of")
        if owner not in sources.numbers:  # None: a source after an extra column
            raise DamagedCacheError.of(
                f"{folder / MANIFEST}: damaged (extra columns do not follow the sources they belong to)"
            )
        column = ColumnEntry(source_name=owner, **make_fields(number, *measured()))
        extra_of_source.setdefault(owner, []).append(column)
        extra_columns.append(column)
    # If there are no extra columns, no entry is needed yet
    return sources, (*sources, *extra_columns) if extra_columns else sources
