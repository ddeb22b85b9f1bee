"""Find the token column in a schema.

A list is three nested nodes in Parquet, `input_ids (LIST) / list (repeated) / element`. Users name
it as they see it in Arrow, `input_ids`, so a column's `name` omits the two inner nodes. All of
Arrow's kinds of lists (also large and fixed-size ones) are stored in the same way in Parquet: for
reading, only the two maximal levels matter.

Source: parquet-format, LogicalTypes.md ("Lists", with its rules for old writers),
    VariantShredding.md, and the Dremel paper's levels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from megablend.errors import ConfigError
from megablend.formats.choose import NESTED_REMEDY, UINT64_REMEDY, choose_column
from megablend.formats.parquet.metadata.names import Physical, Repetition, name_of
from megablend.formats.parquet.metadata.thrift import MalformedError, Struct, Structs

CONVERTED_INTEGERS = {
    11: "uint8",
    12: "uint16",
    13: "uint32",
    14: "uint64",
    15: "int8",
    16: "int16",
    17: "int32",
    18: "int64",
}
CONVERTED_LIST = 3
CONVERTED_MAPS = (1, 2)
LOGICAL_MAP = 2
LOGICAL_LIST = 3
LOGICAL_INTEGER = 10
LOGICAL_FLOAT16 = 15
TOKEN_DTYPES = ("int32", "int64", "uint16", "uint32", "int8", "int16", "uint8")
OTHER_DTYPES: dict[int, str] = {
    Physical.BOOLEAN: "bool",
    Physical.FLOAT: "float32",
    Physical.DOUBLE: "float64",
}
"""The numpy names of numeric types that tokens cannot have, by physical type."""
LIST_OF_LISTS = "is a list of lists"
"""Value of `Column.nesting` for a list of lists."""
IN_VARIANT = f"is part of a variant, whose other parts may hold some of its values; {NESTED_REMEDY}"
"""Value of `Column.nesting` for the typed values of a variant."""
FLOAT16 = "float16"
"""Value of `Column.kind` for a numeric type that is not supported."""
MAX_LEVEL = 127
"""Maximum level that is read, since levels are kept in bytes; no sensible schema is deeper."""
MAX_NESTED = 512
"""Maximum depth of groups, required ones included: the path of a column in a deep schema is
long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A leaf of the schema: the position of its chunks, and the meaning of its levels."""

    name: str
    """Dotted path, without the inner nodes of lists."""
    path: tuple[str, ...]
    """Names of all nodes from the root to the leaf."""
    ordinal: int
    """Index of the column among the leaves, and of its chunk in each row group."""
    physical: int
    """Physical type; see `Physical`."""
    dtype: str
    """numpy name of the values' dtype; "" if the values are not supported numbers."""
    max_def: int
    max_rep: int
    slot_def: int
    """The lowest definition level of an element of a list, null or not. Lower levels stand for null
    or empty lists. It is 0 in a flat column, in which every level stands for a value."""
    nesting: str = ""
    """Why the column's position in the schema excludes it as a token column, for messages; "" if
    the position does not exclude it."""
    kind: str = field(default="", compare=False)
    """The type of the column's values, for messages only."""

    def to_meta(self) -> dict[str, Any]:
        """Convert to a JSON object with all that a reader needs."""
        kept = ("name", "path", "ordinal", "physical", "dtype", "max_def", "max_rep", "slot_def")
        return {key: list(self.path) if key == "path" else getattr(self, key) for key in kept}

    @staticmethod
    def from_meta(meta: dict[str, Any]) -> Column:
        """Convert from a JSON object that `to_meta` made."""
        return Column(**{**meta, "path": tuple(meta["path"])})


@dataclass(slots=True)
class _Group:
    """A node on the path from the root to the current node."""

    name: str
    children_left: int
    """Number of children that have not been visited yet."""
    path: tuple[str, ...]
    """See Column."""
    names: tuple[str, ...]
    """Parts of the name of a Column: `path` without the inner nodes of lists."""
    max_def: int
    max_rep: int
    slot_def: int
    nesting: str
    """See Column; "" for lists of lists, too."""
    is_list: bool
    """Whether the node is the outer node of a list."""
    holds_element: bool
    """Whether the node is the repeated node of a list, and its child is the element."""


def leaves(schema: Sequence[Struct]) -> Iterator[Column]:
    """Yield the columns of a schema, given its SchemaElements in depth-first order. Raises:
    MalformedError."""
    if not schema:
        raise MalformedError("the schema is empty")
    root = _Group(
        name="",
        children_left=schema[0].count(5, "num_children", 0),
        path=(),
        names=(),
        max_def=0,
        max_rep=0,
        slot_def=0,
        nesting="",
        is_list=False,
        holds_element=False,
    )
    stack = [root]
    ordinal = 0
    for element in schema[1:]:
        while stack and stack[-1].children_left == 0:
            stack.pop()
        if not stack:
            raise MalformedError("the schema has more elements than its groups declare")
        if len(stack) > MAX_NESTED:
            raise MalformedError(f"the schema is nested deeper than {MAX_NESTED} groups")
        parent = stack[-1]
        parent.children_left -= 1
        node = _child(parent, element)
        if node.max_def > MAX_LEVEL:
            raise MalformedError(f"the schema is nested deeper than {MAX_LEVEL} levels")
        if node.children_left:
            stack.append(node)
        else:
            yield _column(node, element, ordinal)
            ordinal += 1
    if any(group.children_left for group in stack):
        raise MalformedError("the schema ends before its groups are complete")


@lru_cache(maxsize=16)
def _cached_leaves(schema: bytes, size: int) -> Sequence[Column]:
    """Return the columns of an encoded schema of `size` elements. They are cached, since thousands
    of files have the same schema."""
    return tuple(leaves(Structs(schema, 0, size)))


def _columns_of(schema: Sequence[Struct]) -> Sequence[Column]:
    if isinstance(schema, Structs):
        return _cached_leaves(schema.written(), len(schema))
    return list(leaves(schema))


def find_column(
    schema: Sequence[Struct], name: str | None, path: str, *, numbers: bool = False
) -> tuple[Column, int]:
    """Find the column called `name`, or the one that `choose_column` selects if `name` is None.

    Args:
        numbers: whether numbers of any kind are accepted, not only tokens.

    Returns: the column, and the number of leaves of the schema.
    Raises: ConfigError (no such column, several, or one of another type), MalformedError.
    """
    columns = _columns_of(schema)
    # The full path is also accepted as a name
    name_of_path = {".".join(column.path): column.name for column in columns}
    if name:
        name = name_of_path.get(name, name)
    problems = {column.name: _problem(column, numbers=numbers) for column in columns}
    lists = {column.name for column in columns if column.max_rep}
    chosen = choose_column(path, name, problems, lists, numbers=numbers)
    matching = [column for column in columns if column.name == chosen]
    if len(matching) > 1:
        raise ConfigError(f"{path}: {len(matching)} columns are named {chosen!r}; rename one")
    return matching[0], len(columns)


def _problem(column: Column, *, numbers: bool) -> str | None:
    """Return why a column cannot contain tokens (or numbers, if `numbers` is true), or None if it
    can."""
    is_uint64 = column.kind == "uint64"
    if column.nesting == LIST_OF_LISTS and (is_uint64 or column.dtype in TOKEN_DTYPES):
        uint64_remedy = f" of uint64; {UINT64_REMEDY}" if is_uint64 else ""
        return f"{column.nesting}{uint64_remedy}; {NESTED_REMEDY}"
    if column.nesting:
        return column.nesting
    if is_uint64:
        return f"has type {'list<uint64>' if column.max_rep else 'uint64'}; {UINT64_REMEDY}"
    dtypes = (*TOKEN_DTYPES, *OTHER_DTYPES.values()) if numbers else TOKEN_DTYPES
    if column.dtype in dtypes:
        return None
    hint = "; write it as float32" if numbers and column.kind == FLOAT16 else ""
    return f"has type {column.kind}, expected {'numbers' if numbers else 'integers'} ({', '.join(dtypes)}){hint}"


def _child(parent: _Group, element: Struct) -> _Group:
    """Make the node of a SchemaElement that is a child of `parent`. Raises: MalformedError."""
    name = element.text(4, "name of a schema element")
    repetition = element.integer(3, "repetition_type", Repetition.REQUIRED)
    if repetition not in Repetition._value2member_map_:
        raise MalformedError(f"column {name!r} has repetition type {repetition}")
    repeated = repetition == Repetition.REPEATED
    num_children = element.count(5, "num_children", 0)
    logical = element.struct(10, "logicalType") if 10 in element else Struct({})
    converted = element.integer(6, "converted_type", -1)
    is_inner = (parent.is_list and repeated) or parent.holds_element
    # Old writers omit the third node of a list: the repeated one is then the element itself
    is_old_element = num_children != 1 or name in ("array", f"{parent.name}_tuple")
    max_def = parent.max_def + (repetition != Repetition.REQUIRED)
    nesting = parent.nesting
    if converted in CONVERTED_MAPS or LOGICAL_MAP in logical:
        nesting = "is in a map"
    elif name == "typed_value" and parent.path:
        # The name that the format prescribes; not all writers annotate the group as a variant
        nesting = IN_VARIANT
    return _Group(
        name=name,
        children_left=num_children,
        path=(*parent.path, name),
        names=parent.names if is_inner else (*parent.names, name),
        max_def=max_def,
        max_rep=parent.max_rep + repeated,
        slot_def=max_def if repeated else parent.slot_def,
        nesting=nesting,
        is_list=num_children > 0 and (converted == CONVERTED_LIST or LOGICAL_LIST in logical),
        holds_element=parent.is_list and repeated and not is_old_element,
    )


def _column(node: _Group, element: Struct, ordinal: int) -> Column:
    """Make the Column of a node that is a leaf. Raises: MalformedError."""
    physical = element.integer(1, "type of a column")
    dtype, type_name = _dtype(physical, element)
    return Column(
        name=".".join(node.names),
        path=node.path,
        ordinal=ordinal,
        physical=physical,
        dtype=dtype,
        max_def=node.max_def,
        max_rep=node.max_rep,
        slot_def=node.slot_def,
        nesting=node.nesting or (LIST_OF_LISTS if node.max_rep > 1 else ""),
        kind=type_name,
    )


def _dtype(physical: int, element: Struct) -> tuple[str, str]:
    """Return the numpy name of the dtype of a column's values ("" if they are not supported
    numbers), and the name of their type for messages."""
    type_name = name_of(Physical, physical)
    if physical not in (Physical.INT32, Physical.INT64):
        if 10 in element and LOGICAL_FLOAT16 in element.struct(10, "logicalType"):
            type_name = FLOAT16
        return OTHER_DTYPES.get(physical, ""), type_name
    plain = "int32" if physical == Physical.INT32 else "int64"
    if 10 in element:
        logical = element.struct(10, "logicalType")
        if LOGICAL_INTEGER not in logical:
            return "", f"{type_name} with a logical type"
        integer = logical.struct(LOGICAL_INTEGER, "IntType")
        sign = "" if integer.boolean(2, "isSigned", True) else "u"
        dtype = f"{sign}int{integer.integer(1, 'bitWidth')}"
    elif 6 in element:
        converted = element.integer(6, "converted_type")
        dtype = CONVERTED_INTEGERS.get(converted, "")
        type_name = f"{type_name} with converted type {converted}"
    else:
        dtype = plain
    return (dtype, dtype) if dtype in TOKEN_DTYPES else ("", dtype or type_name)
