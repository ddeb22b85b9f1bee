"""The positions of the token column's nodes and buffers in a record batch.

A record batch lists one node (length, number of nulls) for each field and child field, and all
their buffers. The order is that of the schema, in which a parent comes before its children.

Source: Arrow columnar format, "RecordBatch message", "Buffer listing".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import types

from megablend.errors import CorruptFileError, UnsupportedFileError
from megablend.formats.choose import NESTED_REMEDY, UINT64_REMEDY, choose_column

OTHERS = {"bool": "bool", "halffloat": "float16", "float": "float32", "double": "float64"}
"""The numpy names of numeric types that tokens cannot have, by their Arrow names."""
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")


class _UnknownLayoutError(Exception):
    """Raised for a type whose number of buffers is unknown; its argument is the type."""


class Level(NamedTuple):
    """A field on the path from the root to the tokens."""

    node: int
    """Index of the field's node among the nodes of a batch."""
    buffer: int
    """Index of the field's first buffer (the validity bitmap), not counting data buffers of earlier
    view columns."""
    views: int
    """Number of earlier view columns; only a batch states how many data buffers each has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """The type of the token column, and its position in each record batch."""

    levels: tuple[Level, ...]
    """The structs around the column, the column, and, if it contains lists, their elements."""
    kind: str
    """One of flat, list, large_list and fixed_size_list."""
    width: int
    """Number of elements in each row of a fixed_size_list; 0 for other kinds."""
    token_dtype: str
    num_nodes: int
    """Number of nodes of the whole batch."""
    num_buffers: int
    """Number of buffers of the whole batch, without the data buffers of view columns."""

    def to_json(self) -> dict[str, Any]:
        """Convert to a JSON object."""
        return {**asdict(self), "levels": [list(level) for level in self.levels]}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Column:
        """Convert from a JSON object that `to_json` made."""
        return cls(**{**value, "levels": tuple(Level(*level) for level in value["levels"])})


class _Field(NamedTuple):
    """A field that a dotted path can refer to."""

    name: str
    type: Any
    level: Level


def find_column(
    path: str, column: str | None, schema: pa.Schema, *, numbers: bool = False
) -> tuple[str, Column]:
    """Find the token column of a schema, and return its dotted path and its position.

    Args:
        column: the dotted path in the config; None chooses the only plausible column.
        numbers: whether numbers of any kind are accepted, not only integers.

    Raises: ConfigError (no such column, several to choose from, or of another type);
        UnsupportedFileError (a column has a type whose buffers are not known); CorruptFileError (a
        name is not UTF-8).
    """
    fields: dict[str, tuple[_Field, ...]] = {}
    end = Level(0, 0, 0)
    try:
        for field in schema:
            for chain in _walk(field.name, field.type, end, ()):
                name = ".".join(part.name for part in chain)
                if name in fields:
                    raise UnsupportedFileError(path, f"has two columns named {name}; rename one")
                fields[name] = chain
            end = _level_after(field.type, end)
    except UnicodeDecodeError as error:
        raise CorruptFileError(
            path, f"a column's name is not valid UTF-8 ({error}); rename it"
        ) from error
    except _UnknownLayoutError as error:
        raise UnsupportedFileError(
            path,
            f"column {field.name} has type {error}, which is not supported; write it as a list, or leave it out of "
            "the file if it has no tokens",
        ) from error
    problems = {name: _problem(chain[-1].type, numbers=numbers) for name, chain in fields.items()}
    lists = [name for name, chain in fields.items() if _list_kind(_storage(chain[-1].type))]
    chosen = choose_column(path, column, problems, lists, numbers=numbers)
    chain = fields[chosen]
    token = _storage(chain[-1].type)
    last = chain[-1].level
    levels = [part.level for part in chain]
    list_kind = _list_kind(token)
    if list_kind:
        own_buffers = 1 if list_kind == "fixed_size_list" else 2
        levels.append(Level(last.node + 1, last.buffer + own_buffers, last.views))
    return chosen, Column(
        levels=tuple(levels),
        kind=list_kind or "flat",
        width=token.list_size if list_kind == "fixed_size_list" else 0,
        token_dtype=_dtype(_storage(token.value_type) if list_kind else token),
        num_nodes=end.node,
        num_buffers=end.buffer,
    )


def _walk(
    name: str, arrow_type: Any, level: Level, above: tuple[_Field, ...]
) -> Iterator[tuple[_Field, ...]]:
    """Yield each field that a dotted path can refer to, after its parents."""
    chain = (*above, _Field(name, arrow_type, level))
    yield chain
    stored = _storage(arrow_type)
    if types.is_struct(stored):
        child_level = Level(level.node + 1, level.buffer + 1, level.views)
        for i in range(stored.num_fields):
            child = stored.field(i)
            yield from _walk(child.name, child.type, child_level, chain)
            child_level = _level_after(child.type, child_level)


def _level_after(arrow_type: Any, level: Level) -> Level:
    """Return the position of the field that follows a field of type `arrow_type` at `level`.
    Raises: _UnknownLayoutError."""
    stored = _storage(arrow_type)
    node, buffer, views = level
    if types.is_null(stored):
        return Level(node + 1, buffer, views)
    if str(stored) in ("string_view", "binary_view"):
        return Level(node + 1, buffer + 2, views + 1)
    # A union has different buffers in a batch than in an array
    has_known_fields = _list_kind(stored) or types.is_struct(stored) or types.is_map(stored)
    if types.is_union(stored) or (stored.num_fields and not has_known_fields):
        raise _UnknownLayoutError(str(stored))
    after = Level(node + 1, buffer + stored.num_buffers, views)
    for i in range(stored.num_fields):
        after = _level_after(stored.field(i).type, after)
    return after


def _dtype(element: Any) -> str:
    """Return the numpy name of a numeric type."""
    return OTHERS.get(str(element), str(element))


def _problem(arrow_type: Any, *, numbers: bool) -> str | None:
    """Return why a column of this type cannot hold tokens (or numbers, if `numbers` is true), or
    None if it can."""
    stored = _storage(arrow_type)
    element = _storage(stored.value_type) if _list_kind(stored) else stored
    if types.is_dictionary(element):
        return "is dictionary-encoded; decode it before writing (Array.dictionary_decode())"
    if str(element) == "uint64":
        return f"has type {stored}; {UINT64_REMEDY}"
    if str(element) not in INTEGERS and not (numbers and str(element) in OTHERS):
        kinds = f"integers{', floats, booleans' if numbers else ''}"
        return f"has type {stored}, expected {kinds} or lists of these{_nested_remedy(element)}"
    if types.is_fixed_size_list(stored) and stored.list_size < 1:
        return "contains lists of size 0"
    return None


def _nested_remedy(element: Any) -> str:
    """Return the remedy for a column of lists of lists of integers, or "" for other lists.
    `element` is the type of the elements of the outer lists."""
    if not _list_kind(element):
        return ""
    while _list_kind(element):
        element = _storage(element.value_type)
    if str(element) == "uint64":
        return f"; {UINT64_REMEDY}; {NESTED_REMEDY}"
    return f"; {NESTED_REMEDY}" if str(element) in INTEGERS else ""


def _list_kind(stored: Any) -> str | None:
    """Return the `Column.kind` of a list type, or None for other types."""
    if types.is_list(stored):
        return "list"
    if types.is_large_list(stored):
        return "large_list"
    return "fixed_size_list" if types.is_fixed_size_list(stored) else None


def _storage(arrow_type: Any) -> Any:
    """Return the storage type of an extension type; other types are returned unchanged."""
    return arrow_type.storage_type if isinstance(arrow_type, pa.BaseExtensionType) else arrow_type
