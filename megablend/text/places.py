"""Finds the text of a row of a token file (`locate_rows`), and the row of a place in the text
(`find_document`)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megablend.errors import ConfigError
from megablend.storage.base import Storage
from megablend.text.parts import TextFile, count_line_ends
from megablend.text.tables import is_table
from megablend.text.token_file import open_token_file, read_footer

_TOKEN_FILE = re.compile(r"(.*/[0-9a-f]{16})/(.+)/([0-9]{5,})-[0-9a-f]{24}\.parquet")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPlace:
    """The place of a document in a file of text."""

    text: str
    """The path of the file."""
    line: int
    """The line, from 1; for a table, the row, from 0."""
    offset: int
    """The first byte of the line in the uncompressed file; for a table, the row."""
    key: str | None


@dataclass(frozen=True, slots=True)
class TextPart:
    """The part that a token file holds, as its path names it."""

    path: str
    folder: str
    """The folder of the tokenizer."""
    text: str
    """The name of the text file. Text files of several sources may have the same name."""
    number: int


def parse_path(path: str) -> TextPart | None:
    """Return the part that a token file holds; None for any other file."""
    match = _TOKEN_FILE.fullmatch(path)
    return None if match is None else TextPart(path, match[1], match[2], int(match[3]))


def list_parts(paths: Sequence[str]) -> dict[tuple[str, str], list[TextPart]]:
    """List the parts for each tokenizer's folder and name of a text file, in order."""
    groups = dict[tuple[str, str], list[TextPart]]()
    for path in paths:
        part = parse_path(path)
        if part is not None:
            groups.setdefault((part.folder, part.text), []).append(part)
    return {key: sorted(parts, key=lambda part: part.number) for key, parts in groups.items()}


def _divide_by_path(parts: Sequence[TextPart], storage: Storage) -> dict[str, list[TextPart]]:
    """Divide the parts under one name of text files by the path of the text file."""
    if len({part.number for part in parts}) == len(parts):
        return {read_footer(storage, parts[0].path)["text"]: list(parts)}
    own_parts = dict[str, dict[int, TextPart]]()
    for part in parts:
        text = read_footer(storage, part.path)["text"]
        own_parts.setdefault(text, {})[part.number] = part
    divided = dict[str, list[TextPart]]()
    for text, own in own_parts.items():
        # Text files that begin with the same lines share parts, whose footers name one of the files
        shared = {part.number: part for part in parts if part.number < max(own)}
        divided[text] = [part for _, part in sorted((shared | own).items())]
    return divided


def locate_rows(
    path: str, rows: Sequence[int], parts: Sequence[TextPart], storage: Storage
) -> list[TextPlace]:
    """Return the places in the text of rows of a token file.

    Args:
        parts: the parts under the same name of text files, from `list_parts`.

    Raises: DataError if a token file cannot be read.
    """
    text = read_footer(storage, path)["text"]
    number = next(part.number for part in parts if part.path == path)
    own = _divide_by_path(parts, storage).get(text, parts)
    earlier = [part for part in own if part.number < number]
    lines_before = sum(read_footer(storage, part.path)["part"]["lines"] for part in earlier)
    columns = _read_columns(path, storage)
    offsets = columns["offset"]
    lines = offsets if is_table(text) else [lines_before + line + 1 for line in columns["line"]]
    keys = columns.get("key") or [None] * len(offsets)
    return [TextPlace(text=text, line=lines[i], offset=offsets[i], key=keys[i]) for i in rows]


def find_document(
    text: str,
    paths: Sequence[str],
    storage: Storage,
    *,
    line: int | None = None,
    byte: int | None = None,
    key: str | None = None,
) -> tuple[str, int]:
    """Find the row of a document's tokens.

    Args:
        text: the path of the text file, or its end.
        paths: the paths of the files of an index.
        line: the line of the document, from 1; for a table, the row, from 0.
        byte: a byte of its line, in the uncompressed file; for a table, the row.
        key: its value of the source's `key`.

    Returns: the path of the token file, and the row.
    Raises: ConfigError if there is no such file or document, or several; DataError, also if the text
        is gone and lines next to `byte` have no document.
    """
    path, parts = _find_text(text, paths, storage)
    is_row = is_table(path)
    if is_row and line is not None:  # a table's rows are recorded as offsets
        byte = line
        line = None
    lines_before = 0
    for part in parts:
        footer = read_footer(storage, part.path)["part"]
        row: int | None = None
        if byte is not None and footer["start"] <= byte < footer["stop"]:
            table = _read_columns(part.path, storage)
            row = _find_last(table["offset"], byte, exact=is_row)
            if row is not None and not is_row:
                next_line = [*table["line"], footer["lines"]][row + 1]
                start = table["offset"][row]
                # Lines without a document are in no token file: the text says where they begin
                if next_line > table["line"][row] + 1 and _ends_line(path, start, byte, storage):
                    row = None
        elif key is not None:
            row = _find_key(_read_columns(part.path, storage), key, part.path)
        elif line is not None and lines_before < line <= lines_before + footer["lines"]:
            lines = _read_columns(part.path, storage)["line"]
            row = _find_last(lines, line - 1 - lines_before, exact=True)
        if row is not None:
            return part.path, row
        lines_before += footer["lines"]
    unit = "row" if is_row else "byte"
    asked = f"line {line}" if line is not None else f"{unit} {byte}" if byte is not None else key
    raise ConfigError(
        f"{text}: has no document at {asked}: that place is blank, was left out, or is not in the file; give the "
        "place of a document"
    )


def _find_text(text: str, paths: Sequence[str], storage: Storage) -> tuple[str, Sequence[TextPart]]:
    """Find the one text file that a user names, and its parts. Raises: see `find_document`."""
    wanted = text.removeprefix("./")
    absolute = os.path.abspath(text)  # noqa: PTH100  (no name of a text file ends like a URL's)
    texts = [
        item
        for (_, name), parts in list_parts(paths).items()
        if name.endswith(f"/{wanted}")
        or f"/{wanted}".endswith(f"/{name}")
        or absolute.endswith(f"/{name}")
        for item in _divide_by_path(parts, storage).items()
    ]
    # If several files fit, take the one whose path fits better
    texts = [(path, parts) for path, parts in texts if path.endswith(f"/{wanted}")] or texts
    texts = [(path, parts) for path, parts in texts if path in (text, absolute)] or texts
    if len(texts) != 1:
        raise ConfigError(
            f"{text}: {len(texts)} files of text have this name, expected one; give the path as the config's sources find it"
        )
    return texts[0]


def _find_last(places: Sequence[int], place: int, *, exact: bool) -> int | None:
    """Return the index of the last of ascending places up to `place`; with `exact`, only if it is
    equal."""
    at = int(np.searchsorted(np.asarray(places, np.int64), place, side="right")) - 1
    return None if at < 0 or (exact and places[at] != place) else at


def _ends_line(text: str, start: int, stop: int, storage: Storage) -> bool:
    """Whether a line of a text file ends at its bytes [start, stop)."""
    state = storage.stat(text)
    file = TextFile(text, text, state.size, state.etag)
    return count_line_ends(file, storage, start, stop) > 0


def _find_key(columns: Mapping[str, Any], key: str, path: str) -> int | None:
    """Return the row with a key; None if there is none. Raises: ConfigError without keys."""
    if "key" not in columns:
        raise ConfigError(
            f"{path}: has no keys, since its source names none; give --line or --byte"
        )
    return columns["key"].index(key) if key in columns["key"] else None


def _read_columns(path: str, storage: Storage) -> dict[str, Any]:
    """Read the columns of a token file except its tokens."""
    file = open_token_file(storage, path)
    names = [name for name in file.schema_arrow.names if name != "tokens"]
    columns: dict[str, Any] = file.read(columns=names).to_pydict()
    return columns
