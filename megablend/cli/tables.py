"""Results as tables on stdout."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megablend.api.build_results import BuildResult
from megablend.api.check_data import CheckDataResult
from megablend.blocks.build_document_tables import TablesReport
from megablend.cli.lines import print_line, printable
from megablend.index.build import BuildReport

SHOWN_PROBLEMS = 10
"""Missing or changed files that are printed."""
DRAIN_SOURCES = 12
"""Sources of a drain that are printed."""
SHOWN_FIRST, SHOWN_LAST = 24, 8
"""Tokens of a sample that are printed, unless all are requested."""


def new_console() -> Console:
    """A console on stdout, wide enough for names where it is not a terminal."""
    console = Console(highlight=False, soft_wrap=True, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 160  # a log has no width of its own; do not cut names
    return console


def format_transfer(transfer: Mapping[str, Any], of_bytes: str = "bytes") -> str:
    """Requests, bytes and cost in words, each as a range where it is not known exactly.

    Args:
        of_bytes: the key of the bytes.
    """
    scales = {"requests": 1.0, of_bytes: 1e-9, "cost": 1.0}
    digits = {"requests": ",.0f", of_bytes: ",.2f", "cost": ",.2f"}
    words = dict[str, str]()
    for name in scales:
        ends = [transfer[name], transfer[f"most_{name}"]]
        shown = dict.fromkeys(f"{end * scales[name]:{digits[name]}}" for end in ends if end is not None)
        words[name] = " to ".join(shown)
    price = f", which costs {words['cost']}" if words["cost"] else ""
    return f"{words['requests']} requests, {words[of_bytes]} GB{price}"


def print_dry_run(found: Sequence[dict[str, Any]]) -> None:
    """Print what indexing would request."""
    for each in found:
        transfer = format_transfer(each, "source_bytes")
        files = f"{each['name']}: {each['files']:,} files, {each['bytes'] / 1e9:,.2f} GB"
        more = (
            "; and reading the lengths of its documents, for their order, as much as the data may be"
            if each["tabled"]
            else ""
        )
        print_line(f"{files}; indexing takes {transfer}{more}" if each["requests"] else f"{files}, on local disks")


def print_table(
    console: Console,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    total: Sequence[str] | None = None,
) -> None:
    """Print a table of names and numbers; if it is too wide, as several, each with the names. No number is wrapped."""
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
    print_line(title, italic=True)
    for group in groups:
        table = new_table("", *(columns[i] for i in (0, *group)))
        table.columns[0].max_width = name
        for column in table.columns[1:]:
            column.no_wrap = True
        for row in rows:
            if row is total:
                table.add_section()
            table.add_row(*(escape(printable(row[i])) for i in (0, *group)))
        console.print(table)


def new_table(title: str, *columns: str) -> Table:
    """A table whose first column is a name and whose others are numbers."""
    table = Table(title=escape(title) or None, title_justify="left", header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    return table


def print_index(report: BuildReport, documents: TablesReport | None, *, ranks: int) -> None:
    """Print what was indexed."""
    console = new_console()
    columns = ("files", "read", "reused", "changed", "added", "removed", "scanned MB", "ranks", "s")
    counts = (report.num_files, report.read, report.reused, len(report.changed), report.added, report.removed)
    row = (*(f"{n:,}" for n in counts), f"{report.scanned_bytes / 1e6:,.1f}", str(ranks), f"{report.seconds:.2f}")
    print_table(console, "index " + report.digest, columns, [row])
    if documents is not None:
        print_line(
            f"document tables: {documents.documents:,} documents, {documents.table_bytes / 1e6:,.1f} MB; "
            f"{documents.counted:,} counted now, {documents.scanned_bytes / 1e6:,.1f} MB scanned, {documents.seconds:.2f} s"
        )
    for name in report.changed:
        print_line(f"changed, read again: {name}")
    for note in report.notes:
        print_line(f"note: {note}")
    for path in report.skipped:
        print_line(f"skipped, cannot be read: {path}")
    by_column: dict[str, list[str]] = {}
    for source, column in report.columns.items():
        if column is not None:
            by_column.setdefault(column, []).append(source)
    for column, sources in by_column.items():
        listed = ", ".join(sources[:5]) + (f" and {len(sources) - 5} more" if len(sources) > 5 else "")
        print_line(f"tokens are read from column {column!r} of {listed}")


def print_built(built: BuildResult, *, ranks: int) -> None:
    """Print what a build indexed, and what the run is committed to now."""
    print_index(built.index, built.documents, ranks=ranks)
    ledger = built.ledger
    if built.stages_before == len(ledger.ends):
        done = "is unchanged"
    elif built.stages_before:
        drain = ledger.stages[-1].drain
        begins = (
            "" if drain is None else f", which begins with a drain of {drain:,} samples (`megablend describe CONFIG`)"
        )
        done = f"was extended: stage {len(ledger.ends) - 1} appended{begins}"
    else:
        done = "is new"
    print_line(f"run {ledger.run!r} {done}: {ledger.ends[-1]:,} samples, plan {ledger.digest}")
    if built.pinned:
        print_line(
            f"run {ledger.run!r} keeps reading index {ledger.index}, which its committed order depends on; "
            f"to use the new index, give the run another name (`run:`)"
        )
    print_problems(built.problems)
    print_warnings(built.warnings)


def print_problems(problems: Sequence[str]) -> None:
    """Print the first few of the files of a run that are missing or changed."""
    for problem in problems[:SHOWN_PROBLEMS]:
        print_line(f"problem: {problem}")
    if len(problems) > SHOWN_PROBLEMS:
        print_line(f"problem: {len(problems) - SHOWN_PROBLEMS:,} more files; `megablend check CONFIG` lists all")


def print_checked(found: CheckDataResult) -> None:
    """Print the smallest and largest token ids of sources, and files that are wrong."""
    console = new_console()
    table = new_table(f"index {found.index}", "source", "files", "tokens", "smallest", "largest", "vocab_size")
    for source in found.sources:
        ends = (source.smallest, source.largest, source.vocab_size)
        numbers = ("" if number is None else f"{number:,}" for number in ends)
        table.add_row(escape(printable(source.name)), f"{source.files:,}", f"{source.tokens:,}", *numbers)
    console.print(table)
    for problem in found.problems:
        print_line(problem)
    counts = {"cannot be read": found.unread, "have token ids out of range": len(found.problems) - found.unread}
    wrong = [f"{count:,} files {what}" for what, count in counts.items() if count]
    print_line("; ".join(wrong) or "all token ids are in range")


def print_warnings(warnings: Sequence[str]) -> None:
    """Print a line for each warning."""
    for warning in warnings:
        print_line(f"warning: {warning}")


def print_sample(found: dict[str, Any], *, whole: bool = False) -> None:
    """Print where a sample comes from, its first and last tokens (or all), and its text if it was decoded."""
    console = new_console()
    epochs = ", ".join(map(str, found["epochs"]))
    print_line(
        f"{found['split']} sample {found['sample']:,}: source {found['source']!r}, ordinal {found['ordinal']:,}, epoch {epochs}"
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
    print_line(f"documents begin at {_shortened(found['document_starts'], whole, ', ')}")
    print_line(f"tokens: {_shortened(found['tokens'], whole)}")
    for name, numbers in found.get("extra", {}).items():
        print_line(f"{name}: {_shortened(numbers, whole)}")
    if "text" in found:
        print_line("text:")
        console.print(printable(found["text"]), markup=False)


def _shortened(numbers: Sequence[Any], whole: bool, between: str = " ") -> str:
    """Numbers as text: the first and last few, and how many there are."""
    if whole or len(numbers) <= SHOWN_FIRST + SHOWN_LAST:
        return between.join(map(str, numbers))
    first, last = (between.join(map(str, some)) for some in (numbers[:SHOWN_FIRST], numbers[-SHOWN_LAST:]))
    return f"{first} ... {last} ({len(numbers):,}; --all prints all)"


def print_drain(console: Console, drain: dict[str, Any]) -> None:
    """Print which samples a drain has, and how its shares differ from those before: of the sources that differ most."""
    samples = drain["stop"] - drain["start"]
    print_line(
        f"samples {drain['start']:,} to {drain['stop']:,}, {samples:,} of {drain['sequence_length']:,} tokens, are a drain: they "
        "continue the stage before, with the rest of what its lanes have begun to read"
    )
    rows = []
    by_difference = sorted(drain["sources"], key=lambda source: -abs(source["share"] - source["share_before"]))
    for source in by_difference[:DRAIN_SOURCES]:
        beyond = source["samples"] - source["share_before"] * samples
        shares = f"{source['share']:.4f}", f"{source['share_before']:.4f}"
        rows.append([source["name"], *shares, f"{source['samples']:,}", f"{beyond:+,.1f}"])
    columns = ["source", "share", "share before", "samples", "beyond its share"]
    left_out = len(by_difference) - len(rows)
    title = "the drain" + (f", without {left_out:,} sources whose shares differ less" if left_out else "")
    print_table(console, title, columns, rows)


def describe_fitting(unit: int) -> str:
    """Which steps fit a run whose samples change."""
    return f"steps (micro batch x ranks, counted from sample 0) fit if they divide {unit:,}"
