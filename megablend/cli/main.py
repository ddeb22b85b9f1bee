"""The commands, and how they end.

Results go to stdout (a table, or with --json one JSON object, for errors too), everything else to stderr. Exit codes: 0 done;
1 the reader of stdout ended early; 2 usage, config, blend, state or launcher; 3 data, cache or system; 70 a bug of megablend; 130
interrupted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import NoReturn

import click

from megablend import __version__
from megablend.cli.amend import amend
from megablend.cli.check import check
from megablend.cli.describe import describe
from megablend.cli.diff import diff
from megablend.cli.export import export
from megablend.cli.find import find
from megablend.cli.lines import print_line, printable
from megablend.cli.megatron_cache import megatron_cache
from megablend.cli.options import as_json, in_cache, print_json
from megablend.cli.runs import runs
from megablend.cli.show import show
from megablend.cli.skip import skip
from megablend.errors import CacheError, ConfigError, MegablendError
from megablend.system.failures import translate

EXIT_USAGE, EXIT_BUG, EXIT_INTERRUPTED = 2, 70, 130


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """Index token files, blend them, and read them as training batches."""


@cli.command()
@click.argument("config")
@click.option(
    "--dry-run", is_flag=True, help="Report what indexing would request from object stores, without building."
)
@in_cache
@click.option(
    "--checksums",
    is_flag=True,
    help="Also make checksums of all blocks (reads all data once) for remote reads.",
)
@as_json
def build(config: str, dry_run: bool, cache: str | None, checksums: bool, as_json: bool) -> None:
    """Index the files that CONFIG lists and write its run's ledger. Under mpirun, srun or torchrun the ranks share the work."""
    if dry_run:
        _print_dry_run(config, cache, as_json)
        return
    from megablend.api.build import build as build_run
    from megablend.cli.progress import progress_on
    from megablend.distributed.find_job import program_launch

    with program_launch() as launch, progress_on(sys.stderr, quiet=launch.rank != 0) as progress:
        built = build_run(config, cache=cache, progress=progress, launch=launch, checksums=checksums)
    if launch.rank != 0:
        return
    if as_json:
        print_json(built.to_dict())
    else:
        from megablend.cli.tables import print_built

        print_built(built, ranks=launch.size)
    if built.problems:
        sys.exit(3)


def _print_dry_run(config: str, cache: str | None, as_json: bool) -> None:
    from megablend.api.dry_run import dry_run
    from megablend.distributed.launch import detect

    if detect().rank != 0:
        return
    found = [each.to_dict() for each in dry_run(config, cache=cache)]
    if as_json:
        print_json({"sources": found})
    else:
        from megablend.cli.tables import print_dry_run

        print_dry_run(found)


@cli.command()
@click.argument("config")
@in_cache
@as_json
def index(config: str, cache: str | None, as_json: bool) -> None:
    """Index the files that CONFIG lists without committing a run; `describe` then reports what a run would read."""
    from megablend.api.build import build_index
    from megablend.cli.progress import progress_on
    from megablend.distributed.find_job import program_launch

    with program_launch() as launch, progress_on(sys.stderr, quiet=launch.rank != 0) as progress:
        built = build_index(config, cache=cache, progress=progress, launch=launch)
    if launch.rank != 0:
        return
    if as_json:
        print_json(built.to_dict())
    else:
        from megablend.cli.tables import print_index

        print_index(built.index, built.documents, ranks=launch.size)


@cli.command()
@click.argument("what", metavar="CONFIG|CACHE")
@click.option("--data", is_flag=True, help="Read every block of every data file, too.")
@as_json
def verify(what: str, data: bool, as_json: bool) -> None:
    """Check a cache: checksums, counts, runs, and with --data all data files. Exits with 3 if anything is wrong."""
    from megablend.api.runs import resolve_cache
    from megablend.api.verify import verify as verify_cache
    from megablend.cli.progress import progress_on

    cache = resolve_cache(what)
    if not cache.folder.is_dir():
        if Path(what).is_file():
            raise CacheError(
                f"{what}: its cache {cache.location} does not exist yet; `megablend build {what}` makes it"
            )
        raise ConfigError(f"{what}: found no such folder, expected a config, or a cache that `megablend build` filled")
    with progress_on(sys.stderr, doing="verifying", done="verified") as progress:
        result = verify_cache(what, data=data, progress=progress)
    if as_json:
        print_json(result.to_dict())
    else:
        for problem in result.problems:
            print_line(problem)
        for note in result.notes:
            print_line(f"note: {note}")
        print_line(f"{cache.location}: {f'{len(result.problems):,} problems' if result.problems else 'OK'}")
    if result.problems:
        sys.exit(3)


@cli.command()
@click.argument("what", metavar="CONFIG|CACHE")
@click.option("--dry-run", is_flag=True, help="Remove nothing, only print what would be removed.")
@click.option(
    "--older-than",
    metavar="DAYS",
    type=click.FloatRange(min=0),
    default=7.0,
    show_default=True,
    help="Keep anything used within the last DAYS days; set this longer than your longest job that reads an index directly.",
)
@as_json
def gc(what: str, dry_run: bool, older_than: float, as_json: bool) -> None:
    """Remove from a cache what is no longer needed: old indexes that no run uses, and fragments that no index uses."""
    from megablend.api.gc import gc as collect
    from megablend.api.runs import resolve_cache

    cache = resolve_cache(what).location
    found = collect(what, older_than_days=older_than, dry_run=dry_run)
    if as_json:
        print_json(found.to_dict())
        return
    verb = "would remove" if dry_run else "removed"
    for digest in found.removed:
        print_line(f"{verb}: index {digest}")
    print_line(
        f"{cache}: {verb}: {len(found.removed)} indexes, {found.other_files} fragments and tables, "
        f"{found.bytes / 1e6:,.1f} MB; {len(found.kept)} indexes kept"
    )


cli.add_command(amend)
cli.add_command(check)
cli.add_command(describe)
cli.add_command(diff)
cli.add_command(export)
cli.add_command(find)
cli.add_command(megatron_cache)
cli.add_command(runs)
cli.add_command(show)
cli.add_command(skip)


class _WarningPrinter(logging.Handler):
    """Prints warnings of the package on stderr, one line each."""

    def emit(self, record: logging.LogRecord) -> None:
        _say(record.getMessage())


_TO_STDERR = _WarningPrinter(logging.WARNING)


def main() -> NoReturn:
    """Entry point of `megablend` and `python -m megablend`."""
    _open_closed_streams()
    logging.getLogger("megablend").addHandler(_TO_STDERR)
    try:
        cli.main(standalone_mode=False)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except click.ClickException as error:
        with contextlib.suppress(OSError):
            error.show()
        _end("UsageError", error.format_message(), EXIT_USAGE)
    except MegablendError as error:
        _say(str(error))
        _end(type(error).__name__, str(error), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        _say("interrupted")
        _end("Interrupted", "interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:  # the reader of stdout has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if (translated := translate(error, " ".join(sys.argv[1:3]))) is not None:
            _say(str(translated))
            _end(type(translated).__name__, str(translated), translated.exit_code)
        traceback.print_exc()
        _say("the above is a bug of megablend: please report it, with the command and the traceback")
        _end(type(error).__name__, str(error), EXIT_BUG)
    sys.exit(0)


def _open_closed_streams() -> None:
    """Lead streams that the caller has closed to nowhere: else files that are opened would get their descriptors."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115  # until the process ends


def _say(message: str) -> None:
    """Print a line on stderr; a full disk under it, or a reader that has ended, changes nothing else."""
    with contextlib.suppress(OSError):
        click.echo(printable(f"megablend: {message}"), err=True)


def _end(kind: str, message: str, exit_code: int) -> NoReturn:
    """Exit; with --json, print the error as one JSON object on stdout too, in addition to the line on stderr."""
    if "--json" in sys.argv[1:]:
        with contextlib.suppress(OSError):  # it may be stdout that cannot be written
            print_json({"error": {"kind": kind, "message": message, "exit_code": exit_code}})
    sys.exit(exit_code)
