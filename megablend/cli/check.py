"""megablend check: are the data files of a run there, and unchanged?"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import click


@click.command()
@click.argument("config")
@click.option("--cache", metavar="DIR", help="Cache folder, in place of the config's.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def check(config: str, cache: str | None, as_json: bool) -> None:
    """Check that all data files of CONFIG's run exist, with the sizes and times that were indexed. Exits with 3 otherwise."""
    from megablend.api.check import check as check_config
    from megablend.cli.progress import progress_on

    with progress_on(sys.stderr, doing="checking", done="checked") as progress:
        found = check_config(config, cache=cache, progress=progress)
    if as_json:
        click.echo(json.dumps(asdict(found)))
    else:
        for problem in found.problems:
            click.echo(problem)
        told = f"{len(found.problems):,} missing or changed" if found.problems else "all as indexed"
        click.echo(f"{found.files:,} files of index {found.index}: {told}")
    if found.problems:
        sys.exit(3)
