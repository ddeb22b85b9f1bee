"""`ReadSpec`: the settings for reading the files of a source, passed as one value from the config
to the format."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

OptionValue = str | int | float | bool | None
_BY_POSITION = ("format", "column", "block_bytes", "count_documents", "allow_float")
"""Fields that release 0.1.0 wrote into its cache keys by position."""
_NOT_RECORDED = ("block_bytes", "allow_float")
"""Fields that an index does not record. Formats store the block size with each file, and
`allow_float` is never set for token columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSpec:
    """The settings for indexing and reading the files of a source. To add a setting, add a field
    with a default: cache keys and indexes then include it."""

    format: str | None = None
    """Name of the format. It is None if the file suffix decides and the files have not been found
    yet."""
    column: str | None = None
    """Dotted path of the column; None selects the token column (see `formats.choose`)."""
    count_documents: bool = True
    """Whether documents must be counted exactly, even if that requires reading the data of the
    file."""
    block_bytes: int = 1 << 20
    """Approximate size of a block in bytes, if the format does not determine it (`.bin`)."""
    allow_float: bool = False
    """Whether the column is an extra column, whose numbers accompany the tokens. Floats and
    booleans are then also valid."""
    options: tuple[tuple[str, OptionValue], ...] = ()
    """Options of the format as pairs of name and value, sorted by name; see `make_options`."""

    def option(self, name: str, default: Any = None) -> Any:
        """Return the value of one of the format's options."""
        return dict(self.options).get(name, default)

    def cache_key(self) -> list[Any]:
        """Return all fields as a JSON-serializable list, for keys of caches. If two keys are equal,
        indexing the same file gives the same result.

        The fields of release 0.1.0 are listed by position, so that its caches remain valid; other
        fields are listed by name, in an object at the end, if they differ from their defaults.
        """
        key: list[Any] = [self.format, self.column, self.block_bytes, self.count_documents]
        if self.allow_float:
            key.append("numbers")
        named = dict(self._named())
        return [*key, named] if named else key

    def record(self) -> dict[str, Any]:
        """Return the fields that the manifest of an index records, as a dict. `from_record` is the
        inverse."""
        return {
            "format": self.format,
            "column": self.column,
            "documents": self.count_documents,
            **dict(self._named()),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> ReadSpec:
        """Return a ReadSpec from the result of `record`. Missing fields have their defaults;
        unknown keys are ignored."""
        named = dict[str, Any]()
        for name in _NAMES.intersection(record):
            named[name] = record[name]
        if "options" in named:
            named["options"] = tuple((name, value) for name, value in named["options"])
        return cls(
            format=record["format"],
            column=record["column"],
            count_documents=record["documents"],
            **named,
        )

    @classmethod
    def from_records(cls, records: Iterable[Mapping[str, Any]]) -> list[ReadSpec]:
        """Apply `from_record` to each record; equal records share one object."""
        spec_of_key = dict[object, ReadSpec]()
        specs = list[ReadSpec]()
        get_fields = itemgetter("format", "column", "documents")
        for record in records:
            # Most records have no other fields
            key = get_fields(record) if _NAMES.isdisjoint(record) else repr(record)
            if key not in spec_of_key:
                spec_of_key[key] = cls.from_record(record)
            specs.append(spec_of_key[key])
        return specs

    def find_difference(self, requested: ReadSpec) -> tuple[str, object, object] | None:
        """Compare these settings, with which files were indexed, with the requested ones. Return
        the name and both values of the first recorded field that differs; None if no field differs.

        It is not a difference if documents were counted without being requested, or if the request
        leaves the format to the file suffix.
        """
        if self == requested:
            return None
        for field in _FIELDS:
            indexed = getattr(self, field.name)
            other = getattr(requested, field.name)
            is_ignored = field.name in (*_NOT_RECORDED, "count_documents")
            is_left_open = field.name == "format" and other is None
            if is_ignored or is_left_open or indexed == other:
                continue
            if field.name == "options":
                return field.name, dict(indexed), dict(other)
            return field.name, indexed, other
        return None

    def _named(self) -> Iterator[tuple[str, Any]]:
        """Return the names and values of the fields that keys and records list by name: those that
        differ from their defaults."""
        return (
            (field.name, getattr(self, field.name))
            for field in _NAMED_FIELDS
            if getattr(self, field.name) != field.default
        )


_FIELDS = dataclasses.fields(ReadSpec)
_NAMED_FIELDS = tuple(field for field in _FIELDS if field.name not in _BY_POSITION)
_NAMES = frozenset(field.name for field in _NAMED_FIELDS)


def make_options(options: Mapping[str, OptionValue]) -> tuple[tuple[str, OptionValue], ...]:
    """Convert options to the form in which a ReadSpec stores them: sorted pairs."""
    return tuple(sorted(options.items()))
