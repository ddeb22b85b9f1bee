"""The commands `megablend check`, `verify` and `gc`, which check that data files and the cache are
unchanged, and remove unneeded parts of the cache."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from megablend.cli.options import (
    FirstRankCommand,
    as_json,
    command,
    finish,
    in_cache,
    of_what,
    read_state,
)
from megablend.cli.output import print_json, print_line, print_lines, print_table
from megablend.errors import CacheError, ConfigError

if TYPE_CHECKING:
    from megablend.operations.check import CheckResult
    from megablend.operations.check_data import CheckDataResult
    from megablend.operations.gc import GcResult
    from megablend.operations.verify import VerifyResult


@command()
@click.argument("config")
@click.option(
    "--data",
    is_flag=True,
    help="Also read all tokens: print each source's smallest and largest ids, and ids outside the vocabulary.",
)
@click.option(
    "--state",
    metavar="FILE",
    help="A checkpoint's state as JSON; files that only earlier samples need may be missing.",
)
@click.option(
    "--micro-batch",
    type=click.IntRange(1),
    help="Micro-batch size: also check that its steps fit the run from the state's position on.",
)
@click.option(
    "--ranks",
    "--data-parallel",
    type=click.IntRange(1),
    help="Number of data-parallel ranks; needs --micro-batch.  [default: 1]",
)
@in_cache
@as_json
def check(
    config: str,
    data: bool,
    state: str | None,
    micro_batch: int | None,
    ranks: int | None,
    cache: str | None,
    as_json: bool,
) -> None:
    """Check that CONFIG's data files exist and are unchanged.

    Their sizes must match the index. If a file's times have changed, 64 KiB of it are compared
    with the index, and a warning is printed. CONFIG must match the committed run. Exits with status
    3 if a check fails.
    """
    from megablend.cli.progress import progress_on
    from megablend.operations.check import check as check_files
    from megablend.operations.check_data import check_data

    if ranks is not None and micro_batch is None:
        raise click.UsageError(
            f"--ranks {ranks} needs --micro-batch: without it no steps are checked"
        )
    with progress_on(sys.stderr, doing="checking", done="checked") as progress:
        files = check_files(
            config,
            cache=cache,
            state=None if state is None else read_state(state),
            micro_batch_size=micro_batch,
            data_parallel_size=ranks or 1,
            progress=progress,
        )
    tokens = None
    if data and not files.problems:
        with progress_on(sys.stderr, doing="reading", done="read") as progress:
            tokens = check_data(config, cache=cache, progress=progress)
    if as_json:
        print_json(files.to_dict() | ({"data": tokens.to_dict()} if tokens else {}))
    else:
        _print_checked(files)
        if tokens is not None:
            _print_tokens(tokens)
    if files.has_problems or (tokens is not None and tokens.problems):
        sys.exit(3)


def _print_checked(files: CheckResult) -> None:
    """Print problems, warnings, and a summary of the files and the run."""
    print_lines(files.problems)
    for problem in files.older_problems:
        print_line(
            f"note: {problem}; pass `--state FILE` to see whether a checkpoint still needs it"
        )
    print_lines(files.warnings, "warning: ")
    result = f"{len(files.problems):,} missing or changed" if files.problems else "all unchanged"
    print_line(f"{files.files:,} files of index {files.index}: {result}")
    print_lines(line for line in (files.uncommitted, files.unfit_steps) if line is not None)


def _print_tokens(found: CheckDataResult) -> None:
    """Print each source's smallest and largest token id, and the files with ids out of range."""
    columns = {
        "source": "name",
        "files": "files",
        "tokens": "tokens",
        "smallest": "smallest",
        "largest": "largest",
        "vocab_size": "vocab_size",
    }
    print_table(f"index {found.index}", columns, found.sources)
    print_lines(found.problems)
    counts = {
        "cannot be read": found.unread,
        "have token ids out of range": len(found.problems) - found.unread,
    }
    wrong = [f"{count:,} files {what}" for what, count in counts.items() if count]
    print_line("; ".join(wrong) or "all token ids are in range")


@command()
@of_what
@click.option("--data", is_flag=True, help="Also read every block of every data file.")
@click.option(
    "--text",
    type=click.IntRange(1),
    metavar="N",
    help="Also tokenise N documents of each text source again, and compare their tokens.",
)
@as_json
def verify(what: str, data: bool, text: int | None, as_json: bool) -> None:
    """Check the checksums, counts and runs of a cache.

    With --data, also check all data files. Exits with status 3 if anything is wrong.
    """
    from megablend.cli.progress import progress_on
    from megablend.operations.session import Session
    from megablend.operations.verify import verify as verify_cache

    cache = Session(what).cache
    if not cache.folder.is_dir():
        if Path(what).is_file():
            raise CacheError(
                f"{what}: its cache {cache.location} does not exist yet; `megablend build {what}` creates it"
            )
        raise ConfigError(
            f"{what}: no such folder; expected a config, or a cache filled by `megablend build`"
        )
    with progress_on(sys.stderr, doing="verifying", done="verified") as progress:
        result = verify_cache(what, data=data, progress=progress, text=text or 0)
    finish(result, as_json, _print_verified)
    if result.problems:
        sys.exit(3)


def _print_verified(result: VerifyResult) -> None:
    """Print problems, notes, and whether the cache is intact."""
    print_lines(result.problems)
    print_lines(result.notes, "note: ")
    print_line(
        f"{result.cache}: {f'{len(result.problems):,} problems' if result.problems else 'OK'}"
    )


@command(cls=FirstRankCommand)
@of_what
@click.option("--dry-run", is_flag=True, help="Only print what would be removed.")
@click.option(
    "--older-than",
    metavar="DAYS",
    type=click.FloatRange(min=0),
    default=7.0,
    show_default=True,
    help="Keep anything used within the last DAYS days; must be longer than any job that reads an index directly.",
)
@click.option(
    "--tokens",
    is_flag=True,
    help="Also remove tokens made from the config's text that no index of this cache needs.",
)
@as_json
def gc(what: str, dry_run: bool, older_than: float, tokens: bool, as_json: bool) -> None:
    """Remove unneeded files from a cache.

    Removes old indexes that no run uses, and fragments that no index uses.
    """
    from megablend.operations.gc import gc as collect

    found = collect(what, older_than_days=older_than, dry_run=dry_run, tokens=tokens)
    finish(found, as_json, _print_collected)


def _print_collected(found: GcResult) -> None:
    """Print the indexes and token files that are removed, and the totals."""
    verb = "would remove" if found.dry_run else "removed"
    print_lines(found.removed, f"{verb}: index ")
    print_lines(found.token_files, f"{verb}: tokens ")
    print_line(
        f"{found.cache}: {verb}: {len(found.removed)} indexes, {found.other_files} fragments and tables, "
        f"{found.bytes / 1e6:,.1f} MB; {len(found.kept)} indexes kept"
    )
