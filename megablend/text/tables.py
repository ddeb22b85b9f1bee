"""Text in tables: Parquet files, and Arrow files and streams."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any
from zoneinfo import ZoneInfoNotFoundError

import pyarrow as pa
import pyarrow.compute as pc

from megablend.errors import (
    REWRITE_REMEDY,
    ConfigError,
    CorruptFileError,
    DataError,
    ResourceError,
    did_you_mean,
)
from megablend.storage.base import Storage
from megablend.storage.file_object import FileObject
from megablend.text.documents import BadDocument, Document, Place, Portion, TextFields
from megablend.text.lines import BATCH_BYTES

PARQUET = (".parquet", ".pq")
ARROW = (".arrow", ".feather", ".ipc", ".arrows")
_ROWS = 256
"""The number of rows that are decoded at a time."""
_TEXT_TYPES = {"string": "binary", "large_string": "large_binary", "string_view": "binary_view"}
"""The types of text columns -> the type of bytes with the same layout."""
_REMEDY = f"{REWRITE_REMEDY}, or set `on_unreadable: skip`"


class _MissingColumnError(ConfigError):
    """The error for a table that has no column with the requested name."""


def is_table(path: str) -> bool:
    """Return whether a file is a table, judging by its name."""
    return path.lower().endswith((*PARQUET, *ARROW))


def open_file(storage: Storage, path: str, size: int) -> Any:
    """Return a file of a storage as a file object for pyarrow."""
    read = partial(storage.read, path)
    return pa.PythonFile(FileObject(size, read), "r")


@contextlib.contextmanager
def reporting_damage(path: str, remedy: str) -> Iterator[None]:
    """Raise pyarrow's errors about a file as CorruptFileError. Errors of the storage and of the
    operating system are passed on unchanged."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeError) as error:
        # pyarrow raises OSError too, without an errno, and UnicodeError for damaged names
        is_damage = getattr(error, "errno", None) is None
        if isinstance(error, DataError | MemoryError) or not is_damage:
            raise
        reason = " ".join(str(error).split())  # a message may have several lines
        raise CorruptFileError(
            path, f"cannot be read ({reason}); it is truncated or damaged: {remedy}"
        ) from error


class TableFile:
    """A table of documents in a file. Its rows are in groups that can be read separately.

    Raises: CorruptFileError if the file cannot be read; ConfigError if it lacks the text column.
    """

    def __init__(self, storage: Storage, path: str, size: int, fields: TextFields) -> None:
        self.path = path
        self._fields = fields
        self._key: list[str] | None = None
        source = open_file(storage, path, size)
        with reporting_damage(path, _REMEDY):
            if path.lower().endswith(PARQUET):
                import pyarrow.parquet as pq  # few processes need it, and it takes some 50 ms

                self._file: Any = pq.ParquetFile(source)
                schema = self._file.schema_arrow
                metadata = self._file.metadata
                groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
                self._group_rows = [group.num_rows for group in groups]
                self._group_bytes = [_count_text_bytes(group, fields.text) for group in groups]
            else:
                self._file, self._num_batches = _open_arrow(source)
                schema = self._file.schema
                # Sizes of batches are not recorded; a stream counts as one group
                num_groups = 1 if self._num_batches is None else self._num_batches
                self._group_rows = [0] * num_groups
                self._group_bytes = [0] * num_groups
            self._text = self._find_column(schema, fields.text)
            if fields.key is not None:
                # A table may lack the key, as a line may
                with contextlib.suppress(_MissingColumnError):
                    self._key = self._find_column(schema, fields.key)
            self._check_type(schema)

    def plan(self, part_bytes: int) -> list[range]:
        """Divide the groups of rows into parts with at most `part_bytes` of text; a larger group is
        a part of its own. An Arrow file does not record sizes, so all its groups are in one
        part."""
        parts = list[range]()
        first = 0
        part_size = 0
        for i, size in enumerate(self._group_bytes):
            if i > first and part_size + size > part_bytes:
                parts.append(range(first, i))
                first = i
                part_size = 0
            part_size += size
        return [*parts, range(first, len(self._group_bytes))]

    def count_bytes(self, groups: range) -> int:
        """Return the approximate number of bytes of text in the given groups; 0 if the sizes are
        unknown."""
        return sum(self._group_bytes[i] for i in groups)

    def row_of(self, groups: range) -> int:
        """Return the number of the first row of a part, given its groups. It is 0 for an Arrow
        file, which has only one part."""
        return sum(self._group_rows[: groups.start])

    def read(self, groups: range, digest: blake2b) -> Iterator[Portion]:
        """Read the documents of the given groups, and add their texts, lengths and keys to
        `digest`."""
        row = self.row_of(groups)
        first = row
        results: list[Document | BadDocument] = []
        size = 0
        with reporting_damage(self.path, _REMEDY):
            for texts, keys in self._iterate(groups):
                for text, key in zip(texts, keys, strict=True):
                    place = Place(row, row - first)
                    results.append(self._check_text(text, None if key is None else str(key), place))
                    data = text or b""
                    digest.update(struct.pack("<q?", len(data), text is None))
                    digest.update(data)
                    digest.update(repr(key).encode())
                    size += len(data)
                    row += 1
                    if size >= BATCH_BYTES:
                        yield Portion.gather(results, size, len(results))
                        results = []
                        size = 0
        if results:
            yield Portion.gather(results, size, len(results))

    def _check_text(
        self, text: bytes | None, key: str | None, place: Place
    ) -> Document | BadDocument:
        """Return the document of a row, or a bad document if its text cannot be read."""
        if text is None:
            return BadDocument("no text", f"has null in {self._fields.text!r}, not a string", place)
        if len(text) > self._fields.max_bytes:
            return self._fields.refuse_long(len(text), place)
        try:
            return Document(text.decode(), key, place)
        except UnicodeDecodeError as error:
            reason = f"is not valid UTF-8 at byte {error.start} of the text"
            return BadDocument("invalid UTF-8", reason, place)

    def _iterate(self, groups: range) -> Iterator[tuple[list[bytes | None], list[Any]]]:
        """Yield the texts and the keys of a few rows at a time. Texts are returned as bytes, which
        may be invalid UTF-8."""
        names = [name for name in (self._fields.text, self._fields.key) if name is not None]
        for batch in self._read_batches(groups, names):
            text_column = _pick(batch, self._text)
            key_column = _pick(batch, self._key) if self._key else pa.nulls(batch.num_rows)
            if pa.types.is_dictionary(text_column.type):
                # Arrow decodes no dictionary of views
                values = text_column.dictionary.cast(pa.large_binary())
                text_column = pa.DictionaryArray.from_arrays(text_column.indices, values)
            for first in range(0, batch.num_rows, _ROWS):
                rows = text_column.slice(first, _ROWS)
                if pa.types.is_dictionary(rows.type):
                    rows = rows.dictionary_decode()
                texts = rows.cast(pa.large_binary()).to_pylist()
                yield texts, _list_keys(self.path, key_column.slice(first, _ROWS))

    def _read_batches(self, groups: range, names: list[str]) -> Iterator[Any]:
        """Return the record batches of the given groups; for Parquet, only with the columns
        `names`."""
        if self.path.lower().endswith(PARQUET):
            return iter(self._file.iter_batches(_ROWS, row_groups=list(groups), columns=names))
        if self._num_batches is None:
            return iter(self._file)
        return map(self._file.get_batch, groups)

    def _find_column(self, schema: Any, dotted: str) -> list[str]:
        """Return the path of a column: the names of the structs around it, the outermost first, and
        its own name. A column whose own name contains the dots takes precedence.

        Raises: ConfigError if there is no such column, or several.
        """
        names = [dotted] if dotted in schema.names else dotted.split(".")
        present = schema.names
        for i, name in enumerate(names):
            if present.count(name) > 1:
                raise ConfigError(
                    f"{self.path}: has {present.count(name)} columns {'.'.join(names[: i + 1])!r}, expected one; "
                    "rename the others"
                )
            if name not in present:
                hint = did_you_mean(name, present, before="; ")
                raise _MissingColumnError(
                    f"{self.path}: has no column {dotted!r} (it has: "
                    f"{', '.join(present)}){hint or '; set `text` to the column that holds the text'}"
                )
            type_ = _type_of(schema, names[: i + 1])
            present = [field.name for field in type_] if pa.types.is_struct(type_) else []
        return names

    def _check_type(self, schema: Any) -> None:
        """Check that the text column holds strings. Raises: ConfigError."""
        column_type = _type_of(schema, self._text)
        value = column_type.value_type if pa.types.is_dictionary(column_type) else column_type
        if str(value) not in _TEXT_TYPES:
            is_binary = pa.types.is_binary(value) or pa.types.is_large_binary(value)
            remedy = (
                "cast it to string" if is_binary else "set `text` to the column that holds the text"
            )
            raise ConfigError(
                f"{self.path}: column {self._fields.text!r} has type {column_type}, expected text (string); {remedy}"
            )


def _count_text_bytes(group: Any, text: str) -> int:
    """Return the uncompressed size of the text column in a row group of a Parquet file."""
    columns = [group.column(i) for i in range(group.num_columns)]
    return sum(
        column.total_uncompressed_size for column in columns if column.path_in_schema == text
    )


def _open_arrow(source: Any) -> tuple[Any, int | None]:
    """Open an Arrow file or stream. Returns: the reader, and the number of record batches, which is
    None for a stream."""
    magic = source.read(6)
    source.seek(0)
    if magic == b"ARROW1":
        reader = pa.ipc.open_file(source)
        return reader, reader.num_record_batches
    return pa.ipc.open_stream(source), None


def _type_of(schema: Any, names: Sequence[str]) -> Any:
    """Return the type of a column, given the names from `TableFile._find_column`."""
    type_ = schema
    for name in names:
        type_ = type_.field(name).type
    return type_


def _pick(batch: Any, names: Sequence[str]) -> Any:
    """Return a column of a record batch, given the names from `TableFile._find_column`.

    Raises: ArrowInvalid if offsets, or the indices of a dictionary, point outside their data:
        reading such a column may crash the process.
    """
    batch.validate()
    outer, *inner = names
    column = batch.column(outer)
    for name in inner:
        column = pc.struct_field(column, name)
    values = column
    if pa.types.is_dictionary(column.type):
        values = column.dictionary
        pa.DictionaryArray.from_arrays(column.indices, values)  # this checks the indices
    as_bytes = _TEXT_TYPES.get(str(values.type))
    # Checked as bytes: a text that is not UTF-8 is a bad document, not a damaged file
    (values if as_bytes is None else values.view(as_bytes)).validate(full=True)
    return column


def _list_keys(path: str, column: Any) -> list[Any]:
    """Return the keys in a column as Python values.

    Values that only pandas supports (nanoseconds) or that Python does not support (years beyond
    9999) are returned as strings, as Arrow writes them. Text that is not UTF-8 is returned as
    bytes.

    Raises: ResourceError if the keys are times of a zone that this machine does not know.
    """
    type_ = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    zone = getattr(type_, "tz", None)
    try:
        if getattr(type_, "unit", None) == "ns":
            column = column.cast(pa.string())
        try:
            return column.to_pylist()  # type: ignore[no-any-return]
        except (ValueError, OverflowError):
            return [_read_key(value) for value in column]
    except (pa.ArrowInvalid, ZoneInfoNotFoundError) as error:
        if zone is None:
            raise
        raise ResourceError(
            f"{path}: its keys are times in the zone {zone!r}, which this machine does not know\n"
            "install the system's time zones (Debian and Ubuntu: `apt install tzdata`), or leave out `key`"
        ) from error


def _read_key(value: Any) -> Any:
    """Return one key as a Python value; see `_list_keys`."""
    try:
        return value.as_py()
    except UnicodeDecodeError:
        return value.cast(pa.binary()).as_py()
    except (ValueError, OverflowError):
        return value.cast(pa.string()).as_py()
