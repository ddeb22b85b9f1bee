"""megablend node: the process that keeps a mirror on this machine."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from megablend.cli.options import Command, as_json, finish
from megablend.cli.output import print_line, print_lines
from megablend.errors import ConfigError

if TYPE_CHECKING:
    from megablend.storage.mirror_options import MirrorOptions
    from megablend.storage.object_options import ObjectOptions

of_mirror = click.argument("what", metavar="CONFIG|FOLDER")


@click.group()
def node() -> None:
    """Keep what is read of object stores on this machine's disk.

    The first job that needs a node process starts one; these commands look after it.
    """


@node.command("run", cls=Command)
@click.argument("config")
@as_json
def run_command(config: str, as_json: bool) -> None:
    """Keep the mirror of CONFIG as a service, until stopped.

    It reads the sources with its own credentials, whoever asks, and does not end with the last job.
    """
    from megablend.mirror.process import run_node

    options, objects = _read_options(config)
    logging.getLogger("megablend").setLevel(logging.INFO)
    ready = {"folder": options.folder, "pid": os.getpid()}

    def say_ready() -> None:
        finish(ready, as_json, lambda _: print_line(f"{options.folder}: ready"))

    run_node(options, objects, is_service=True, ready=say_ready)


@node.command("status", cls=Command)
@of_mirror
@as_json
def status_command(what: str, as_json: bool) -> None:
    """Show what the mirror holds and has fetched."""
    from megablend.mirror.node.frames import Kind

    finish(_ask(what, Kind.STATUS), as_json, _print_status)


@node.command("stop", cls=Command)
@of_mirror
@as_json
def stop_command(what: str, as_json: bool) -> None:
    """Stop the node process; what it holds stays on disk."""
    from megablend.mirror.node.frames import Kind

    finish(_ask(what, Kind.STOP), as_json, lambda done: print_line(f"process {done['pid']} ends"))


@node.command("scrub", cls=Command)
@of_mirror
@as_json
def scrub_command(what: str, as_json: bool) -> None:
    """Compare all that is held with its checksums.

    What differs is dropped, and fetched again when it is needed. Exits with 3 if something did.
    """
    from megablend.mirror.node.frames import Kind

    found = _ask(what, Kind.SCRUB)
    finish(found, as_json, _print_scrubbed)
    if found["wrong"]:
        sys.exit(3)


@node.command("remove", cls=Command)
@of_mirror
@as_json
def remove_command(what: str, as_json: bool) -> None:
    """Delete the mirror: all that it holds, and its folder."""
    from megablend.mirror.node.frames import Kind

    finish(
        _ask(what, Kind.REMOVE, starts=True),
        as_json,
        lambda done: print_line(f"deleted {_gb(done['bytes'])} of {done['files']:,} files"),
    )


def _read_options(what: str) -> tuple[MirrorOptions, ObjectOptions]:
    """The mirror of a config, or of a folder. Raises: ConfigError if there is none."""
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
            f"{what}: has no mirror\nset `mirror: {{folder: ...}}` under `storage`, or name a mirror's folder"
        )
    return mirror, objects


def _ask(what: str, kind: Any, *, starts: bool = False) -> Any:
    """The node process's answer.

    Raises: ConfigError if there is no mirror, or no process runs, unless one is started.
    """
    from megablend.mirror.disk.folder import MirrorFolder
    from megablend.mirror.rank.connection import Connection, NodeLostError

    options, objects = _read_options(what)
    try:
        MirrorFolder.attach(options.folder)
    except ConfigError as error:
        problem = str(error).partition("\n")[0]
        raise ConfigError(
            f"{problem}\nname the folder of a mirror, or a config whose mirror a job or `megablend node run` has begun"
        ) from None
    try:
        return Connection(options, objects, starts=starts, asks_only=True).command(kind)
    except NodeLostError as error:
        raise ConfigError(
            f"{options.folder}: no node process runs: {error}\nstart a job, or `megablend node run CONFIG`"
        ) from None


def _print_status(status: dict[str, Any]) -> None:
    kind = "a service" if status["service"] else "started by a job"
    print_line(
        f"{status['folder']}: process {status['pid']}, megablend {status['version']}, {kind}"
    )
    print_line(f"clients: {status['clients']:,}")
    print_line(f"held: {_gb(status['held_bytes'])} of {status['files']:,} files")
    print_line(f"read from the source since its start: {_gb(status['source_bytes'])}")


def _print_scrubbed(found: dict[str, Any]) -> None:
    print_lines(found["wrong"], "wrong, and dropped: ")
    print_line(f"compared {_gb(found['bytes'])}: {len(found['wrong']):,} blocks were wrong")


def _gb(size: int) -> str:
    return f"{size / 1e9:,.3f} GB"
