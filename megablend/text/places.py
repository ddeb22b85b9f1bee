"""Where the documents of token files are in their text, and the inverse."""

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
    """Where a document is in a file of text."""

    text: str
    """Path of the file."""
    line: int
    """From 1; of a table, the row, from 0."""
    offset: int
    """The first byte of the line, in the uncompressed file; of a table, the row."""
    key: str | None


@dataclass(frozen=True, slots=True)
class TextPart:
    """A token file, by its path."""

    path: str
    folder: str
    """That of the tokenizer."""
    text: str
    """Name of the text file."""
    number: int


def parse_path(path: str) -> TextPart | None:
    """What the path of a token file says; None for any other file."""
    found = _TOKEN_FILE.fullmatch(path)
    return None if found is None else TextPart(path, found[1], found[2], int(found[3]))


def list_parts(paths: Sequence[str]) -> dict[tuple[str, str], list[TextPart]]:
    """The token files of each text file, in order."""
    found = dict[tuple[str, str], list[TextPart]]()
    for path in paths:
        if (part := parse_path(path)) is not None:
            found.setdefault((part.folder, part.text), []).append(part)
    return {key: sorted(each, key=lambda part: part.number) for key, each in found.items()}


def _list_texts(parts: Sequence[TextPart], storage: Storage) -> list[str]:
    """The paths of the text files that have one name, each in its source's folder."""
    if len({part.number for part in parts}) == len(parts):
        return [read_footer(storage, parts[0].path)["text"]]
    return list(dict.fromkeys(read_footer(storage, part.path)["text"] for part in parts))


def _list_own(text: str, parts: Sequence[TextPart], storage: Storage) -> list[TextPart]:
    """Those of one of the text files that have one name. Files that begin with the same lines share
    parts."""
    if len({part.number for part in parts}) == len(parts):
        return list(parts)
    own = {part.number: part for part in parts if read_footer(storage, part.path)["text"] == text}
    shared = {part.number: part for part in parts if part.number < max(own)}
    return [part for _, part in sorted((shared | own).items())]


def locate_rows(
    path: str, rows: Sequence[int], parts: Sequence[TextPart], storage: Storage
) -> list[TextPlace]:
    """Where rows of a token file are in its text.

    Args:
        parts: those of the text files of the same name.

    Raises: DataError if a token file cannot be read.
    """
    footer = read_footer(storage, path)
    number = next(part.number for part in parts if part.path == path)
    own = _list_own(footer["text"], parts, storage)
    before = [part for part in own if part.number < number]
    lines_before = sum(read_footer(storage, each.path)["part"]["lines"] for each in before)
    table = _read_columns(path, storage)
    keys = table.get("key")
    return [
        TextPlace(
            text=footer["text"],
            line=table["offset"][i]
            if is_table(footer["text"])
            else lines_before + table["line"][i] + 1,
            offset=table["offset"][i],
            key=None if keys is None else keys[i],
        )
        for i in rows
    ]


def find_document(
    text: str,
    paths: Sequence[str],
    storage: Storage,
    *,
    line: int | None = None,
    byte: int | None = None,
    key: str | None = None,
) -> tuple[str, int]:
    """The token file and the row of a document of a text file.

    Args:
        text: path of the text file, or its end.
        paths: of the files of an index.
        line: of the document, from 1; of a table, the row, from 0.
        byte: within its line, in the uncompressed file; of a table, the row.
        key: what the source's `key` holds.

    Raises: ConfigError if there is no such file or document, or several; DataError, also if the text
        is gone and lines next to `byte` have no document.
    """
    wanted = text.removeprefix("./")
    absolute = os.path.abspath(text)  # noqa: PTH100  (not of a URL, which has no such end)
    found = [
        parts
        for (_, name), parts in list_parts(paths).items()
        if name == wanted
        or name.endswith(f"/{wanted}")
        or f"/{wanted}".endswith(f"/{name}")
        or absolute.endswith(f"/{name}")
    ]
    texts = [(path, parts) for parts in found for path in _list_texts(parts, storage)]
    texts = [each for each in texts if each[0].endswith(f"/{wanted}")] or texts
    texts = [each for each in texts if each[0] in (text, absolute)] or texts
    if len(texts) != 1:
        raise ConfigError(
            f"{text}: {len(texts)} files of text have this name, expected one; give the path as the config's sources find it"
        )
    path, parts = texts[0]
    own = _list_own(path, parts, storage)
    is_row = is_table(path)
    if is_row and line is not None:  # a row is a place as a byte is
        byte = line
        line = None
    lines_before = 0
    for part in own:
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


def _find_last(places: Sequence[int], place: int, *, exact: bool) -> int | None:
    """The last of ascending places up to one, or the one itself."""
    at = int(np.searchsorted(np.asarray(places, np.int64), place, side="right")) - 1
    return None if at < 0 or (exact and places[at] != place) else at


def _ends_line(text: str, start: int, stop: int, storage: Storage) -> bool:
    """Whether a line of a text file ends at its bytes [start, stop)."""
    state = storage.stat(text)
    file = TextFile(text, text, state.size, state.etag)
    return count_line_ends(file, storage, start, stop) > 0


def _find_key(table: Mapping[str, Any], key: str, path: str) -> int | None:
    if "key" not in table:
        raise ConfigError(
            f"{path}: has no keys, since its source names none; give --line or --byte"
        )
    return table["key"].index(key) if key in table["key"] else None


def _read_columns(path: str, storage: Storage) -> dict[str, Any]:
    """The columns of a token file but its tokens."""
    file = open_token_file(storage, path)
    names = [name for name in file.schema_arrow.names if name != "tokens"]
    found: dict[str, Any] = file.read(columns=names).to_pydict()
    return found
