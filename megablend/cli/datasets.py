"""The `megablend datasets` commands, which hold data on mirrors, independently of jobs."""

from __future__ import annotations

import sys
import time
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import click

from megablend.cli.node import Starts, ask_node, format_gb, print_compared
from megablend.cli.options import CommandGroup, as_json, finish
from megablend.cli.output import Column, print_line, print_lines, print_table
from megablend.errors import ConfigError
from megablend.storage.location import MIRROR_VARIABLE

_WATCH_SECONDS = 2.0
"""The time in seconds between two updates of `status --watch`."""
_VARIABLE = "MEGABLEND_DATASETS"
"""The environment variable for `--mirror`, which may name a config. MIRROR_VARIABLE may not: it
names the folder that jobs read through."""
_SHOWN_NODES = 20
"""The maximum number of nodes to print for each want."""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MAX_PATTERNS = 100
"""The maximum number of patterns of a list or config that a revision records one by one; a longer
list or config is recorded by its path."""
_CONFIG_ENDINGS = (".yaml", ".yml", ".json")
of_mirror = click.option(
    "--mirror",
    metavar="CONFIG|FOLDER",
    envvar=[_VARIABLE, MIRROR_VARIABLE],
    show_envvar=True,
    help="Config with a mirror, or the mirror's folder.",
)
of_target = click.argument("target", metavar="NAME[@REVISION]")


@click.group(cls=CommandGroup)
def datasets() -> None:
    """Hold datasets and models on mirrors, whichever jobs run.

    A dataset is a name for the files of some sources; a revision is a list of these files at one
    point in time. The mirror's node process fetches datasets that are wanted, and keeps them.
    """


@datasets.command("add")
@click.argument("name")
@click.argument("sources", metavar="SOURCE...", nargs=-1, required=True)
@click.option(
    "--every",
    metavar="TIME",
    help="Time between listings of the sources: 30m, 6h, or never.  [default: unchanged; 1h for a new dataset]",
)
@of_mirror
@as_json
def add_command(
    name: str, sources: tuple[str, ...], every: str | None, mirror: str | None, as_json: bool
) -> None:
    """List files as a revision of a dataset; nothing is fetched.

    A SOURCE is a file, a pattern, a folder with all its files, a .urls file, or a config, which
    stands for its sources. While the dataset is wanted, its sources are listed again at intervals
    (--every); if files were added or replaced, the listing becomes its latest revision."""
    all_patterns = list[str]()
    recorded = list[str]()
    for source in dict.fromkeys(sources):
        patterns = _locate(source)
        all_patterns += patterns
        recorded += patterns if len(patterns) <= _MAX_PATTERNS else [_name_source(source)]
    seconds = None if every is None else _parse_every(every)
    revision = _ask(mirror, "add", dataset=name, sources=all_patterns, said=recorded, every=seconds)
    finish(revision, as_json, _print_added)


@datasets.command("want")
@of_target
@click.option(
    "--copies",
    metavar="share|all|N",
    default="share",
    show_default=True,
    help="Number of nodes that hold each byte: the mirror's `copies` (share), all, or N.",
)
@click.option(
    "--nodes",
    metavar="all|A,B",
    default="all",
    help="Nodes that hold the dataset, in a cluster with etcd.",
)
@click.option("--pin", is_flag=True, help="Never evict the dataset.")
@click.option(
    "--until",
    metavar="TIME",
    help="Time until which the dataset is wanted, such as 2027-01-31T18:00.",
)
@click.option("--wait", is_flag=True, help="Wait until the dataset is held.")
@of_mirror
@as_json
def want_command(
    target: str,
    copies: str,
    nodes: str,
    pin: bool,
    until: str | None,
    wait: bool,
    mirror: str | None,
    as_json: bool,
) -> None:
    """Have nodes hold a dataset: its latest revision, or REVISION.

    Without etcd, only this node holds it. Exits with status 3 if --wait finds that there is no room
    for it, that files are missing, or that nothing has arrived for a minute because of a problem
    that only a person can solve, such as denied access.
    """
    about: dict[str, Any] = {
        "whole": copies == "all",
        "pin": pin,
        "until": None if until is None else _parse_time(until),
        "nodes": [] if nodes == "all" else _split_nodes(nodes),
        "copies": _parse_copies(copies),
    }
    outcome = _ask(mirror, "want", target=target, **about)
    if wait:
        outcome |= _ask(mirror, "wait", target=target)
    finish(outcome, as_json, _print_wanted)


def _add_simple(verb: str, outcome: str, help_text: str) -> None:
    """Add a command that sends `verb` and one target to the node process, and prints the name of
    the want with its `outcome`."""

    @datasets.command(verb, help=help_text)
    @of_target
    @of_mirror
    @as_json
    def simple_command(target: str, mirror: str | None, as_json: bool) -> None:
        answer = _ask(mirror, verb, target=target)
        finish(answer, as_json, lambda answer: print_line(f"{answer['want']}: {outcome}"))


_add_simple("unwant", "no longer wanted", "Stop holding a dataset, so that it may be evicted.")
_add_simple("pin", "pinned", "Hold a revision and never evict it.")
_add_simple(
    "unpin",
    "wanted, but no longer pinned",
    "Hold a revision, but let it be evicted if room is needed.",
)


@datasets.command("list")
@of_mirror
@as_json
def list_command(mirror: str | None, as_json: bool) -> None:
    """Show datasets and their revisions."""
    finish(_ask(mirror, "list"), as_json, _print_list)


@datasets.command("status")
@click.option("--watch", is_flag=True, help="Keep refreshing until interrupted.")
@of_mirror
@as_json
def status_command(watch: bool, mirror: str | None, as_json: bool) -> None:
    """Show how much of each wanted dataset is held, or does not fit."""
    if watch and as_json:
        raise click.UsageError("give only one of --watch and --json")
    finish(_ask(mirror, "status"), as_json, _print_status)
    while watch:
        time.sleep(_WATCH_SECONDS)
        _print_status(_ask(mirror, "status"))


@datasets.command("path")
@of_target
@of_mirror
@as_json
def path_command(target: str, mirror: str | None, as_json: bool) -> None:
    """Print the path of a folder with all files of a revision.

    Any program can read the folder. Its files are hard links, except for small ones. The folder
    exists until the revision is no longer wanted. Exits with status 3 if a file is missing.
    """
    finish(_ask(mirror, "path", target=target), as_json, lambda answer: print_line(answer["path"]))


@datasets.command("verify")
@of_target
@of_mirror
@as_json
def verify_command(target: str, mirror: str | None, as_json: bool) -> None:
    """Compare the held parts of a dataset with its checksums.

    Damaged parts are dropped, and fetched again if they are wanted. Exits with status 3 if there
    were any.
    """
    comparison = _ask(mirror, "verify", target=target)
    finish(comparison, as_json, partial(print_compared, kind="files"))
    if comparison["wrong"]:
        sys.exit(3)


@datasets.command("gc")
@of_mirror
@as_json
def gc_command(mirror: str | None, as_json: bool) -> None:
    """Forget unwanted revisions, and delete their files.

    The latest revisions are kept, and so are files that belong to other revisions.
    """
    finish(_ask(mirror, "gc"), as_json, _print_forgotten)


@datasets.command("remove")
@click.argument("name")
@of_mirror
@as_json
def remove_command(name: str, mirror: str | None, as_json: bool) -> None:
    """Forget dataset NAME, and delete files that no other dataset has.

    In a cluster with etcd, it is removed from all nodes.
    """
    finish(_ask(mirror, "remove", dataset=name), as_json, _print_forgotten)


def _ask(mirror: str | None, verb: str, **about: Any) -> dict[str, Any]:
    """Send a verb to the node process, which is started if a config is given, and return the
    response.

    Args:
        about: the arguments of the verb.

    Raises: ConfigError if there is no mirror; the errors of the verb.
    """
    if mirror is None:
        raise ConfigError(
            f"no mirror given\npass --mirror CONFIG or --mirror FOLDER, or set {_VARIABLE}"
        )
    if Path(mirror).is_dir():
        starts = Starts.NEVER  # a folder does not record how large its mirror may be
    elif verb == "add":
        starts = Starts.UNLESS_ALIKE  # only this verb reads the source by the config's settings
    else:
        starts = Starts.IF_NONE
    response: dict[str, Any] = ask_node(mirror, "DATASETS", {"verb": verb, **about}, starts=starts)
    return response


def _locate(source: str) -> list[str]:
    """Return the absolute patterns of a source. Raises: ConfigError."""
    from megablend.config.load import load_config
    from megablend.storage.location import find_scheme
    from megablend.storage.objects.urls import LIST_ENDING, expand_location

    if find_scheme(source):
        return expand_location(source)
    path = Path(source).expanduser().absolute()
    if source.endswith(LIST_ENDING):
        return expand_location(str(path))
    if source.endswith(_CONFIG_ENDINGS) and path.is_file():
        return [
            pattern for source in load_config(path).all_sources.values() for pattern in source.path
        ]
    return [f"{path}/" if source.endswith("/") else str(path)]


def _parse_copies(text: str) -> int:
    """Parse a number of copies; 0 for `share` and `all`. Raises: ConfigError."""
    if text in ("share", "all"):
        return 0
    if text.isdecimal() and int(text):
        return int(text)
    raise ConfigError(
        f"--copies: found {text!r}, expected `share`, `all`, or a number\nwrite --copies 2, for example"
    )


def _split_nodes(text: str) -> list[str]:
    """Split a list of nodes at its commas. Raises: ConfigError if there are none."""
    nodes = [node.strip() for node in text.split(",") if node.strip()]
    if not nodes:
        raise ConfigError(
            f"--nodes: found {text!r}, expected names of nodes\nwrite `host:port,host:port`, or `all`"
        )
    return nodes


def _name_source(source: str) -> str:
    """Return the name with which a revision records a long list: the argument of the command, as an
    absolute path unless it is a URL."""
    from megablend.storage.location import find_scheme

    return source if find_scheme(source) else str(Path(source).expanduser().absolute())


def _parse_every(text: str) -> float:
    """Parse a duration and return it in seconds; 0 for `never`. Raises: ConfigError."""
    if text == "never":
        return 0.0
    number = text[:-1]
    if number.isdecimal() and int(number) and text[-1] in _UNITS:
        return float(int(number) * _UNITS[text[-1]])
    raise ConfigError(
        f"--every: found {text!r}, expected an interval such as 10m, 6h or 1d, or never\nwrite --every 6h, for example"
    )


def _parse_time(text: str) -> float:
    """Parse a time, and return it in seconds since 1970. Raises: ConfigError if it is not a time,
    or is in the past."""
    try:
        end = datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise ConfigError(
            f"--until: found {text!r}, expected a time\nwrite it as 2027-01-31 or 2027-01-31T18:00"
        ) from None
    if end <= time.time():
        raise ConfigError(f"--until: {text} is in the past\ngive a time in the future")
    return end


def _print_added(revision: dict[str, Any]) -> None:
    """Print the revision that was added."""
    is_new = "a new revision" if revision["is_new"] else "unchanged"
    print_line(
        f"{revision['dataset']}@{revision['digest'][:12]}: {is_new}, {revision['num_files']:,} files, "
        f"{format_gb(revision['num_bytes'])}"
    )


def _print_wanted(wanted: dict[str, Any]) -> None:
    """Print a want, and how much of it is held."""
    outcome = f"held, {format_gb(wanted['bytes'])}" if "bytes" in wanted else "wanted"
    if "complete" in wanted:
        outcome = f"held on {wanted['complete']:,} nodes"
    print_line(f"{wanted['want']}: {outcome}")


def _print_list(listing: dict[str, Any]) -> None:
    """Print a table of revisions, and the wants."""
    columns: dict[str, Column] = {
        "revision": lambda revision: f"{revision['dataset']}@{revision['digest'][:12]}",
        "files": "num_files",
        "size": lambda revision: format_gb(revision["num_bytes"]),
        "added": lambda revision: _format_time(revision["added"]),
        "by": lambda revision: "listing again" if revision.get("is_found") else "add",
    }
    print_table("datasets", columns, listing["revisions"])
    print_lines(listing["wants"], "wanted: ")
    _print_listed(listing)


def _format_time(seconds: float) -> str:
    """Return a time in seconds since 1970 as text, in local time."""
    return datetime.fromtimestamp(seconds).isoformat(" ", "seconds")


def _print_listed(state: dict[str, Any]) -> None:
    """Print the problems with sources that were listed again."""
    for name, listing in sorted(state.get("listed", {}).items()):
        if listing["trouble"]:
            by = f" by {listing['by']}" if listing["by"] else ""
            print_line(
                f"{name}: source listed at {_format_time(listing['at'])}{by}: {listing['trouble']}"
            )


def _print_status(status: dict[str, Any]) -> None:
    """Print the capacity of the mirror, and how much of each want is held."""
    print_line(f"capacity: {format_gb(status['capacity'])}")
    if status["trouble"]:
        print_line(f"not up to date: {status['trouble']}")
    _print_listed(status)
    for want in status.get("wants", ()):
        _print_cluster(want, status["away"])
    for goal in status["goals"]:
        _print_goal(goal)


def _print_goal(goal: dict[str, Any]) -> None:
    """Print how much of a wanted revision this node holds, and why the rest is missing."""
    held = format_gb(goal["bytes"] - goal["missing"])
    pinned = ", pinned" if goal["pinned"] else ""
    print_line(
        f"{goal['want']}: {goal['revision'][:12]}{pinned}: held {held} of {format_gb(goal['bytes'])}"
    )
    if goal["short"]:
        print_line(
            f"  does not fit: {format_gb(goal['short'])} more than is left after pinned datasets, earlier wants "
            "and the data of jobs"
        )
    if goal["trouble"]:
        print_line(f"  {goal['trouble']}")


def _print_cluster(want: dict[str, Any], away: list[str]) -> None:
    """Print how much of a wanted revision all nodes hold, and on which nodes a part is missing."""
    print_line(
        f"{want['want']}: complete on {want['complete']:,} of {want['nodes']:,} nodes, {format_gb(want['missing'])} missing"
    )
    for node, owed in list(want["owing"].items())[:_SHOWN_NODES]:
        short = f", {format_gb(owed['short'])} too much to fit" if owed["short"] else ""
        trouble = f": {owed['trouble']}" if owed["trouble"] else ""
        print_line(f"  {node}: {format_gb(owed['missing'])} missing{short}{trouble}")
    for node in want["silent"][:_SHOWN_NODES]:
        print_line(f"  {node}: {'is unreachable' if node in away else 'has not reported yet'}")


def _print_forgotten(forgotten: dict[str, Any]) -> None:
    """Print the forgotten revisions, and how much each node has deleted."""
    print_lines(forgotten["revisions"], "forgotten: ")
    for node, deleted in sorted(forgotten.get("nodes", {}).items()):
        print_line(f"{node}: deleted {format_gb(deleted['bytes'])} in {deleted['files']:,} files")
    print_lines(forgotten.get("away", ()), "unreachable, will delete when it is back: ")
    print_line(f"deleted {format_gb(forgotten['bytes'])} in {forgotten['files']:,} files")
