"""The results of `describe` as tables on stdout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from megablend.cli.lines import print_line, printable
from megablend.cli.tables import (
    describe_fitting,
    format_transfer,
    new_console,
    print_drain,
    print_problems,
    print_table,
    print_warnings,
)
from megablend.order.registry import find_order
from megablend.prefetch.memory_budget import format_bytes

STAGES = 12
"""Stages that are printed."""


def print_description(found: dict[str, Any]) -> None:
    """Print the index and the blend of each split."""
    console = new_console()
    if "index" not in found:
        _print_files(console, found)
        return
    _print_indexed(console, found["index"], found["cache"])
    for split, described in found["splits"].items():
        if "problem" in described:
            print_line(f"{split}: {described['problem']}")
            continue
        kind = "blended" if described["blended"] else "one unblended pass"
        _print_split(
            console, f"{split}: {described['samples']:,} samples, {described['tokens']:,} tokens, {kind}", described
        )
    stages = ", ".join(f"{end:,}" for end in found["stages"])
    verb = "end" if found["committed"] else "would end"
    print_line(f"run {found['run']!r}: stages {verb} at sample {stages}; plan {found['plan']}")
    for skipped in found["skips"]:
        print_line(
            f"samples {skipped['start']:,} to {skipped['stop']:,} are skipped: {skipped['tokens']:,} tokens are not read"
        )
    if found["note"] is not None:
        print_line(f"note: {found['note']}")
    print_line(f"opening train takes {found['opening_seconds'] * 1e3:,.1f} ms, apart from imports and kernels")
    if "transfer" in found:
        by = "" if "read_amplification" in found else " with one loader"
        print_line(f"reading train from object stores takes {format_transfer(found['transfer'])}{by}")
    if "read_amplification" in found:
        print_line(f"read amplification: {found['read_amplification']:.3f}")
        _print_memory(found)
        if not find_order(found["order"]).consumes_whole_blocks:
            reads = f"order: {found['order']} reads a whole block for each {find_order(found['order']).unit}"
            print_line(f"{reads}, which costs this much (order: block is near 1)")
    if "fitting_unit" in found:
        print_line(describe_fitting(found["fitting_unit"]))
    print_problems(found["problems"])
    print_warnings(found["warnings"])
    if "full_share_stages" in found:
        print_line("to read sources at their full shares until they run out instead, without on_exhausted:")
        console.print(printable(found["full_share_stages"]), markup=False, end="")


def _print_memory(found: dict[str, Any]) -> None:
    needed, limit = (format_bytes(found[name]) for name in ("memory_per_rank", "memory_limit_per_rank"))
    print_line(f"memory of a rank: at least {needed} of {limit} that `memory` allows")
    if "most_lanes" in found:
        print_line(f"lanes: {found['lanes']:,}; at most {found['most_lanes']:,} suit these loaders and `memory`")


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
    _print_left_out(found)
    print_line(f"note: {found['note']}")


def _print_indexed(console: Console, index: dict[str, Any], cache: str) -> None:
    columns = ("files", "blocks", "rows", "tokens")
    rows = [
        (source["name"], source["format"], source["column_taken"] or "", *(f"{source[key]:,}" for key in columns))
        for source in index["sources"]
    ]
    total = ("all", "", "", *(f"{index[key]:,}" for key in columns))
    title = f"index {index['digest']} in {cache} ({index['index_bytes'] / 1e3:,.1f} kB)"
    print_table(console, title, ("source", "format", "column", *columns), rows, total=total)
    _print_left_out(index)
    for source in index["sources"]:
        for path in source["skipped"]:
            print_line(f"skipped, cannot be read: source {source['name']!r}: {path}")
    tables = [
        source["document_table_bytes"] for source in index["sources"] if source["document_table_bytes"] is not None
    ]
    if tables:
        print_line(f"document tables: {len(tables):,} sources, {sum(tables) / 1e3:,.1f} kB")


def _print_split(console: Console, title: str, described: dict[str, Any]) -> None:
    columns = (
        "source",
        "requested",
        "actual",
        "samples",
        "tokens read",
        "epochs",
        "max",
        "documents",
        "tokens",
        "left in epoch",
        "first sample",
        "last sample",
        "epoch 0 ends",
        "worst error",
        "stored MB",
    )
    is_blended = described["blended"]  # else nobody requested shares, and the sources follow one another
    rows = [
        (
            source["name"],
            f"{source['requested_share']:.6f}" if is_blended else "",
            f"{source['actual_share']:.6f}",
            f"{source['samples']:,}",
            f"{source['tokens_read']:,}",
            f"{source['epochs']:,.3f}",
            _cap(source),
            f"{source['documents']:,}",
            f"{source['tokens']:,}",
            f"{source['tokens_left_in_epoch']:,}",
            _number(source["first_sample"]),
            _number(source["last_sample"]),
            _number(next(iter(source["epoch_ends"]), None)),
            f"{source['worst_prefix_error']:.2f}" if is_blended else "",
            f"{source['stored_bytes'] / 1e6:,.1f}",
        )
        for source in described["sources"]
    ]
    print_table(console, title, columns, rows)
    _print_left_out(described)
    if "stages" in described:
        _print_stages(console, title.partition(":")[0], described["stages"])
    for source in described["sources"]:
        if "withdrawn_tokens" in source:
            tokens = f"{source['withdrawn_tokens']:,} tokens of withdrawn files are not read"
            print_line(f"source {source['name']!r}: {tokens} in the epoch in which they were withdrawn")
    first = described["first_repeated_source"]
    if first is not None:
        print_line(
            f"first source to begin epoch 1, which reads its tokens again: {first['source']!r}, at sample {first['sample']:,}"
        )
    elif described["blended"]:
        print_line("no source begins epoch 1: no token is read twice")


def _cap(source: dict[str, Any]) -> str:
    """The smaller cap of a source, as epochs or as tokens."""
    if source["max_tokens"] is None:
        return "" if source["max_epochs"] is None else f"{source['max_epochs']:g}"
    by_epochs = None if source["max_epochs"] is None else source["max_epochs"] * source["tokens"]
    is_tokens = by_epochs is None or source["max_tokens"] <= by_epochs
    return f"{source['max_tokens']:,} tokens" if is_tokens else f"{source['max_epochs']:g}"


def _number(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def _print_stages(console: Console, split: str, stages: Sequence[dict[str, Any]]) -> None:
    """Print which sources change their shares where; at most the first STAGES stages."""
    before: dict[str, float] = {}
    for number, stage in enumerate(stages[:STAGES]):
        shares = {source["name"]: source["share"] for source in stage["sources"]}
        rows = [
            (
                source["name"],
                f"{source['share']:.6f}",
                f"{source['actual_share']:.6f}",
                f"{source['samples']:,}",
                f"{source['tokens']:,}",
                _number(source["first_sample"]),
                _number(source["last_sample"]),
                f"{source['worst_prefix_error']:.2f}",
            )
            for source in stage["sources"]
            if shares[source["name"]] != before.get(source["name"])
        ]
        title = (
            f"{split}, stage {number}: samples {stage['start']:,} to {stage['stop']:,} of {stage['sequence_length']:,} "
            f"tokens, {stage['lanes']:,} lanes"
        )
        columns = (
            "changed source",
            "share",
            "actual",
            "samples",
            "tokens",
            "first sample",
            "last sample",
            "worst error",
        )
        if rows:
            print_table(console, title, columns, rows)
        else:
            print_line(f"{title}; all shares as before{', after a drain' if 'drain' in stage else ''}")
        if "drain" in stage:
            print_drain(console, stage["drain"])
        before = shares
    if len(stages) > STAGES:
        print_line(f"and {len(stages) - STAGES:,} more stages (--json has all)")


def _print_left_out(table: dict[str, Any]) -> None:
    if n := table.get("sources_left_out"):
        print_line(f"and {n:,} more sources (--top 0 shows all; --sort and --match select)")
