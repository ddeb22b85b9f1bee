"""The `megablend node` commands, which manage the process that keeps a mirror on this machine."""

from __future__ import annotations

import enum
import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from megablend.cli.options import CommandGroup, as_json, finish, in_cache
from megablend.cli.output import print_line, print_lines
from megablend.errors import ConfigError
from megablend.system.log import LOG

if TYPE_CHECKING:
    from megablend.storage.mirror_options import MirrorOptions
    from megablend.storage.object_options import ObjectOptions

_SLOW_SECONDS = 10.0
"""The time after which a command warns that it is waiting for the node process."""
of_mirror = click.argument("what", metavar="CONFIG|FOLDER")


class Starts(enum.Enum):
    """The conditions under which a command starts a node process."""

    NEVER = enum.auto()
    IF_NONE = enum.auto()
    """Start a process if none is running."""
    UNLESS_ALIKE = enum.auto()
    """Start a process unless one with the same mirror settings (apart from the list of nodes) is
    running. If a job has left behind a process with other settings, that process exits."""


@click.group(cls=CommandGroup)
def node() -> None:
    """Keep data from object stores on this machine's disk.

    The first job that needs a node process starts one; these commands manage it.
    """


@node.command("run")
@click.argument("config")
@as_json
def run_command(config: str, as_json: bool) -> None:
    """Run the node process of CONFIG's mirror as a service.

    It reads the sources with its own credentials for all clients, and keeps running after the last
    job.
    """
    from megablend.mirror.process import run_node

    options, objects = _read_options(config)
    logging.getLogger("megablend").setLevel(logging.INFO)
    ready = {"folder": options.folder, "pid": os.getpid()}

    def say_ready() -> None:
        finish(ready, as_json, lambda _: print_line(f"{options.folder}: ready"))

    run_node(options, objects, is_service=True, ready=say_ready)


@node.command("status")
@of_mirror
@as_json
def status_command(what: str, as_json: bool) -> None:
    """Show what the mirror holds and has fetched."""
    finish(ask_node(what, "STATUS"), as_json, _print_status)


@node.command("check")
@of_mirror
@as_json
def check_command(what: str, as_json: bool) -> None:
    """Check that all nodes can reach one another.

    Prints a line for each connection that fails, and exits with status 3 if there are any.
    """
    checked = ask_node(what, "CHECK")
    finish(checked, as_json, _print_checked)
    if checked["failures"]:
        sys.exit(3)


@node.command("fill")
@click.argument("config")
@click.option("--dry-run", "is_dry", is_flag=True, help="Only print what would be fetched.")
@in_cache
@as_json
def fill_command(config: str, is_dry: bool, cache: str | None, as_json: bool) -> None:
    """Fetch the data of a run before a job reads it.

    Each node fetches its share of the data of CONFIG's run. Run this on all nodes at the same time,
    with srun or mpirun. Data that are already held are not fetched again. Exits with status 3 if
    there was not enough room.
    """
    from megablend.cli.progress import progress_on
    from megablend.operations.fill import fill_mirror

    with progress_on(sys.stderr, doing="fetching", done="fetched", quiet=as_json) as progress:
        filled = fill_mirror(config, cache=cache, is_dry=is_dry, progress=progress)
    finish(filled._asdict(), as_json, _print_would_fill if is_dry else _print_filled)
    if filled.refused:
        sys.exit(3)


@node.command("stop")
@of_mirror
@as_json
def stop_command(what: str, as_json: bool) -> None:
    """Stop the node process; its data stay on disk."""
    finish(ask_node(what, "STOP"), as_json, lambda done: print_line(f"process {done['pid']} ends"))


@node.command("scrub")
@of_mirror
@as_json
def scrub_command(what: str, as_json: bool) -> None:
    """Compare all held data with their checksums.

    Damaged blocks are dropped, and fetched again when they are needed. Exits with status 3 if there
    were any.
    """
    comparison = ask_node(what, "SCRUB")
    finish(comparison, as_json, print_compared)
    if comparison["wrong"]:
        sys.exit(3)


@node.command("remove")
@of_mirror
@as_json
def remove_command(what: str, as_json: bool) -> None:
    """Delete the mirror's folder with everything in it."""
    finish(
        ask_node(what, "REMOVE", starts=Starts.IF_NONE),
        as_json,
        lambda done: print_line(f"deleted {format_gb(done['bytes'])} of {done['files']:,} files"),
    )


def ask_node(what: str, kind: str, about: Any = None, *, starts: Starts = Starts.NEVER) -> Any:
    """Send a command to the node process, and return the response.

    Args:
        what: a config with a mirror, or the mirror's folder.
        kind: the name of the command's `Kind`.
        about: the argument of the command; None for a command that needs an existing mirror.
        starts: when to start a process.

    Raises: ConfigError if there is no mirror, or no process is running and none is started.
    """
    # Imported only by commands that need a node process
    from megablend.mirror.disk.folder import MirrorFolder
    from megablend.mirror.node.frames import Kind
    from megablend.mirror.rank.connection import Connection
    from megablend.mirror.rank.opening import NodeLostError

    options, objects = _read_options(what)
    try:
        if about is None:
            MirrorFolder.attach(options.folder)
    except ConfigError as error:
        problem = str(error).partition("\n")[0]
        raise ConfigError(
            f"{problem}\ngive a mirror's folder, or a config whose mirror a job or `megablend node run` has started"
        ) from None
    if kind == "REMOVE":  # a process that is started for this needs no other nodes
        options = options.alone()
    agreed = options.alone() if starts is Starts.UNLESS_ALIKE else None
    may_start = starts is not Starts.NEVER
    try:
        with (
            _warning_if_slow(options.folder),
            closing(Connection(options, objects, agreed, starts=may_start)) as connection,
        ):
            return connection.command(Kind[kind], about)
    except NodeLostError as error:
        raise ConfigError(
            f"{options.folder}: no node process is running ({error})\nstart a job, or run `megablend node run CONFIG`"
        ) from None


@contextmanager
def _warning_if_slow(folder: str) -> Iterator[None]:
    """Warn once if the context waits for a node process for a long time."""
    text = "%s: waiting for its node process; for the reason, see node.log in this folder, or the service's log"
    timer = threading.Timer(_SLOW_SECONDS, LOG.warning, (text, folder))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def format_gb(size: int) -> str:
    """Return a number of bytes as text, in GB."""
    return f"{size / 1e9:,.3f} GB"


def _read_options(what: str) -> tuple[MirrorOptions, ObjectOptions]:
    """Return the options of the mirror of a config, or of a mirror's folder, and those of its
    object stores. Raises: ConfigError if there is no mirror."""
    from megablend.config.load import read_config_file
    from megablend.config.storage_settings import load_storage_settings
    from megablend.storage.mirror_options import MirrorOptions
    from megablend.storage.object_options import ObjectOptions
    from megablend.storage.registry import find_mirror

    if Path(what).is_dir():
        return MirrorOptions(folder=str(Path(what).absolute())), ObjectOptions()
    keys, _ = read_config_file(Path(what))
    objects = load_storage_settings(what) if "storage" in keys else ObjectOptions()
    mirror = find_mirror(objects)
    if mirror is None:
        raise ConfigError(
            f"{what}: has no mirror\nset `mirror: {{folder: ...}}` under `storage`, or give a mirror's folder"
        )
    return mirror, objects


def _print_status(status: dict[str, Any]) -> None:
    """Print the state of a node process, of its mirror, and of its cluster."""
    start = "a service" if status["service"] else "started by a job"
    print_line(
        f"{status['folder']}: process {status['pid']}, megablend {status['version']}, {start}"
    )
    print_line(f"clients: {status['clients']:,}")
    print_line(f"held: {format_gb(status['held_bytes'])} of {status['files']:,} files")
    print_line(
        f"read from the source since the process started: {format_gb(status['source_bytes'])}"
    )
    for source, seconds in status.get("source_pauses", {}).items():
        print_line(f"{source} is busy: no requests are sent to it for another {seconds:.0f} s")

    cluster = status["cluster"]
    if cluster is None:
        return
    print_line(
        f"read from other nodes since the process started: {format_gb(status['peer_bytes'])}"
    )
    away = f"; unreachable: {', '.join(cluster['away_nodes'])}" if cluster["away_nodes"] else ""
    print_line(f"{cluster['own']}, one of {cluster['nodes']:,} nodes{away}")
    if trouble := cluster.get("etcd", {}).get("trouble"):
        print_line(f"etcd: {trouble.removeprefix('etcd: ')}")
    if not cluster["formed"]:
        print_line(
            f"the nodes have not formed a cluster yet: {cluster['trouble'] or 'some are missing'}"
        )
    elif cluster["bytes_to_copy"]:
        print_line(
            f"copies still to be fetched from other nodes: {format_gb(cluster['bytes_to_copy'])}"
        )


def _print_checked(checked: dict[str, Any]) -> None:
    """Print the pairs of nodes that cannot reach each other, and a summary."""
    print_lines(checked["failures"])
    num_failures = len(checked["failures"])
    result = f"{num_failures:,} failures" if num_failures else "all reach one another"
    print_line(f"{checked['nodes']:,} nodes: {result}")


def _print_would_fill(filled: dict[str, int]) -> None:
    """Print how much a fill would fetch on this machine."""
    machine = socket.gethostname()
    print_line(
        f"{machine}: would fetch {format_gb(filled['missing'])} of its share of {format_gb(filled['needed'])}"
    )


def _print_filled(filled: dict[str, int]) -> None:
    """Print how much of its share this machine holds, and where it was fetched from. The lines of
    several machines often go to one log."""
    machine = socket.gethostname()
    held = filled["needed"] - filled["refused"]
    print_line(f"{machine}: holds {format_gb(held)} of its share of {format_gb(filled['needed'])}")
    print_line(
        f"{machine}: fetched from the source: {format_gb(filled['source'])}, from other nodes: {format_gb(filled['peers'])}"
    )
    if filled["refused"]:
        print_line(f"{machine}: there is no room for the rest: raise `mirror.size`, or free space")


def print_compared(comparison: dict[str, Any], kind: str = "blocks") -> None:
    """Print what was damaged, `kind` of things, and how much was compared."""
    print_lines(comparison["wrong"], "damaged, and dropped: ")
    print_line(
        f"compared {format_gb(comparison['bytes'])}: {len(comparison['wrong']):,} {kind} were damaged"
    )
