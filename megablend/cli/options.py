"""The classes of commands, and the options that several commands have."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import click

from megablend.cli.output import print_json
from megablend.distributed.base import REPORT_SECONDS, exit_code
from megablend.errors import ConfigError, LaunchError
from megablend.operations.results import Record
from megablend.system.log import LOG

_LEVELS = ("debug", "info", "warning", "error")
as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
in_cache = click.option(
    "--cache", metavar="CACHE", help="Folder or URL of the cache, instead of the config's."
)
of_run = click.option(
    "--run", metavar="NAME", help="Name of a run in the cache, instead of the config's."
)
of_what = click.argument("what", metavar="CONFIG|CACHE")
of_split = click.option(
    "--split", default="train", show_default=True, help="Split: train, valid or test."
)


class Command(click.Command):
    """A command with the options that set how much it prints on stderr."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.params += [
            click.Option(
                ["-v", "--verbose"], count=True, help="Print what is done; -vv prints more."
            ),
            click.Option(
                ["-q", "--quiet"], is_flag=True, help="Print only errors, no warnings or progress."
            ),
            click.Option(
                ["--log-level"],
                type=click.Choice(_LEVELS),
                help="Level of messages to print.  [default: warning]",
            ),
        ]

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command with the requested log level. Raises: click.UsageError if several options
        set it."""
        verbose = ctx.params.pop("verbose")
        quiet = ctx.params.pop("quiet")
        level = ctx.params.pop("log_level")
        if sum((verbose > 0, quiet, level is not None)) > 1:
            raise click.UsageError("give only one of -v, -q and --log-level")
        if level is None:
            level = "error" if quiet else ("warning", "info", "debug")[min(verbose, 2)]
        log = logging.getLogger("megablend")
        before = log.level
        log.setLevel(level.upper())
        try:
            return self.call(ctx)
        finally:
            log.setLevel(before)

    def call(self, ctx: click.Context) -> Any:
        """Call the command's function."""
        return super().invoke(ctx)


class FirstRankCommand(Command):
    """A command that cannot be repeated, such as the renaming of a run. If several ranks run it,
    the first one does so and prints the result; the others wait for it, and end with its exit
    code. A rank alone would wait, too, so commands that a program may start on one rank are not of
    this class."""

    def call(self, ctx: click.Context) -> Any:
        """Call the command's function on the first rank, or in each process if they cannot find
        each other. Raises: ConfigError on all ranks if their arguments differ."""
        from megablend.distributed.find_job import program_launch
        from megablend.distributed.same_settings import check_same_settings

        failure: BaseException | None = None
        with ExitStack() as stack:
            try:
                launch = stack.enter_context(program_launch())
            except LaunchError as error:  # the cache's lock keeps processes apart
                LOG.info("this process does not wait for others: %s", error)
                return super().call(ctx)
            if launch.size == 1:
                return super().call(ctx)
            try:
                check_same_settings(launch, ctx.params)
                if launch.rank == 0:
                    super().call(ctx)
            except BaseException as error:  # the first rank's is raised below
                failure = error
            code = launch.bcast(None if failure is None else exit_code(failure))
        if launch.rank == 0 and failure is not None:
            raise failure
        if code is not None:
            time.sleep(REPORT_SECONDS)  # a launcher ends the first rank as soon as another fails
            sys.exit(code)
        return None


command = partial(click.command, cls=Command)
"""A decorator like `click.command`, which makes a `Command`."""


class CommandGroup(click.Group):
    """A group whose decorator `command` makes each command a `Command`."""

    command_class = Command


def refuse_options(options: Mapping[str, object], reason: str) -> None:
    """Refuse options that were given but have no effect. `options` has their values by name.
    Raises: UsageError."""
    for name, value in options.items():
        if value is not None:
            raise click.UsageError(f"{name} {reason}")


def finish(result: Record | Mapping[str, Any], as_json: bool, show: Callable[[Any], None]) -> None:
    """Print the result of a command, as JSON or by `show`."""
    if as_json:
        print_json(result)
    else:
        show(result)


def read_state(path: str | Path) -> dict[str, Any]:
    """Read a state that was saved as JSON, without checking it. Raises: ConfigError if the file
    does not contain one; ResourceError if it cannot be read."""
    from megablend.system.failures import translating
    from megablend.system.limited_json import parse_json

    with translating(str(path)):
        data = Path(path).read_bytes()
    try:
        record = parse_json(data.decode())
    except ValueError as error:
        raise ConfigError(f"{path}: expected a state saved as JSON: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(
            f"{path}: found {type(record).__name__}, expected a state from `loader.state_dict()`, saved as JSON"
        )
    return record
