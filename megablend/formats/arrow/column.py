"""Which of a record batch's buffers belong to the token column.

A record batch lists one node (length, number of nulls) for each field and child field, and their
buffers, in the order of a walk of the schema that visits parents first.

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
"""Types of numbers that are not tokens, by numpy name."""
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")


class _UnknownLayoutError(Exception):
    """A type whose buffers are not known; its argument is the type."""


class Level(NamedTuple):
    """A field on the path from the root to the tokens."""

    node: int
    buffer: int
    """First buffer (the validity bitmap), if no view column came before."""
    views: int
    """View columns before it: the batch states how many buffers each of them has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """The token column's position in each record batch."""

    levels: tuple[Level, ...]
    """Structs around the column, the column, and the elements where it is one of lists."""
    kind: str
    """flat, list, large_list, fixed_size_list"""
    width: int
    """Elements a row of a fixed_size_list; 0 elsewhere."""
    token_dtype: str
    num_nodes: int
    """Number of nodes of the whole batch."""
    num_buffers: int
    """Number of buffers of the whole batch, without the data buffers of view columns."""

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {**asdict(self), "levels": [list(level) for level in self.levels]}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Column:
        """The inverse of to_json."""
        return cls(**{**value, "levels": tuple(Level(*level) for level in value["levels"])})


class _Field(NamedTuple):
    name: str
    type: Any
    level: Level


def find_column(
    path: str, column: str | None, schema: pa.Schema, *, numbers: bool = False
) -> tuple[str, Column]:
    """The token column of a schema, by its dotted path; with `numbers`, one of numbers of any kind.

    Raises: ConfigError (no such column, several to choose from, or not of integers or numbers);
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
            end = _behind(field.type, end)
    except UnicodeDecodeError as error:
        raise CorruptFileError(
            path, f"footer: the name of a column is not UTF-8: {error}"
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
    if kind := _list_kind(token):
        own_buffers = 1 if kind == "fixed_size_list" else 2
        levels.append(Level(last.node + 1, last.buffer + own_buffers, last.views))
    return chosen, Column(
        levels=tuple(levels),
        kind=kind or "flat",
        width=token.list_size if kind == "fixed_size_list" else 0,
        token_dtype=_dtype(_storage(token.value_type) if kind else token),
        num_nodes=end.node,
        num_buffers=end.buffer,
    )


def _walk(
    name: str, kind: Any, level: Level, above: tuple[_Field, ...]
) -> Iterator[tuple[_Field, ...]]:
    """Each field that a dotted path can refer to, with its parents."""
    chain = (*above, _Field(name, kind, level))
    yield chain
    stored = _storage(kind)
    if types.is_struct(stored):
        place = Level(level.node + 1, level.buffer + 1, level.views)
        for i in range(stored.num_fields):
            child = stored.field(i)
            yield from _walk(child.name, child.type, place, chain)
            place = _behind(child.type, place)


def _behind(kind: Any, level: Level) -> Level:
    """The position of the field that follows one of type `kind` at `level`.
    Raises: _UnknownLayoutError."""
    stored = _storage(kind)
    node = level.node + 1
    buffer = level.buffer
    views = level.views
    if (
        types.is_dictionary(stored)
        or types.is_primitive(stored)
        or types.is_boolean(stored)
        or types.is_decimal(stored)
    ):
        return Level(node, buffer + 2, views)
    if types.is_fixed_size_binary(stored):
        return Level(node, buffer + 2, views)
    if (
        types.is_binary(stored)
        or types.is_string(stored)
        or types.is_large_binary(stored)
        or types.is_large_string(stored)
    ):
        return Level(node, buffer + 3, views)
    if str(stored) in ("string_view", "binary_view"):
        return Level(node, buffer + 2, views + 1)
    if types.is_null(stored):
        return Level(node, buffer, views)
    if types.is_struct(stored) or types.is_fixed_size_list(stored):
        place = Level(node, buffer + 1, views)
    elif types.is_list(stored) or types.is_large_list(stored) or types.is_map(stored):
        place = Level(node, buffer + 2, views)
    else:
        raise _UnknownLayoutError(str(stored))
    for i in range(stored.num_fields):
        place = _behind(stored.field(i).type, place)
    return place


def _dtype(element: Any) -> str:
    """numpy name of a type."""
    return OTHERS.get(str(element), str(element))


def _problem(kind: Any, *, numbers: bool) -> str | None:
    """Why a column of this type cannot hold tokens, or numbers; None if it can."""
    stored = _storage(kind)
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
    """What to do about lists of lists of integers; "" for elements of another type."""
    if not _list_kind(element):
        return ""
    while _list_kind(element):
        element = _storage(element.value_type)
    if str(element) == "uint64":
        return f"; {UINT64_REMEDY}; {NESTED_REMEDY}"
    return f"; {NESTED_REMEDY}" if str(element) in INTEGERS else ""


def _list_kind(stored: Any) -> str | None:
    if types.is_list(stored):
        return "list"
    if types.is_large_list(stored):
        return "large_list"
    return "fixed_size_list" if types.is_fixed_size_list(stored) else None


def _storage(kind: Any) -> Any:
    """What an extension type is stored as; any other type is itself."""
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
