"""A parser for YAML (and so JSON) with limits on depth and size. Without limits, a few bytes could
exhaust the stack or, through aliases, the memory.

A document is read in one pass over its parse events, which builds its value and records line
numbers. If the document has anchors, tags, merges or other features that configs rarely use, this
pass only checks the limits, and PyYAML then loads the document.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The loader of libyaml, if PyYAML includes it. It is ten times faster, which matters for thousands
of sources."""
MAX_BYTES = 64 << 20
"""Maximum size of a config: enough to list 500,000 files by name."""
MAX_DEPTH = 64
"""Maximum nesting of lists and mappings; configs need six levels."""
_TOO_DEEP = f"lists or mappings nested more than {MAX_DEPTH} deep"
MAX_REPEATED = 1 << 18
"""Maximum number of values that aliases expand to."""
_UNUSUAL_TAGS = frozenset(("tag:yaml.org,2002:merge", "tag:yaml.org,2002:value"))
"""Tags of the scalars that have a special meaning: `<<` and `=`."""

_OTHER_BASE = re.compile(r"[-+]?(0[0-7_]+|[1-9][0-9_]*(:[0-5]?[0-9])+)")
"""Matches numbers that YAML 1.1 takes to be octal (0400 is 256) or of base 60 (1:30 is 90), which
is rarely intended."""

Lines = dict[str, tuple[int, Any]] | list[tuple[int, Any]] | None
"""The line numbers (from 0) of the keys of a mapping or the items of a list. Each is paired with
the Lines of the key's or item's value. None for a scalar."""


class Document(NamedTuple):
    """A parsed YAML document, with line numbers."""

    data: Any
    lines: Lines
    duplicates: list[tuple[str, int]]
    """Duplicate keys, with their line numbers (from 1)."""


def read_limited(path: Path) -> str:
    """Return the text of a config file. Raises: OSError; ValueError if it is not UTF-8, or is
    larger than MAX_BYTES."""
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)  # also limits pipes and devices
    if len(data) > MAX_BYTES:
        raise ValueError(
            f"larger than the limit of {MAX_BYTES:,} bytes; list files by patterns, not by name"
        )
    try:
        # Translates line endings as text files do
        return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8").read()
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text; save it as UTF-8") from None


def parse_document(text: str) -> Document:
    """Parse a YAML document. Raises: yaml.YAMLError, ValueError if the text is not valid YAML or
    exceeds the limits."""
    document = _Reader(text).read()
    return _load(text) if document is None else document


def _load(text: str) -> Document:
    """Load a document with PyYAML, after checking that it is within the limits."""
    try:
        node = yaml.compose(text, Loader=LOADER)
        data = yaml.load(text, Loader=LOADER)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        # A value that does not match its tag
        raise ValueError(
            f"a value does not match its tag ({type(error).__name__}: {error})"
        ) from error
    duplicates = list[tuple[str, int]]()
    return Document(data, _find_lines(node, duplicates, {}), duplicates)


def _find_lines(
    node: yaml.Node | None, duplicates: list[tuple[str, int]], known: dict[int, Lines]
) -> Lines:
    """Return the Lines of a node.

    Args:
        duplicates: a list to which duplicate keys are added.
        known: a dict to which the Lines of each node are added, by the node's id. A node that
            several aliases share is then processed only once.
    """
    if id(node) in known:
        return known[id(node)]
    lines: Lines = None
    if isinstance(node, yaml.MappingNode):
        lines = {}
        for key, value in node.value:
            if str(key.value) in lines:
                duplicates.append((str(key.value), key.start_mark.line + 1))
            lines.setdefault(
                str(key.value), (key.start_mark.line, _find_lines(value, duplicates, known))
            )
    elif isinstance(node, yaml.SequenceNode):
        lines = [
            (item.start_mark.line, _find_lines(item, duplicates, known)) for item in node.value
        ]
    known[id(node)] = lines
    return lines


class _Collection:
    """A list or a mapping that is being read."""

    __slots__ = ("anchor", "data", "is_mapping", "key", "line", "lines", "size")

    def __init__(self, event: Any, is_mapping: bool) -> None:
        self.anchor = event.anchor
        self.size = 1
        """Number of values in the collection, including the collection itself and nested values."""
        self.line = event.start_mark.line
        self.is_mapping = is_mapping
        self.data: Any = {} if is_mapping else []
        self.lines: Any = {} if is_mapping else []
        self.key: tuple[Any, str, int] | None = None
        """The key whose value has not been read yet: the constructed key, its text, and its
        line."""


class _Reader:
    """A parser that reads a document in one pass, checking limits before values are constructed."""

    def __init__(self, text: str) -> None:
        self._loader = LOADER(text)
        self._sizes: dict[str | None, int] = {}  # expanded size of each anchor
        self._repeated = 0
        """Number of values that aliases have expanded to."""
        self._nested = list[_Collection]()
        """The collections that are being read, from the outermost to the innermost."""
        self._scalars: dict[tuple[str, bool], tuple[Any, str]] = {}
        """The value and the tag of each scalar, by its text and whether it is plain."""
        self._is_usual = True
        """Whether this class can load the document by itself. Once it has found a feature that
        needs PyYAML, only limits are checked."""
        self._documents = 0
        self._root: tuple[Any, Lines] = (None, None)
        self._duplicates = list[tuple[str, int]]()

    def read(self) -> Document | None:
        """Read the document; return None if only PyYAML can load it."""
        try:
            while (event := self._loader.get_event()) is not None:
                self._take(event)
        except yaml.scanner.ScannerError as error:
            # From 0.2.6 on libyaml has a limit of its own, and it scans ahead of the events that
            # are counted here.
            if "nesting depth" not in str(error.problem):
                raise
            raise yaml.MarkedYAMLError(problem=_TOO_DEEP, problem_mark=error.problem_mark) from None
        finally:
            self._loader.dispose()
        return Document(*self._root, self._duplicates) if self._is_usual else None

    def _take(self, event: Any) -> None:
        """Process the next event."""
        event_type = type(event)
        if event_type is yaml.ScalarEvent:
            self._sizes[event.anchor] = 1
            if event.anchor is not None or event.tag is not None:
                self._is_usual = False
            self._add_scalar(event)
        elif event_type is yaml.MappingStartEvent or event_type is yaml.SequenceStartEvent:
            self._open(event, event_type is yaml.MappingStartEvent)
        elif event_type is yaml.MappingEndEvent or event_type is yaml.SequenceEndEvent:
            closed = self._nested.pop()
            self._sizes[closed.anchor] = closed.size
            self._add(closed.data, closed.lines, closed.line, closed.size)
        elif event_type is yaml.AliasEvent:
            self._is_usual = False
            self._add(None, None, 0, self._expand(event))
        elif event_type is yaml.DocumentStartEvent:
            self._documents += 1
            if self._documents > 1:
                self._is_usual = False

    def _open(self, event: Any, is_mapping: bool) -> None:
        """Begin a list or a mapping."""
        if event.anchor is not None or event.tag is not None:
            self._is_usual = False
        if self._nested and self._nested[-1].is_mapping and self._nested[-1].key is None:
            self._is_usual = False  # a collection as a key
        self._nested.append(_Collection(event, is_mapping))
        if len(self._nested) > MAX_DEPTH:
            raise _refused(_TOO_DEEP, event)

    def _expand(self, event: Any) -> int:
        """Return the number of values that an alias expands to, and count them towards the
        limit."""
        size = self._sizes.get(event.anchor, 0)
        if size == 0:
            raise _refused(
                f"*{event.anchor} refers to itself, or to an anchor that does not exist", event
            )
        self._repeated += size
        if self._repeated > MAX_REPEATED:
            raise _refused(
                f"aliases expand to more than {MAX_REPEATED:,} values; write the values out, or use fewer aliases",
                event,
            )
        return size

    def _add_scalar(self, event: Any) -> None:
        """Add a scalar to the innermost collection, as a key or as a value."""
        line = event.start_mark.line
        nested = self._nested
        if not self._is_usual:  # only limits and numbers are checked from here on
            _check_base(event)
            self._add(None, None, line, 1)
            return
        written = event.value, event.implicit[0]
        if written not in self._scalars:
            self._scalars[written] = self._construct(event)
        value, tag = self._scalars[written]
        if tag in _UNUSUAL_TAGS:
            self._is_usual = False
        if nested and nested[-1].is_mapping and nested[-1].key is None:
            top = nested[-1]
            top.size += 1
            top.key = value, event.value, line
            if event.value in top.lines:
                self._duplicates.append((event.value, line + 1))
            return
        self._add(value, None, line, 1)

    def _construct(self, event: Any) -> tuple[Any, str]:
        """Return the value and the tag of a scalar."""
        _check_base(event)
        tag = self._loader.resolve(yaml.ScalarNode, event.value, event.implicit)
        if tag in _UNUSUAL_TAGS:
            return event.value, tag
        return self._loader.construct_object(yaml.ScalarNode(tag, event.value)), tag

    def _add(self, value: Any, lines: Lines, line: int, size: int) -> None:
        """Add a value to the innermost collection.

        Args:
            size: number of values that are nested in `value`, including itself.
        """
        if not self._nested:
            self._root = value, lines
            return
        top = self._nested[-1]
        top.size += size
        if not self._is_usual:
            return
        if top.key is not None:
            key, text, key_line = top.key
            top.data[key] = value
            top.lines.setdefault(text, (key_line, lines))
            top.key = None
        else:
            top.data.append(value)
            top.lines.append((line, lines))


def _check_base(event: Any) -> None:
    """Refuse a number that looks decimal but that YAML reads in another base."""
    if event.implicit[0] and _OTHER_BASE.fullmatch(event.value):
        number = yaml.safe_load(event.value)
        raise _refused(
            f"YAML reads {event.value} as the number {number}; write {number} if that is meant, and put text in quotes",
            event,
        )


def _refused(problem: str, event: Any) -> yaml.MarkedYAMLError:
    """Return an error with the line of the event that caused it."""
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
