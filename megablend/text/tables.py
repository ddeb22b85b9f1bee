"""Text in tables: Parquet, and Arrow files and streams."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from megablend.errors import REWRITE_REMEDY, ConfigError, CorruptFileError, did_you_mean
from megablend.storage.base import Storage
from megablend.storage.file_object import FileObject
from megablend.text.documents import BadDocument, Document, Place, Portion, TextFields
from megablend.text.lines import BATCH_BYTES

PARQUET = (".parquet", ".pq")
ARROW = (".arrow", ".feather", ".ipc", ".arrows")
_ROWS = 256
"""Rows that are decoded together."""
_TEXTS = ("string", "large_string", "string_view")


def is_table(path: str) -> bool:
    """Whether a file is a table, by its name."""
    return path.lower().endswith((*PARQUET, *ARROW))


def open_file(storage: Storage, path: str, size: int) -> Any:
    """A file of a storage for pyarrow."""
    read = partial(storage.read, path)
    return pa.PythonFile(FileObject(size, read), "r")


class TableFile:
    """A table of documents, in groups of rows that are read by themselves.

    Raises: CorruptFileError if it cannot be read; ConfigError without such a column.
    """

    def __init__(self, storage: Storage, path: str, size: int, fields: TextFields) -> None:
        self.path = path
        self._fields = fields
        source = open_file(storage, path, size)
        try:
            if path.lower().endswith(PARQUET):
                import pyarrow.parquet as pq  # few need it, and it takes some 50 ms

                self._file: Any = pq.ParquetFile(source)
                schema = self._file.schema_arrow
                self._groups = [self._measure(i) for i in range(self._file.metadata.num_row_groups)]
            else:
                self._file, self._batches = _open_arrow(source)
                schema = self._file.schema
                # Of a stream nothing is known before it is read: it is one part
                self._groups = [(0, 0)] * (1 if self._batches is None else self._batches)
        except pa.ArrowException as error:
            raise self._damaged(error) from error
        self._text = self._find_column(schema, fields.text)
        self._key: list[str] | None = None
        if fields.key is not None:
            with contextlib.suppress(ConfigError):  # as of a line, it may be missing
                self._key = self._find_column(schema, fields.key)
        self._check_type(schema)

    def _measure(self, group: int) -> tuple[int, int]:
        found = self._file.metadata.row_group(group)
        columns = (found.column(i) for i in range(found.num_columns))
        size = sum(
            c.total_uncompressed_size for c in columns if c.path_in_schema == self._fields.text
        )
        return size, found.num_rows

    def plan(self, part_bytes: int) -> list[range]:
        """Groups of rows that make a part each: a new one where `part_bytes` of text are exceeded.
        Of Arrow files, whose sizes are not recorded, all are one part."""
        parts = list[range]()
        first = 0
        held = 0
        for i, (size, _) in enumerate(self._groups):
            if i > first and held + size > part_bytes:
                parts.append(range(first, i))
                first = i
                held = 0
            held += size
        return [*parts, range(first, len(self._groups))]

    def count_bytes(self, groups: range) -> int:
        """About how many bytes of text there are in groups; 0 where it is not known."""
        return sum(self._groups[i][0] for i in groups)

    def row_of(self, groups: range) -> int:
        """The first row of groups. Only the first one's is known of Arrow, which is one part."""
        return sum(rows for _, rows in self._groups[: groups.start])

    def read(self, groups: range, digest: blake2b) -> Iterator[Portion]:
        """The documents of groups of rows; their texts, lengths and keys are added to `digest`."""
        row = self.row_of(groups)
        first = row
        found: list[Document | BadDocument] = []
        size = 0
        try:
            for texts, keys in self._iterate(groups):
                for text, key in zip(texts, keys, strict=True):
                    place = Place(row, row - first)
                    each = self._check_text(text, None if key is None else str(key), place)
                    length = 0 if text is None else len(text)
                    digest.update(struct.pack("<q?", length, text is None))
                    digest.update(b"" if text is None else text)
                    digest.update(repr(key).encode())
                    found.append(each)
                    size += length
                    row += 1
                    if size >= BATCH_BYTES:
                        yield Portion.gather(found, size, len(found))
                        found = []
                        size = 0
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, ValueError) and not isinstance(error, pa.ArrowException):
                raise  # of the storage
            raise self._damaged(error) from error
        if found:
            yield Portion.gather(found, size, len(found))

    def _check_text(
        self, text: bytes | None, key: str | None, place: Place
    ) -> Document | BadDocument:
        if text is None:
            return BadDocument("no text", f"has null in {self._fields.text!r}, no text", place)
        if len(text) > self._fields.max_bytes:
            return self._fields.refuse_long(len(text), place)
        try:
            return Document(text.decode(), key, place)
        except UnicodeDecodeError as error:
            reason = f"is not UTF-8 at byte {error.start} of its text"
            return BadDocument("invalid UTF-8", reason, place)

    def _iterate(self, groups: range) -> Iterator[tuple[list[bytes | None], list[Any]]]:
        """Texts, as bytes, some of which may not be UTF-8, and keys."""
        names = [name for name in (self._fields.text, self._fields.key) if name is not None]
        for whole in self._read_batches(groups, names):
            for first in range(0, whole.num_rows, _ROWS):
                batch = whole.slice(first, _ROWS)
                column = _pick(batch, self._text)
                if pa.types.is_dictionary(column.type):
                    column = column.dictionary_decode()
                texts = column.cast(pa.large_binary()).to_pylist()
                keys = _pick(batch, self._key).to_pylist() if self._key else [None] * len(texts)
                yield texts, keys

    def _read_batches(self, groups: range, names: list[str]) -> Iterator[Any]:
        if self.path.lower().endswith(PARQUET):
            found = self._file.iter_batches(_ROWS, row_groups=list(groups), columns=names)
        elif self._batches is None:
            found = iter(self._file)
        else:
            found = map(self._file.get_batch, groups)
        yield from found

    def _find_column(self, schema: Any, dotted: str) -> list[str]:
        """The names of a column and of the structs around it, from outside; a column whose own name
        has dots goes first. Raises: ConfigError if there is none."""
        if dotted in schema.names:
            return [dotted]
        names = dotted.split(".")
        known = schema.names
        for i, name in enumerate(names):
            if name not in known:
                hint = did_you_mean(name, known, before="; ")
                raise ConfigError(
                    f"{self.path}: has no column {dotted!r} (it has: "
                    f"{', '.join(known)}){hint or '; set `text` to the column that holds the text'}"
                )
            type_ = _type_of(schema, names[: i + 1])
            known = [each.name for each in type_] if pa.types.is_struct(type_) else []
        return names

    def _check_type(self, schema: Any) -> None:
        """Raises: ConfigError if the texts are no strings."""
        found = _type_of(schema, self._text)
        value = found.value_type if pa.types.is_dictionary(found) else found
        if str(value) not in _TEXTS:
            is_binary = pa.types.is_binary(value) or pa.types.is_large_binary(value)
            remedy = (
                "cast it to string" if is_binary else "set `text` to the column that holds the text"
            )
            raise ConfigError(
                f"{self.path}: column {self._fields.text!r} has type {found}, expected text (string); {remedy}"
            )

    def _damaged(self, error: Exception) -> CorruptFileError:
        return CorruptFileError(
            self.path,
            f"cannot be read ({error}): truncated or damaged; {REWRITE_REMEDY}, or set `on_unreadable: skip`",
        )


def _open_arrow(source: Any) -> tuple[Any, int | None]:
    """A reader of an Arrow file with its number of batches, or of a stream with None."""
    magic = source.read(6)
    source.seek(0)
    if magic == b"ARROW1":
        found = pa.ipc.open_file(source)
        return found, found.num_record_batches
    return pa.ipc.open_stream(source), None


def _type_of(schema: Any, names: Sequence[str]) -> Any:
    """The type of a column, see `TableFile._find_column`."""
    found = schema
    for name in names:
        found = found.field(name).type
    return found


def _pick(batch: Any, names: Sequence[str]) -> Any:
    outer, *inner = names
    found = batch.column(outer)
    for each in inner:
        found = pc.struct_field(found, each)
    return found
