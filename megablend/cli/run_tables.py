"""The runs of a cache as tables on stdout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from megablend.cli.lines import print_line
from megablend.cli.tables import new_console, print_table

_CHANGES = 20
"""Changes of a stage that are printed."""


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
            print_line(f"damaged: {index['problem']}")


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
            print_line(f"damaged: {run['problem']}")
        elif not run["index_exists"]:
            print_line(f"run {run['run']!r} reads index {run['index']}, which does not exist")


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
        print_line(f"{key.replace('_', ' ')}: {value}")
    gone = "" if found["index_exists"] else " (which does not exist)"
    print_line(f"index {found['index']}{gone}")
    stages = ", ".join(f"{end:,}" for end in found["stages"])
    print_line(f"stages end at sample {stages}; plan {found['plan']}")
    for number, stage in enumerate(found["chain"][1:], 1):
        drain = f", the first {stage['drain']:,} of them a drain" if "drain" in stage else ""
        print_line(f"stage {number}, samples {stage['start']:,} to {stage['stop']:,}{drain}, changes:")
        for change in stage["changes"][:_CHANGES]:
            print_line(f"  {change['what']}: {change['before']} -> {change['after']}")
        if (more := len(stage["changes"]) - _CHANGES) > 0:
            print_line(f"  and {more:,} more (--json)")
