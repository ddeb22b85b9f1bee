"""megablend find: at which samples a file or a document is read."""

from __future__ import annotations

from typing import Any

import click

from megablend.cli.lines import print_line
from megablend.cli.options import as_json, in_cache, of_run, of_split, print_json

SHOWN = 20
"""Samples of each source that are listed, unless all are requested."""


@click.command()
@click.argument("what", metavar="CONFIG|CACHE")
@click.argument("place", metavar="FILE[:ROW]")
@of_run
@of_split
@click.option(
    "--batch", type=click.IntRange(1), help="Global batch size (samples of a step, over all ranks); also prints steps."
)
@click.option(
    "--limit", type=click.IntRange(1), help=f"Number of samples to list.  [default: {SHOWN} in tables, all in JSON]"
)
@click.option("--all", "whole", is_flag=True, help="List all samples.")
@in_cache
@as_json
def find(
    what: str,
    place: str,
    run: str | None,
    split: str,
    batch: int | None,
    limit: int | None,
    whole: bool,
    cache: str | None,
    as_json: bool,
) -> None:
    """List the samples in which a run reads a data file, or one of its rows (counted from 0).

    FILE is the path of a data file, or enough of the end of the path that was indexed to be the only one.
    """
    from megablend.api.find import find as find_samples

    if limit is None and not whole and not as_json:
        limit = SHOWN
    file, row = split_place(place)
    found = find_samples(what, file, row, run=run, split=split, batch_size=batch, limit=limit, cache=cache).to_dict()
    if as_json:
        print_json(found)
    else:
        _print_found(found)


def split_place(place: str) -> tuple[str, int | None]:
    """A file, and the row after its last colon, if that is a number."""
    file, colon, row = place.rpartition(":")
    return (file, int(row)) if colon and row.isascii() and row.isdigit() else (place, None)


def _print_found(found: dict[str, Any]) -> None:
    from megablend.cli.tables import new_console, print_table

    console = new_console()
    for each in found["found"]:
        row = "" if each["row"] is None else f" row {each['row']:,}"
        title = f"{each['file']}{row}: {each['tokens']:,} tokens in {found['split']}, source {each['source']!r}"
        if not each["samples"]:
            print_line(f"{title}: no sample of run {found['run']!r} reads it")
            continue
        steps = "step" in each["samples"][0]
        columns = ("sample", *(["step"] if steps else []), "epoch", "tokens of the sample", "offset")
        rows = [
            (
                f"{sample['sample']:,}",
                *(["skipped" if sample["skipped"] else f"{sample['step']:,}"] if steps else []),
                str(sample["epoch"]),
                ", ".join(f"{piece['first_token']:,} to {piece['stop_token']:,}" for piece in sample["pieces"]),
                ", ".join(f"{piece['offset']:,}" for piece in sample["pieces"]),
            )
            for sample in each["samples"]
        ]
        print_table(console, title, columns, rows)
        if not each["complete"]:
            print_line(f"more samples follow; --all lists all (run {found['run']!r})")
