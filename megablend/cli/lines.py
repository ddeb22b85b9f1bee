"""Lines of words on stdout."""

from __future__ import annotations

import os
import sys
import textwrap

import click

_INDENT = "  "
"""Of what continues a line."""
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """A text for a terminal: control characters, which names in files may have, are written as escapes; lines and tabs stay."""
    return text.translate(_CONTROLS)


def print_line(text: str, *, italic: bool = False) -> None:
    """Print a line, wrapped between words where stdout has a width; lines of a log stay whole. No word is broken."""
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


def _find_width() -> int | None:
    """Columns of stdout: as COLUMNS says, or the terminal has; None for a file or a pipe."""
    if (columns := os.environ.get("COLUMNS", "")).isdecimal() and int(columns) > len(_INDENT):
        return int(columns)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except (OSError, ValueError):  # not a terminal, or without a descriptor
        return None
