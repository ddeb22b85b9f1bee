"""Tables of listed objects, made from the Arrow tables that obstore returns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megablend.arrays import Bools, Int64s
from megablend.storage.file_table import FileTable, Texts, TextsBuilder
from megablend.storage.objects.listing import matches_pattern
from megablend.storage.objects.object_version import ObjectVersion


class ObjectTable(NamedTuple):
    """A table of objects of a bucket, with one row for each object."""

    paths: Texts
    """The location of each object."""
    sizes: Int64s
    """The size of each object in bytes (int64 [n])."""
    etags: Texts
    """The etag of each object; see `ObjectVersion.etag`."""
    modified: Int64s
    """The time of the last modification of each object, in seconds since 1970 (int64 [n])."""
    matches: Bools
    """Whether the key of each object matches the pattern (bool [n])."""

    @classmethod
    def of_arrow(cls, listed: Any, root: str, pattern: str) -> ObjectTable:
        """Return a table made from obstore's metadata of objects.

        Args:
            listed: an Arrow table with columns `path`, `size`, `e_tag` and `last_modified`.
            root: the location of the bucket.
            pattern: the pattern of keys.
        """
        # Imported here, since processes that only read local files do not need it
        import pyarrow as pa
        from pyarrow import compute as pc

        rows = pa.table(listed)
        keys = rows["path"].cast(pa.string())
        etags = pc.fill_null(rows["e_tag"].cast(pa.string()), "")
        # As in `normalise_etag`
        trimmed = pc.utf8_trim(pc.utf8_trim_whitespace(etags), '"')
        etags = pc.if_else(pc.starts_with(etags, "W/"), "", trimmed)
        modified = rows["last_modified"].cast(pa.timestamp("s", "UTC"), safe=False).cast(pa.int64())
        matches = (matches_pattern(key, pattern) for key in keys.to_pylist())
        return cls(
            _make_texts(pc.binary_join_element_wise(f"{root}/", keys, "")),
            rows["size"].cast(pa.int64()).to_numpy(),
            _make_texts(etags),
            np.maximum(modified.to_numpy(), 0),
            np.fromiter(matches, np.bool_, len(keys)),
        )

    def take(self, rows: npt.NDArray[Any]) -> ObjectTable:
        """Return a table with only the given rows."""
        return ObjectTable(
            self.paths.take(rows),
            self.sizes[rows],
            self.etags.take(rows),
            self.modified[rows],
            self.matches[rows],
        )

    def list_versions(self) -> list[ObjectVersion]:
        """Return the version of each object."""
        etags = self.etags.list_all()
        facts = zip(self.sizes.tolist(), etags, self.modified.tolist(), strict=True)
        return [ObjectVersion(*each) for each in facts]

    def as_files(self) -> FileTable:
        """Return the objects as a table of files."""
        etags = self.etags
        without = np.flatnonzero(etags.begins == etags.stops)
        if len(without):
            builder = TextsBuilder()
            builder.extend(etags)
            for modified in self.modified[without].tolist():
                builder.append(ObjectVersion(0, "", modified).stat.etag)
            rows = np.arange(len(self.sizes))
            rows[without] = len(rows) + np.arange(len(without))
            etags = builder.build().take(rows)
        return FileTable(self.paths, self.sizes, etags)


class ObjectTableBuilder:
    """A builder of a table of objects. It keeps only one copy of the rows in memory."""

    def __init__(self) -> None:
        self._paths = TextsBuilder()
        self._etags = TextsBuilder()
        self._others = (bytearray(), bytearray(), bytearray())

    def extend(self, table: ObjectTable) -> None:
        """Add the rows of another table."""
        self._paths.extend(table.paths)
        self._etags.extend(table.etags)
        others = (table.sizes, table.modified, table.matches)
        for column, added in zip(self._others, others, strict=True):
            column += added.data

    def build(self) -> ObjectTable:
        """Return the table. Nothing may be added afterwards."""
        sizes, modified, matches = self._others
        return ObjectTable(
            self._paths.build(),
            np.frombuffer(sizes, np.int64),
            self._etags.build(),
            np.frombuffer(modified, np.int64),
            np.frombuffer(matches, np.bool_),
        )


def join_tables(parts: Iterable[ObjectTable]) -> ObjectTable:
    """Return the rows of several tables as one table."""
    builder = ObjectTableBuilder()
    for each in parts:
        builder.extend(each)
    return builder.build()


def _make_texts(column: Any) -> Texts:
    """Convert an Arrow column to texts. The bytes are copied, since one column of a batch keeps the
    memory of all columns alive."""
    builder = TextsBuilder()
    for chunk in column.chunks:
        _, ends, letters = chunk.buffers()
        ends = np.frombuffer(ends, np.int32)[chunk.offset : chunk.offset + len(chunk) + 1]
        own = np.frombuffer(letters or b"", np.uint8)[ends[0] : ends[-1]]
        places: Int64s = ends.astype(np.int64) - ends[0]
        builder.extend(Texts(own, places[:-1], places[1:]))
    return builder.build()
