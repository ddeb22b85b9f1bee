"""Results as tables on stdout."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megablend.api.build import Built
from megablend.index.build import BuildReport
from megablend.index.tabulate import TablesReport

SHOWN_FIRST, SHOWN_LAST = 24, 8
"""Of a sample's tokens, unless all are asked for."""


def new_console() -> Console:
    """A console on stdout, wide enough for names where it is no terminal."""
    console = Console(highlight=False, soft_wrap=True, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 160  # a log has no width of its own; do not cut names
    return console


def print_table(
    console: Console,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    total: Sequence[str] | None = None,
) -> None:
    """A table of a name and numbers; where it is too wide, several below each other, each with the name. No number is broken."""
    rows = [*rows, total] if total else rows
    widths = [max(map(len, (title_of, *(row[i] for row in rows)))) for i, title_of in enumerate(columns)]
    name = min(widths[0], max(20, console.width // 3))
    groups, room = list[list[int]](), 0
    for i, width in enumerate(widths[1:], 1):
        if not groups or room < width + 3:  # a border and two blanks
            groups.append([])
            room = console.width - name - 4
        groups[-1].append(i)
        room -= width + 3
    console.print(title, markup=False, style="italic", soft_wrap=True)
    for group in groups:
        table = new_table("", *(columns[i] for i in (0, *group)))
        table.columns[0].max_width = name
        for column in table.columns[1:]:
            column.no_wrap = True
        for row in rows:
            if row is total:
                table.add_section()
            table.add_row(*(escape(row[i]) for i in (0, *group)))
        console.print(table)


def new_table(title: str, *columns: str) -> Table:
    """A table whose first column is a name and whose others are numbers."""
    table = Table(title=escape(title) or None, title_justify="left", header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    return table


def print_index(report: BuildReport, documents: TablesReport | None, *, ranks: int) -> None:
    """What was indexed."""
    console = new_console()
    columns = ("files", "read", "reused", "changed", "added", "removed", "scanned MB", "ranks", "s")
    counts = (report.num_files, report.read, report.reused, len(report.changed), report.added, report.removed)
    row = (*(f"{n:,}" for n in counts), f"{report.scanned_bytes / 1e6:,.1f}", str(ranks), f"{report.seconds:.2f}")
    print_table(console, "index " + report.digest, columns, [row])
    if documents is not None:
        console.print(
            f"tables of {documents.documents:,} documents, {documents.table_bytes / 1e6:,.1f} MB: {documents.counted:,} counted "
            f"now, {documents.scanned_bytes / 1e6:,.1f} MB scanned for it, {documents.seconds:.2f} s",
            markup=False,
        )
    for name in report.changed:
        console.print(f"changed, read again: {name}", markup=False)
    for note in report.notes:
        console.print(f"note: {note}", markup=False)


def print_built(built: Built, *, ranks: int) -> None:
    """The closing table of a build, and what became of the run."""
    print_index(built.index, built.documents, ranks=ranks)
    ledger, console = built.ledger, new_console()
    if built.stages_before == len(ledger.ends):
        done = "is as it was"
    elif built.stages_before:
        done = f"was lengthened: stage {len(ledger.ends)} appended"
    else:
        done = "is new"
    console.print(f"run {ledger.run!r} {done}: {ledger.ends[-1]:,} samples, plan {ledger.digest}", markup=False)
    if built.pinned:
        console.print(
            f"run {ledger.run!r} keeps reading index {ledger.index}, on which its order was promised; "
            f"to use the new index, give the run another name (`run:`)",
            markup=False,
        )
    print_warnings(console, built.warnings)


def print_warnings(console: Console, warnings: Sequence[str]) -> None:
    """A line each."""
    for warning in warnings:
        console.print(f"warning: {warning}", markup=False)


def print_sample(found: dict[str, Any], *, whole: bool = False) -> None:
    """Where a sample comes from, its first and last tokens (or all), and its text where it was decoded."""
    console = new_console()
    epochs = ", ".join(map(str, found["epochs"]))
    console.print(
        f"{found['split']} sample {found['sample']:,}: source {found['source']!r}, ordinal {found['ordinal']:,}, epoch {epochs}",
        markup=False,
    )
    rows = [
        (
            piece["file"],
            f"{piece['block']:,}",
            f"{piece['byte_offset']:,}",
            f"{piece['first_token']:,} to {piece['stop_token']:,}",
            str(piece["epoch"]),
        )
        for piece in found["pieces"]
    ]
    print_table(console, "pieces", ("file", "block", "byte offset", "tokens of the block", "epoch"), rows)
    console.print(f"documents begin at {_shortened(found['document_starts'], whole, ', ')}", markup=False)
    console.print(f"tokens: {_shortened(found['tokens'], whole)}", markup=False)
    for name, numbers in found.get("extra", {}).items():
        console.print(f"{name}: {_shortened(numbers, whole)}", markup=False)
    if "text" in found:
        console.print("text:", markup=False)
        console.print(found["text"], markup=False)


def _shortened(numbers: Sequence[Any], whole: bool, between: str = " ") -> str:
    """Numbers as text: the first and last few, and how many there are."""
    if whole or len(numbers) <= SHOWN_FIRST + SHOWN_LAST:
        return between.join(map(str, numbers))
    first, last = (between.join(map(str, some)) for some in (numbers[:SHOWN_FIRST], numbers[-SHOWN_LAST:]))
    return f"{first} ... {last} ({len(numbers):,}; --all prints all)"
