"""megablend diff: where two runs diverge, and how they differ."""

from __future__ import annotations

from typing import Any

import click

from megablend.cli.lines import print_line
from megablend.cli.options import as_json, print_json

SHOWN = 30
"""Number of differences that are printed; JSON has all."""


@click.command()
@click.argument("a", metavar="A", type=click.Path(exists=True))
@click.argument("b", metavar="B", type=click.Path(exists=True))
@as_json
def diff(a: str, b: str, as_json: bool) -> None:
    """Compare two runs: from which sample on they differ, and how.

    A and B are each a config (planned as `build` would), a run's ledger (runs/NAME.json of a cache) or a checkpoint's state saved
    as JSON.
    """
    from megablend.api.diff import diff as compare

    found = compare(a, b).to_dict()
    if as_json:
        print_json(found)
    else:
        _print_diff(found)


def _print_diff(found: dict[str, Any]) -> None:
    for each in found["differences"][:SHOWN]:
        print_line(f"{each['what']}: {_short(each['a'])} | {_short(each['b'])}")
    if (more := len(found["differences"]) - SHOWN) > 0:
        print_line(f"and {more} more differences; --json has all")
    fewer, least = min(found["samples"]), f"{found['agrees_up_to']:,}"
    if "parts_at" not in found:
        same = not found["differences"]
        text = "the plans are the same" if same else f"the plans are known to be the same up to sample {least}"
    elif found["parts_at"] is not None:
        text = f"the same up to sample {found['parts_at']:,}, which differs"
    elif len(set(found["samples"])) == 1:
        text = f"all {fewer:,} samples are the same"
    else:
        text = f"the same up to sample {fewer:,}, where one of them ends"
    print_line(text)


def _short(value: object) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
