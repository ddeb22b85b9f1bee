"""megablend export: the order of a run as Parquet."""

from __future__ import annotations

import click

from megablend.cli.lines import print_line
from megablend.cli.options import as_json, in_cache, of_run, of_split, print_json


@click.command()
@click.argument("what", metavar="CONFIG|CACHE")
@click.argument("target", metavar="FILE")
@click.option("--from", "start", type=click.IntRange(0), default=0, show_default=True, help="First sample.")
@click.option("--to", "stop", type=click.IntRange(0), help="Sample to stop before.  [default: the run's end]")
@of_run
@of_split
@in_cache
@as_json
def export(
    what: str,
    target: str,
    start: int,
    stop: int | None,
    run: str | None,
    split: str,
    cache: str | None,
    as_json: bool,
) -> None:
    """Write the order of a run to a Parquet FILE: for each sample its source, epoch and pieces (file, block, tokens)."""
    from megablend.api.export import export as export_order

    written = export_order(what, target, start=start, stop=stop, run=run, split=split, cache=cache)
    if as_json:
        print_json(written)
    else:
        print_line(
            f"{written['file']}: samples {written['start']:,} to {written['stop']:,} of run {written['run']!r}, "
            f"{written['bytes'] / 1e6:,.1f} MB"
        )
