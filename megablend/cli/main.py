"""The entry point of the command line, and the exit codes of commands.

Results go to stdout (a table, or with --json one JSON object, also for errors), everything else to
stderr. Exit codes: 0 done; 1 the reader of stdout exited early; 2 usage, config, blend, state or
launcher; 3 data, cache or system; 70 a bug in megablend; 130 interrupted.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

import click

from megablend import __version__
from megablend.cli.build import build, index
from megablend.cli.check import check, gc, verify
from megablend.cli.datasets import datasets
from megablend.cli.describe import describe
from megablend.cli.inspect import diff, export, find, show
from megablend.cli.megatron_cache import megatron_cache
from megablend.cli.node import node
from megablend.cli.output import print_json, printable
from megablend.cli.runs import amend, runs, skip
from megablend.distributed.base import REPORT_SECONDS, exit_code, on_failure
from megablend.distributed.fail_together import RankError
from megablend.distributed.launch import is_later_rank
from megablend.errors import LaunchError, MegablendError
from megablend.system.failures import is_broken_pipe, translate


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """Index token files, blend them, and read them as training batches."""


for _command in (
    amend,
    build,
    check,
    datasets,
    describe,
    diff,
    export,
    find,
    gc,
    index,
    megatron_cache,
    node,
    runs,
    show,
    skip,
    verify,
):
    cli.add_command(_command)


class _LogPrinter(logging.Handler):
    """Prints the package's log records on stderr, one line each, at the level that the command's
    options set."""

    def emit(self, record: logging.LogRecord) -> None:
        _say(record.getMessage())


_TO_STDERR = _LogPrinter()


def main() -> NoReturn:
    """Run `megablend` or `python -m megablend`."""
    _open_closed_streams()
    logging.getLogger("megablend").addHandler(_TO_STDERR)
    on_failure[:] = [_print_error] if "--json" in sys.argv[1:] else []
    try:
        cli.main(standalone_mode=False)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except click.ClickException as error:
        with contextlib.suppress(OSError):
            error.show()
        _end(error)
    except MegablendError as error:
        cause = error.__cause__
        _say(f"{error} ({cause})" if isinstance(cause, RankError) else str(error))
        _end(error)
    except (KeyboardInterrupt, click.Abort):
        _say("interrupted")
        _end(KeyboardInterrupt())
    except Exception as error:
        if is_broken_pipe(error):  # the reader of stdout has exited
            _drop_unwritten()
            sys.exit(1)
        translated = translate(error, f"`megablend {' '.join(sys.argv[1:3])}`")
        if translated is not None:
            _say(str(translated))
            _end(translated)
        traceback.print_exc()
        _say(
            "the above is a bug in megablend: please report it, with the command and the traceback"
        )
        _end(error)
    sys.exit(0)


def _open_closed_streams() -> None:
    """Replace standard streams that the caller has closed with /dev/null. Otherwise, files that are
    opened later would get their descriptors. Let stdout escape characters that the locale's
    encoding lacks."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115  # until the process ends
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and out.errors == "strict":
        out.reconfigure(errors="backslashreplace")


def _say(message: str) -> None:
    """Print a line on stderr. If that fails because the disk is full or the reader has exited, the
    error is ignored."""
    with contextlib.suppress(OSError):
        click.echo(printable(f"megablend: {message}"), err=True)


def _end(error: BaseException) -> NoReturn:
    """Report the error that makes the command fail, and exit."""
    is_of_all = isinstance(error, click.ClickException | LaunchError)
    if on_failure and is_of_all and is_later_rank(os.environ):
        on_failure.clear()  # the first rank prints it
        time.sleep(REPORT_SECONDS)
    cause = error.__cause__
    for report in on_failure:
        report(error, cause.rank if isinstance(cause, RankError) else None)
    _drop_unwritten()
    sys.exit(exit_code(error))


def _drop_unwritten() -> None:
    """Drop what the standard streams cannot write. Otherwise Python tries once more when it ends,
    reports that on stderr, and exits with 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # noqa: PERF203  # of two streams
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _print_error(error: BaseException, rank: int | None) -> None:
    """Print an error as one JSON object on stdout, if stdout can be written. The object names the
    rank that raised the error, unless it is the first or unknown."""
    kind = type(error).__name__
    message = str(error)
    if isinstance(error, click.ClickException):
        kind = "UsageError"
        message = error.format_message()
    elif isinstance(error, KeyboardInterrupt):
        kind = "Interrupted"
        message = "interrupted"
    with contextlib.suppress(OSError):
        report = {"kind": kind, "message": message, "exit_code": exit_code(error)}
        print_json({"error": report | ({"rank": rank} if rank else {})})
