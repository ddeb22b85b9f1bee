"""megablend check: do the data files of a run exist unchanged, and with --data are all token ids in the vocabulary?"""

from __future__ import annotations

import sys

import click

from megablend.cli.lines import print_line
from megablend.cli.options import as_json, in_cache, print_json


@click.command()
@click.argument("config")
@click.option(
    "--data",
    is_flag=True,
    help="Also read all tokens: print the smallest and largest id of each source, and ids outside the vocabulary.",
)
@click.option(
    "--state",
    metavar="FILE",
    help="A checkpoint's state as JSON: files that only earlier samples read need not exist.",
)
@click.option(
    "--micro-batch",
    type=click.IntRange(1),
    help="Also check that steps of this micro batch fit the run, from the state's position on.",
)
@click.option(
    "--ranks",
    "--data-parallel",
    type=click.IntRange(1),
    default=1,
    help="Number of data-parallel ranks of these steps.",
)
@in_cache
@as_json
def check(
    config: str,
    data: bool,
    state: str | None,
    micro_batch: int | None,
    ranks: int,
    cache: str | None,
    as_json: bool,
) -> None:
    """Check that all data files of CONFIG's run exist, with the sizes and times that were indexed. Exits with 3 if not."""
    from megablend.api.check import check as check_files
    from megablend.api.check_data import check_data
    from megablend.api.read_state import read_state
    from megablend.cli.progress import progress_on
    from megablend.cli.tables import print_checked

    with progress_on(sys.stderr, doing="checking", done="checked") as progress:
        files = check_files(
            config,
            cache=cache,
            state=None if state is None else read_state(state),
            micro_batch_size=micro_batch,
            data_parallel_size=ranks,
            progress=progress,
        )
    tokens = None
    if data and not files.problems:
        with progress_on(sys.stderr, doing="reading", done="read") as progress:
            tokens = check_data(config, cache=cache, progress=progress)
    if as_json:
        print_json(files.to_dict() | ({"data": tokens.to_dict()} if tokens else {}))
    else:
        for problem in files.problems:
            print_line(problem)
        for problem in files.older_problems:
            print_line(f"note: {problem}; `--state FILE` says whether a checkpoint still needs it")
        for warning in files.warnings:
            print_line(f"warning: {warning}")
        result = f"{len(files.problems):,} missing or changed" if files.problems else "all as indexed"
        print_line(f"{files.files:,} files of index {files.index}: {result}")
        if files.unfit_steps is not None:
            print_line(files.unfit_steps)
        if tokens is not None:
            print_checked(tokens)
    if files.problems or files.unfit_steps is not None or (tokens is not None and tokens.problems):
        sys.exit(3)
