"""Print the output of commands on stdout: lines of text, tables, JSON."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import click

from megablend.operations.results import Record

Column = str | Callable[[Any], str | int | None]
"""The content of a table's column: the name of an attribute (or of a dict's item) of each row,
which may be followed by a format specification, as in `share:.4f`; or a function that returns the
content for each row."""
_INDENT = "  "
"""The indentation of the lines that continue a wrapped one."""
_LOG_WIDTH = 160
"""The width of tables in a log, which has no width of its own; names are not cut to fit it."""
_WORDS_WIDTH = 24
"""The minimum width of a column of words in a table, unless its words are shorter."""
_CONTROLS = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"
}
"""The escape sequences for control characters, by character code."""


def printable(text: str) -> str:
    """Return a text in which control characters are escaped, except newlines and tabs, so that it
    can be printed on a terminal. File names may contain such characters."""
    return text.translate(_CONTROLS)


def print_line(text: str, *, italic: bool = False) -> None:
    """Print a line, wrapped between words if stdout has a width. Lines of a log are not wrapped,
    and no word is broken."""
    text = printable(text)
    width = _find_width()
    if width is None or len(text) <= width:
        click.secho(text, italic=italic or None)
        return
    indent = text[: len(text) - len(text.lstrip(" "))] + _INDENT
    for line in textwrap.wrap(
        text,
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        expand_tabs=False,
        replace_whitespace=False,
    ):
        click.secho(line, italic=italic or None)


def print_lines(lines: Iterable[str], begin: str = "") -> None:
    """Print several lines, each with the same beginning."""
    for line in lines:
        print_line(f"{begin}{line}")


def print_first(lines: Collection[str], most: int, more: str) -> None:
    """Print the first `most` lines; if there are others, also print the line `more`, in which {n}
    is replaced by their number."""
    print_lines(list(lines)[:most])
    if len(lines) > most:
        print_line(more.format(n=f"{len(lines) - most:,}"))


def print_text(text: str) -> None:
    """Print a text unchanged, without wrapping it."""
    click.echo(printable(text), nl=not text.endswith("\n"))


def print_json(value: Record | Mapping[str, Any]) -> None:
    """Print one JSON object on one line: a result, or a dict of JSON values."""
    click.echo(json.dumps(value.to_dict() if isinstance(value, Record) else value))


def print_table(
    title: str,
    columns: Mapping[str, Column],
    rows: Iterable[Any],
    *,
    total: object = None,
    words: Collection[str] = (),
) -> None:
    """Print a table of names and numbers. A table that is too wide is printed as several tables,
    each with the names. No number is wrapped.

    Args:
        columns: the content of each column, by its title. The first column is the name of the row.
            Whole numbers get commas, None stays blank.
        total: an object for a last row with the totals, which is shown like the others.
        words: titles of columns of words, which are wrapped.
    """
    from rich.console import Console  # not needed by commands that print no table
    from rich.markup import escape
    from rich.table import Table

    texts = [[_to_text(column, row) for column in columns.values()] for row in rows]
    if total is not None:
        texts.append(["all", *(_to_text(column, total) for column in list(columns.values())[1:])])
    width = _find_width() or _LOG_WIDTH
    console = Console(highlight=False, soft_wrap=True, emoji=False, width=width)
    titles = list(columns)
    widths = [max(map(len, column)) for column in zip(titles, *texts, strict=True)]
    name_width = min(widths[0], max(20, width // 3))
    min_widths = [
        min(full_width, _WORDS_WIDTH) if column_title in words else full_width
        for column_title, full_width in zip(titles, widths, strict=True)
    ]
    print_line(title, italic=True)
    for group in _group_columns(min_widths, width - name_width - 4):
        table = Table(header_style="bold")
        table.add_column(titles[0], overflow="fold", max_width=name_width)
        for number in group:
            is_words = titles[number] in words
            table.add_column(
                titles[number], justify="left" if is_words else "right", no_wrap=not is_words
            )
        for number, row in enumerate(texts):
            if total is not None and number == len(texts) - 1:
                table.add_section()
            table.add_row(*(escape(printable(row[i])) for i in (0, *group)))
        console.print(table)


def _group_columns(widths: Sequence[int], room: int) -> list[list[int]]:
    """Divide the columns of a table, except the first, among tables that fit the width of stdout.

    Args:
        widths: the minimum width of each column.
        room: the width that a table has for columns in addition to the first.

    Returns: the numbers of the columns of each table.
    """
    groups = list[list[int]]()
    room_left = 0
    for number, width in enumerate(widths[1:], 1):
        needed = width + 3  # a border and two blanks
        if not groups or room_left < needed:
            groups.append([])
            room_left = room
        groups[-1].append(number)
        room_left -= needed
    return groups


def _to_text(column: Column, row: Any) -> str:
    """Return the text of a table's cell."""
    digits = ""
    if isinstance(column, str):
        name, _, digits = column.partition(":")
        value = row[name] if isinstance(row, Mapping) else getattr(row, name, None)
    else:
        value = column(row)
    if value is None:
        return ""
    return value if isinstance(value, str) else format(value, digits or ",")


def _find_width() -> int | None:
    """Return the width of stdout in characters: the value of COLUMNS, or the width of the terminal;
    None for a file or a pipe."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > len(_INDENT):
        return int(columns)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except (OSError, ValueError):  # not a terminal, or without a descriptor
        return None
