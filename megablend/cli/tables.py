"""Results as tables on stdout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megablend.api.build import Built
from megablend.api.check_data import CheckedData

SHOWN_PROBLEMS = 10
"""Files that are missing or changed."""


def new_console() -> Console:
    """A console on stdout, wide enough for names where it is no terminal."""
    console = Console(highlight=False, soft_wrap=True, emoji=False)
    if not console.is_terminal:
        console.width = 160  # a log has no width of its own; do not cut names
    return console


def new_table(title: str, *columns: str) -> Table:
    """A table whose first column is a name and whose others are numbers."""
    table = Table(title=escape(title), title_justify="left", header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    return table


def print_built(built: Built, *, ranks: int) -> None:
    """The closing table of a build, and what became of the run."""
    report, ledger, console = built.index, built.ledger, new_console()
    table = new_table(
        "index " + report.digest, "files", "read", "reused", "changed", "added", "removed", "scanned MB", "ranks", "s"
    )
    counts = (report.read, report.reused, len(report.changed), report.added, report.removed)
    table.add_row(
        f"{report.num_files:,}",
        *(f"{n:,}" for n in counts),
        f"{report.scanned_bytes / 1e6:,.1f}",
        str(ranks),
        f"{report.seconds:.2f}",
    )
    console.print(table)
    if (tables := built.documents) is not None:
        console.print(
            f"tables of {tables.documents:,} documents, {tables.table_bytes / 1e6:,.1f} MB: {tables.counted:,} counted now, "
            f"{tables.scanned_bytes / 1e6:,.1f} MB scanned for it, {tables.seconds:.2f} s",
            markup=False,
        )
    for name in report.changed:
        console.print(f"changed, read again: {name}", markup=False)
    for note in report.notes:
        console.print(f"note: {note}", markup=False)
    for path in report.skipped:
        console.print(f"skipped, cannot be read: {path}", markup=False)
    by_column: dict[str, list[str]] = {}
    for source, column in report.columns.items():
        if column is not None:
            by_column.setdefault(column, []).append(source)
    for column, sources in by_column.items():
        listed = ", ".join(sources[:5]) + (f" and {len(sources) - 5} more" if len(sources) > 5 else "")
        console.print(f"tokens are read from column {column!r} of {listed}", markup=False)
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
    print_problems(console, built.problems)


def print_problems(console: Console, problems: Sequence[str]) -> None:
    """Files that a run needs and that are missing or changed, the first few of them."""
    for problem in problems[:SHOWN_PROBLEMS]:
        console.print(f"problem: {problem}", markup=False)
    if len(problems) > SHOWN_PROBLEMS:
        console.print(f"problem: {len(problems) - SHOWN_PROBLEMS:,} more files; `megablend check CONFIG` lists all")


def print_description(found: dict[str, Any]) -> None:
    """The index and the blend of each split."""
    console, index = new_console(), found["index"]
    table = new_table(
        f"index {index['digest']} in {found['cache']} ({index['index_bytes'] / 1e3:,.1f} kB)",
        *("source", "format", "column", "files", "blocks", "rows", "tokens"),
    )
    for source in index["sources"]:
        numbers = (f"{source[key]:,}" for key in ("files", "blocks", "rows", "tokens"))
        table.add_row(escape(source["name"]), source["format"], escape(source["column_taken"] or ""), *numbers)
    total = (f"{index[key]:,}" for key in ("files", "blocks", "rows", "tokens"))
    table.add_section()
    table.add_row("all", "", "", *total)
    console.print(table)
    for source in index["sources"]:
        for path in source["skipped"]:
            console.print(f"skipped, cannot be read: source {source['name']!r}: {path}", markup=False)
    tables = [
        source["document_table_bytes"] for source in index["sources"] if source["document_table_bytes"] is not None
    ]
    if tables:
        console.print(f"tables of documents: of {len(tables)} sources, {sum(tables) / 1e3:,.1f} kB")
    for split, described in found["splits"].items():
        if "problem" in described:
            console.print(f"{split}: {described['problem']}", markup=False)
            continue
        kind = "blended" if described["blended"] else "one unblended pass"
        _print_split(
            console, f"{split}: {described['samples']:,} samples, {described['tokens']:,} tokens, {kind}", described
        )
        if described.get("steps") == 0:
            console.print(
                f"{split}: {described['samples']:,} samples are fewer than a step takes: a loader gives no batch of them, "
                "but with drop_last=False",
                markup=False,
            )
    stages = ", ".join(f"{end:,}" for end in found["stages"])
    console.print(f"run {found['run']!r}: stages end at sample {stages}; plan {found['plan']}", markup=False)
    print_problems(console, found["problems"])
    if "read_amplification" in found:
        console.print(f"read amplification: {found['read_amplification']:.3f}")
        if found["order"] == "row":
            console.print("order: row reads a whole block for each document; this is what that costs (page: near 1)")


def _print_split(console: Console, title: str, described: dict[str, Any]) -> None:
    columns = ("source", "documents", "tokens", "wanted", "given", "samples", "epochs", "max", "unread of last epoch")
    table = new_table(title, *columns)
    for source in described["sources"]:
        table.add_row(
            escape(source["name"]),
            f"{source['documents']:,}",
            f"{source['tokens']:,}",
            f"{source['share_wanted']:.6f}",
            f"{source['share_given']:.6f}",
            f"{source['samples']:,}",
            f"{source['epochs']:.3f}",
            "" if source["max_epochs"] is None else f"{source['max_epochs']:g}",
            f"{source['unread_tokens_of_last_epoch']:,}",
        )
    console.print(table)
    first = described["first_to_run_out"]
    if first is not None:
        console.print(f"first to begin another epoch: {first['source']!r}, at sample {first['sample']:,}", markup=False)
    elif described["blended"]:
        console.print("no source is read more than once", markup=False)


def print_checked(found: CheckedData) -> None:
    """Smallest and largest tokens of sources, and rows whose tokens are out of range."""
    console = new_console()
    table = new_table(f"index {found.index}", "source", "files", "tokens", "smallest", "largest", "vocab_size")
    for source in found.sources:
        ends = (source.smallest, source.largest, source.vocab_size)
        numbers = ("" if number is None else f"{number:,}" for number in ends)
        table.add_row(escape(source.name), f"{source.files:,}", f"{source.tokens:,}", *numbers)
    console.print(table)
    for problem in found.problems:
        console.print(problem, markup=False)
    console.print(f"{len(found.problems)} files have wrong tokens" if found.problems else "all token ids are in range")


def print_cache(found: dict[str, Any]) -> None:
    """Generations and runs of a cache."""
    console = new_console()
    table = new_table(f"cache {found['cache']}", "index", "sources", "files", "blocks", "rows", "tokens", "kB")
    problems = [each["problem"] for each in [*found["indices"], *found["runs"]] if "problem" in each]
    for index in found["indices"]:
        if "problem" in index:
            continue
        numbers = (f"{index[key]:,}" for key in ("files", "blocks", "rows", "tokens"))
        table.add_row(index["digest"], str(len(index["sources"])), *numbers, f"{index['index_bytes'] / 1e3:,.1f}")
    console.print(table)
    runs = new_table("runs", "run", "samples", "stages", "index", "plan")
    for run in found["runs"]:
        if "problem" not in run:
            stages = run["stages"]
            runs.add_row(escape(run["run"]), f"{stages[-1]:,}", str(len(stages)), run["index"], run["plan"])
    console.print(runs)
    for problem in problems:
        console.print(f"damaged: {problem}", markup=False)


def print_sample(found: dict[str, Any]) -> None:
    """Where a sample comes from, its tokens, and its text where it was decoded."""
    console = new_console()
    epochs = ", ".join(map(str, found["epochs"]))
    console.print(
        f"{found['split']} sample {found['sample']:,}: source {found['source']!r}, ordinal {found['ordinal']:,}, epoch {epochs}",
        markup=False,
    )
    table = new_table("pieces", "file", "block", "byte offset", "tokens of the block", "epoch")
    for piece in found["pieces"]:
        span = f"{piece['first_token']:,} to {piece['stop_token']:,}"
        table.add_row(
            escape(piece["file"]), f"{piece['block']:,}", f"{piece['byte_offset']:,}", span, str(piece["epoch"])
        )
    console.print(table)
    console.print(f"documents begin at {', '.join(map(str, found['document_starts']))}", markup=False)
    console.print("tokens: " + " ".join(map(str, found["tokens"])), markup=False)
    for name, numbers in found.get("extra", {}).items():
        console.print(f"{name}: " + " ".join(map(str, numbers)), markup=False)
    if "text" in found:
        console.print("text:", markup=False)
        console.print(found["text"], markup=False)
