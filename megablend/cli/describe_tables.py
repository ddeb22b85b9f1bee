"""The results of `describe` and `runs` as tables on stdout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from megablend.cli.tables import format_transfer, new_console, print_problems, print_table, print_warnings
from megablend.order.registry import find_order


def print_description(found: dict[str, Any]) -> None:
    """Print the index and the blend of each split."""
    console = new_console()
    if "index" not in found:
        _print_files(console, found)
        return
    _print_indexed(console, found["index"], found["cache"])
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
                f"{split}: {described['samples']:,} samples are fewer than a step needs: a loader yields no batch, "
                "except with drop_last=False",
                markup=False,
            )
    stages = ", ".join(f"{end:,}" for end in found["stages"])
    verb = "end" if found["committed"] else "would end"
    console.print(f"run {found['run']!r}: stages {verb} at sample {stages}; plan {found['plan']}", markup=False)
    for skipped in found["skips"]:
        console.print(
            f"samples {skipped['start']:,} to {skipped['stop']:,} are skipped: {skipped['tokens']:,} tokens stay unread",
            markup=False,
        )
    if found["note"] is not None:
        console.print(f"note: {found['note']}", markup=False)
    if "transfer" in found:
        console.print(f"train reads about {format_transfer(**found['transfer'])} from object stores", markup=False)
    if "read_amplification" in found:
        console.print(f"read amplification: {found['read_amplification']:.3f}")
        if not find_order(found["order"]).consumes_whole_blocks:
            reads = f"order: {found['order']} reads a whole block for each {find_order(found['order']).unit}"
            console.print(f"{reads}, which costs this much (order: page is near 1)")
    print_problems(console, found["problems"])
    print_warnings(console, found["warnings"])


def _print_files(console: Console, found: dict[str, Any]) -> None:
    """Print what is known without an index."""
    rows = [
        (
            source["name"],
            source["format"],
            f"{source['files']:,}",
            f"{source['bytes'] / 1e6:,.1f}",
            ""
            if source["share"] is None
            else " ".join(
                f"{unit} {value if isinstance(value, str) else format(value, 'g')}"
                for unit, value in source["share"].items()
            ),
        )
        for source in found["files"]
    ]
    print_table(console, f"run {found['run']!r}", ("source", "format", "files", "MB", "requested"), rows)
    _print_left_out(console, found)
    console.print(f"note: {found['note']}", markup=False)


def _print_indexed(console: Console, index: dict[str, Any], cache: str) -> None:
    columns = ("files", "blocks", "rows", "tokens")
    rows = [
        (source["name"], source["format"], source["column_taken"] or "", *(f"{source[key]:,}" for key in columns))
        for source in index["sources"]
    ]
    total = ("all", "", "", *(f"{index[key]:,}" for key in columns))
    title = f"index {index['digest']} in {cache} ({index['index_bytes'] / 1e3:,.1f} kB)"
    print_table(console, title, ("source", "format", "column", *columns), rows, total=total)
    _print_left_out(console, index)
    for source in index["sources"]:
        for path in source["skipped"]:
            console.print(f"skipped, cannot be read: source {source['name']!r}: {path}", markup=False)
    tables = [
        source["document_table_bytes"] for source in index["sources"] if source["document_table_bytes"] is not None
    ]
    if tables:
        console.print(f"document tables: {len(tables):,} sources, {sum(tables) / 1e3:,.1f} kB")


def _print_split(console: Console, title: str, described: dict[str, Any]) -> None:
    columns = ("source", "documents", "tokens", "requested", "actual", "samples", "epochs", "max", "left in epoch")
    rows = [
        (
            source["name"],
            f"{source['documents']:,}",
            f"{source['tokens']:,}",
            f"{source['requested_share']:.6f}",
            f"{source['actual_share']:.6f}",
            f"{source['samples']:,}",
            f"{source['epochs']:,.3f}",
            "" if source["max_epochs"] is None else f"{source['max_epochs']:g}",
            f"{source['tokens_left_in_epoch']:,}",
        )
        for source in described["sources"]
    ]
    print_table(console, title, columns, rows)
    _print_left_out(console, described)
    first = described["first_repeated_source"]
    if first is not None:
        console.print(f"first source to repeat: {first['source']!r}, at sample {first['sample']:,}", markup=False)
    elif described["blended"]:
        console.print("no source is read more than once", markup=False)


def _print_left_out(console: Console, table: dict[str, Any]) -> None:
    if n := table.get("sources_left_out"):
        console.print(f"and {n:,} more sources (--top 0 shows all; --sort and --match select)")


def print_cache(found: dict[str, Any]) -> None:
    """Print the indexes and runs of a cache."""
    console = new_console()
    columns = ("files", "blocks", "rows", "tokens")
    rows = [
        (
            index["digest"],
            str(len(index["sources"])),
            *(f"{index[key]:,}" for key in columns),
            f"{index['index_bytes'] / 1e3:,.1f}",
        )
        for index in found["indices"]
        if "problem" not in index
    ]
    print_table(console, f"cache {found['cache']}", ("index", "sources", *columns, "kB"), rows)
    print_runs(console, found["runs"])
    for index in found["indices"]:
        if "problem" in index:
            console.print(f"damaged: {index['problem']}", markup=False)


def print_runs(console: Console, runs: Sequence[dict[str, Any]]) -> None:
    """Print the runs of a cache, and which ledgers are damaged."""
    rows = [
        (run["run"], f"{run['stages'][-1]:,}", str(len(run["stages"])), run["index"], run["plan"])
        for run in runs
        if "problem" not in run
    ]
    print_table(console, "runs", ("run", "samples", "stages", "index", "plan"), rows)
    for run in runs:
        if "problem" in run:
            console.print(f"damaged: {run['problem']}", markup=False)
        elif not run["index_exists"]:
            console.print(f"run {run['run']!r} reads index {run['index']}, which does not exist", markup=False)


def print_run(found: dict[str, Any]) -> None:
    """Print what a run is committed to."""
    console, blend = new_console(), dict(found["blend"])
    sources = blend.pop("sources")
    keys = list(dict.fromkeys(key for source in sources for key in source if key != "name"))
    rows = [
        (source["name"], *("" if source.get(key) is None else str(source[key]) for key in keys)) for source in sources
    ]
    print_table(console, f"run {found['run']!r}", ("source", *(key.replace("_", " ") for key in keys)), rows)
    for key, value in blend.items():
        console.print(f"{key.replace('_', ' ')}: {value}", markup=False)
    gone = "" if found["index_exists"] else " (which does not exist)"
    console.print(f"index {found['index']}{gone}", markup=False)
    stages = ", ".join(f"{end:,}" for end in found["stages"])
    console.print(f"stages end at sample {stages}; plan {found['plan']}", markup=False)
