"""The commands `megablend build` and `megablend index`, which index a config's files and commit its
run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

import megablend
from megablend.cli.options import as_json, command, finish, in_cache
from megablend.cli.output import Column, print_first, print_line, print_lines, print_table
from megablend.errors import ConfigError
from megablend.system.log import LOG

if TYPE_CHECKING:
    from megablend.distributed.base import Communicator
    from megablend.operations.build_results import BuildResult, BuiltIndex
    from megablend.operations.dry_run import DryRun

SHOWN_PROBLEMS = 10
"""The maximum number of missing or changed files to print."""
_SHOWN_SOURCES = 5
"""The maximum number of sources to name for each column."""
of_processes = click.option(
    "--processes",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of processes per rank that tokenise text.  [default: the cores that the rank may use]",
)


@command()
@click.argument("config")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Build nothing; report the requests to object stores and the tokenisation that a build would need.",
)
@in_cache
@click.option(
    "--checksums",
    is_flag=True,
    help="Also compute checksums of all blocks, for remote reads; this reads all data once.",
)
@of_processes
@as_json
def build(
    config: str,
    dry_run: bool,
    cache: str | None,
    checksums: bool,
    processes: int | None,
    as_json: bool,
) -> None:
    """Index the files of CONFIG and write its run's ledger.

    Under mpirun, srun or torchrun the ranks share the work.
    """
    if dry_run:
        if checksums:
            LOG.warning(
                "--checksums has no effect with --dry-run, whose estimate does not include the reads for checksums"
            )
        _report_dry_run(config, cache, processes, as_json)
        return
    from megablend.operations.build import build as build_run

    settings = {"cache": cache, "checksums": checksums, "processes": processes}
    built = _run(build_run, config, print_built, as_json, **settings)
    if built is not None and built.problems:
        sys.exit(3)


@command()
@click.argument("config")
@in_cache
@of_processes
@as_json
def index(config: str, cache: str | None, processes: int | None, as_json: bool) -> None:
    """Index the files of CONFIG without committing a run.

    `describe` then reports what a run would read.
    """
    from megablend.operations.build import build_index

    _run(build_index, config, print_index, as_json, cache=cache, processes=processes)


def _run(
    make: Callable[..., Any],
    config: str,
    show: Callable[[Any], None],
    as_json: bool,
    **settings: object,
) -> Any:
    """Build on all ranks; rank 0 prints.

    Args:
        make: `build` or `build_index`, which gets `settings`.
        show: prints the result.

    Returns: the result on rank 0; None on other ranks.
    """
    from megablend.cli.progress import progress_on
    from megablend.distributed.find_job import program_launch

    with program_launch() as launch, progress_on(sys.stderr, quiet=launch.rank != 0) as progress:
        _check_alike(launch, dry_run=False)
        built = make(config, progress=progress, launch=launch, **settings)
    if launch.rank != 0:
        return None
    finish(built, as_json, show)
    return built


def _check_alike(launch: Communicator, *, dry_run: bool) -> None:
    """Check that all ranks run the same command and version, and agree on `--dry-run`, since some
    would otherwise wait forever. All ranks must call this function. Raises:
    ConfigError."""
    from megablend.distributed.same_settings import check_same_settings

    try:
        command = click.get_current_context().info_name
        check_same_settings(
            launch, {"command": command, "megablend": megablend.__version__, "--dry-run": dry_run}
        )
    except ConfigError as error:
        launch.abort(error)


def _report_dry_run(config: str, cache: str | None, processes: int | None, as_json: bool) -> None:
    """Estimate on rank 0 what indexing costs, and print it."""
    from megablend.distributed.find_job import program_launch
    from megablend.operations.dry_run import dry_run

    with program_launch() as launch:
        _check_alike(launch, dry_run=True)
        if launch.rank > 0:
            return
    estimates = dry_run(config, cache=cache, processes=processes)
    finish(
        {"sources": [source.to_dict() for source in estimates]},
        as_json,
        lambda _: _print_dry_run(estimates),
    )


def _print_dry_run(estimates: Sequence[DryRun]) -> None:
    """Print a line for each source."""
    for source in estimates:
        text = f"{source.name}: {source.files:,} files, {source.bytes / 1e9:,.2f} GB"
        if source.tokenising is not None:
            print_line(f"{text}; to tokenise: {source.tokenising}")
            continue
        if not source.requests:
            print_line(f"{text}, on local disks")
            continue
        text += f"; indexing takes {format_transfer(source.to_dict(), 'source_bytes')}"
        if source.tabled:
            text += "; its order needs the lengths of its documents, which may take as much to read as the data"
        print_line(text)


def format_transfer(transfer: Mapping[str, Any], of_bytes: str = "bytes") -> str:
    """Return the requests, bytes and cost as text, each as a range if it is not known exactly.

    Args:
        of_bytes: the key of the number of bytes in `transfer`.
    """

    def write(key: str, scale: float, digits: str) -> str:
        """Return the minimum and the maximum as text, or one number if they look the same."""
        ends = [end for end in (transfer[key], transfer[f"most_{key}"]) if end is not None]
        return " to ".join(dict.fromkeys(f"{end * scale:{digits}}" for end in ends))

    cost = write("cost", 1, ",.2f")
    price = f", which costs {cost}" if cost else ""
    return f"{write('requests', 1, ',.0f')} requests, {write(of_bytes, 1e-9, ',.2f')} GB{price}"


def print_index(built: BuiltIndex) -> None:
    """Print what was indexed."""
    report = built.index
    columns: dict[str, Column] = {
        "files": "num_files",
        "read": "read",
        "reused": "reused",
        "changed": lambda _: len(report.changed),
        "added": "added",
        "removed": "removed",
        "scanned MB": lambda _: f"{report.scanned_bytes / 1e6:,.1f}",
        "ranks": lambda _: built.ranks,
        "s": "seconds:.2f",
    }
    print_table(f"index {report.digest}", columns, [report])
    documents = built.documents
    if documents is not None:
        print_line(
            f"document tables: {documents.documents:,} documents, {documents.table_bytes / 1e6:,.1f} MB; "
            f"{documents.counted:,} counted now, {documents.scanned_bytes / 1e6:,.1f} MB scanned, {documents.seconds:.2f} s"
        )
    print_lines(report.changed, "changed, read again: ")
    print_lines(report.notes, "note: ")
    print_lines(report.skipped, "skipped, cannot be read: ")
    for column in dict.fromkeys(report.columns.values()):
        if column is None:
            continue
        sources = [source for source, other in report.columns.items() if other == column]
        more = f" and {len(sources) - _SHOWN_SOURCES} more" if len(sources) > _SHOWN_SOURCES else ""
        print_line(
            f"tokens are read from column {column!r} of {', '.join(sources[:_SHOWN_SOURCES])}{more}"
        )


def print_built(built: BuildResult) -> None:
    """Print what a build indexed, and what the run is now committed to."""
    print_index(built)
    ledger = built.ledger
    if built.stages_before == len(ledger.ends):
        outcome = "is unchanged"
    elif built.stages_before:
        outcome = f"was extended: stage {len(ledger.ends) - 1} appended"
        drain = ledger.stages[-1].drain
        if drain is not None:
            outcome += f", which begins with a drain of {drain:,} samples (`megablend describe CONFIG --all`)"
    else:
        outcome = "is new"
    print_line(f"run {ledger.run!r} {outcome}: {ledger.ends[-1]:,} samples, plan {ledger.digest}")
    if built.pinned:
        print_line(
            f"run {ledger.run!r} keeps reading index {ledger.index}, which its committed order depends on; "
            f"to use the new index, give the run another name (`run:`)"
        )
    print_problems(built.problems)
    print_lines(built.warnings, "warning: ")


def print_problems(problems: Sequence[str]) -> None:
    """Print the first few missing or changed files of a run."""
    lines = [f"problem: {problem}" for problem in problems]
    print_first(
        lines, SHOWN_PROBLEMS, "problem: {n} more files; `megablend check CONFIG` lists all"
    )
