"""Find the line of text that a row of a token file was made from (`locate_rows`), and the row that
was made from a line (`find_document`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from typing import Any

import numpy as np

from megablend.errors import ConfigError
from megablend.storage.base import Storage
from megablend.text.tables import is_table
from megablend.text.text_file import TextFile, count_line_ends
from megablend.text.token_file import read_columns, read_footer
from megablend.text.token_names import TokenPath, group_by_folder

ReadFooter = Callable[[str], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPlace:
    """The place of a document in a text file."""

    text: str
    """The path of the file."""
    line: int
    """The number of the line, from 1; for a table, the number of the row, from 0."""
    offset: int
    """The offset of the first byte of the line in the uncompressed file; for a table, the number of
    the row."""
    key: str | None


def reader_of_footers(storage: Storage) -> ReadFooter:
    """Return a function that does the same as `read_footer`, but reads each footer only once."""
    return cache(partial(read_footer, storage))


def locate_rows(
    path: str,
    rows: Sequence[int],
    in_folder: Sequence[TokenPath],
    storage: Storage,
    read_footer: ReadFooter,
) -> list[TextPlace]:
    """Return, for each of the given rows of a token file, the place of its text.

    Args:
        path: the path of the token file.
        in_folder: all token files in the same folder, from `group_by_folder`.
        read_footer: from `reader_of_footers`.

    Raises: DataError if a token file cannot be read.
    """
    text = read_footer(path)["text"]
    number = next(token_path.number for token_path in in_folder if token_path.path == path)
    of_text = _divide_by_text(in_folder, read_footer).get(text, in_folder)
    earlier = [token_path.path for token_path in of_text if token_path.number < number]
    lines_before = sum(read_footer(token_path)["part"]["lines"] for token_path in earlier)
    columns = _read_columns(path, storage)
    places = list[TextPlace]()
    for row in rows:
        offset = columns["offset"][row]
        line = offset if is_table(text) else lines_before + columns["line"][row] + 1
        key = columns["key"][row] if "key" in columns else None
        places.append(TextPlace(text=text, line=line, offset=offset, key=key))
    return places


def find_document(
    text: str,
    paths: Sequence[str],
    storage: Storage,
    *,
    line: int | None = None,
    byte: int | None = None,
    key: str | None = None,
) -> tuple[str, int]:
    """Find the row of a token file that has the tokens of a document. The document is given by one
    of `line`, `byte` and `key`.

    Args:
        text: the path of the text file, or the last components of the path.
        paths: the paths of the files of an index.
        line: the number of the document's line, from 1; for a table, the number of its row, from 0.
        byte: the offset of any byte of the document's line in the uncompressed file; for a table,
            the number of its row.
        key: the document's value of the source's `key`.

    Returns: the path of the token file, and the row.
    Raises: ConfigError if there is no such file or document, or more than one; DataError if a file
        cannot be read, or if the text no longer exists and lines next to `byte` have no document.
    """
    read_footer = reader_of_footers(storage)
    text_path, token_files = _find_text(text, paths, read_footer)
    unit = "byte"
    if is_table(text_path):
        unit = "row"
        byte = line if byte is None else byte  # token files record rows as offsets
        line = None
    lines_before = 0
    with_key = dict[int, tuple[str, int]]()
    for token_file in token_files:
        part = read_footer(token_file.path)["part"]
        row: int | None = None
        if byte is not None and part["start"] <= byte < part["stop"]:
            columns = _read_columns(token_file.path, storage)
            if unit == "row":
                row = _find_equal(columns["offset"], byte)
            else:
                row = _find_line_around(byte, columns, part["lines"], text_path, storage)
        elif key is not None:
            columns = _read_columns(token_file.path, storage)
            rows = _find_key(columns, key, token_file.path)
            with_key |= {columns["offset"][i]: (token_file.path, i) for i in rows}
        elif line is not None and lines_before < line <= lines_before + part["lines"]:
            lines = _read_columns(token_file.path, storage)["line"]
            row = _find_equal(lines, line - 1 - lines_before)
        if row is not None:
            return token_file.path, row
        lines_before += part["lines"]
    if len(with_key) > 1:
        positions = ", ".join(map(str, islice(with_key, 3)))
        raise ConfigError(
            f"{text}: {len(with_key):,} documents have the key {key!r} (the first at {unit} {positions}), expected one; choose "
            "one of them with `--byte`"
        )
    if with_key:
        return next(iter(with_key.values()))
    asked = f"key {key!r}"
    if line is not None:
        asked = f"line {line}"
    elif byte is not None:
        asked = f"{unit} {byte}"
    raise ConfigError(
        f"{text}: there is no document at {asked}: the line is blank, was skipped as a bad document, or does not exist; "
        "give another place"
    )


def _find_text(
    text: str, paths: Sequence[str], read_footer: ReadFooter
) -> tuple[str, Sequence[TokenPath]]:
    """Find the text file that a user names. Returns: the path of the text file, and its token
    files. Raises: see `find_document`."""
    wanted = text.removeprefix("./")
    absolute = os.path.abspath(text)  # noqa: PTH100  (no name of a text file ends like a URL's)
    candidates = list[tuple[str, Sequence[TokenPath]]]()
    for token_files in group_by_folder(paths).values():
        # A name is relative to the source's root, so it may be longer than the user's, or shorter
        name = token_files[0].text
        if _is_end(wanted, name) or _is_end(name, wanted) or _is_end(name, absolute):
            candidates += _divide_by_text(token_files, read_footer).items()
    # If several files fit, take the one whose path fits better
    candidates = [
        (path, files) for path, files in candidates if _is_end(wanted, path)
    ] or candidates
    candidates = [
        (path, files) for path, files in candidates if path in (text, absolute)
    ] or candidates
    if len(candidates) != 1:
        raise ConfigError(
            f"{text}: {len(candidates)} text files in the index match this name, expected 1; give the full path of one"
        )
    return candidates[0]


def _is_end(end: str, path: str) -> bool:
    """Return whether a path ends with the path components `end`."""
    return f"/{path}".endswith(f"/{end}")


def _divide_by_text(
    in_folder: Sequence[TokenPath], read_footer: ReadFooter
) -> dict[str, list[TokenPath]]:
    """Group the token files in a folder by the path of the text file that they were made from."""
    if len({token_path.number for token_path in in_folder}) == len(in_folder):
        return {read_footer(in_folder[0].path)["text"]: list(in_folder)}
    own_files = dict[str, dict[int, TokenPath]]()
    for token_path in in_folder:
        text = read_footer(token_path.path)["text"]
        own_files.setdefault(text, {})[token_path.number] = token_path
    divided = dict[str, list[TokenPath]]()
    for text, own in own_files.items():
        # Text files that begin with the same lines share token files, whose footers name one of them
        shared = {
            token_path.number: token_path
            for token_path in in_folder
            if token_path.number < max(own)
        }
        divided[text] = [token_path for _, token_path in sorted((shared | own).items())]
    return divided


def _find_line_around(
    byte: int, columns: Mapping[str, Any], num_lines: int, text: str, storage: Storage
) -> int | None:
    """Return the row of the line that contains a byte; None if that line has no document.

    Args:
        columns: the columns of the token file.
        num_lines: the number of lines of the token file's part.
        text: the path of the text file.
    """
    row = _find_last(columns["offset"], byte)
    if row < 0:
        return None
    lines = [*columns["line"], num_lines]
    # Lines without a document are in no token file: only the text says where they begin
    is_last_before_gap = lines[row + 1] > lines[row] + 1
    if is_last_before_gap and _ends_line(text, columns["offset"][row], byte, storage):
        return None
    return row


def _find_equal(numbers: Sequence[int], number: int) -> int | None:
    """Return the index of a number in a list of ascending numbers; None if the list does not have
    it."""
    at = _find_last(numbers, number)
    return at if at >= 0 and numbers[at] == number else None


def _find_last(numbers: Sequence[int], number: int) -> int:
    """Return the index of the last number that is at most `number` in a list of ascending numbers;
    -1 if all numbers are greater."""
    return int(np.searchsorted(np.asarray(numbers, np.int64), number, side="right")) - 1


def _ends_line(text: str, start: int, stop: int, storage: Storage) -> bool:
    """Return whether a line of a text file ends within the bytes [start, stop)."""
    state = storage.stat(text)
    file = TextFile(text, text, state.size, state.etag)
    return count_line_ends(file, storage, start, stop) > 0


def _find_key(columns: Mapping[str, Any], key: str, path: str) -> list[int]:
    """Return the rows whose key is `key`. Raises: ConfigError if the token file has no keys."""
    if "key" not in columns:
        raise ConfigError(
            f"{path}: has no keys, since its source sets no `key`; use `--line` or `--byte` instead"
        )
    return [row for row, row_key in enumerate(columns["key"]) if row_key == key]


def _read_columns(path: str, storage: Storage) -> dict[str, Any]:
    """Return the columns of a token file except the tokens."""
    columns: dict[str, Any] = read_columns(storage, path, ["offset", "line", "key"]).to_pydict()
    return columns
