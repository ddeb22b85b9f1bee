"""megablend runs: what the runs of a cache are committed to, and how to change that."""

from __future__ import annotations

import click

from megablend.cli.lines import print_line
from megablend.cli.options import as_json, print_json

where = click.argument("what", metavar="CONFIG|CACHE")
named = click.argument("run", metavar="RUN")
named_or_own = click.argument("run", metavar="[RUN]", required=False)


@click.group()
def runs() -> None:
    """List, show, rename, reset or remove the runs of a cache. Checkpoint states still open the plan they were saved with."""


@runs.command("list")
@where
@as_json
def list_command(what: str, as_json: bool) -> None:
    """List the runs of a cache."""
    from megablend.api.manage_runs import list_runs

    found = list_runs(what)
    if as_json:
        print_json({"runs": [each.to_dict() for each in found]})
    else:
        from megablend.cli.run_tables import print_runs
        from megablend.cli.tables import new_console

        print_runs(new_console(), [each.to_dict() for each in found])


@runs.command("show")
@where
@named_or_own
@as_json
def show_command(what: str, run: str | None, as_json: bool) -> None:
    """Show what a run is committed to: its index, its stages, its blend. By default RUN is the config's."""
    from megablend.api.manage_runs import show_run
    from megablend.api.runs import resolve_run

    found = show_run(what, resolve_run(what, run)).to_dict()
    if as_json:
        print_json(found)
    else:
        from megablend.cli.run_tables import print_run

        print_run(found)


@runs.command("rename")
@where
@named
@click.argument("new", metavar="NEW")
@as_json
def rename_command(what: str, run: str, new: str, as_json: bool) -> None:
    """Rename a run; its plan does not change. Set the new name in your configs, too (`run:`)."""
    from megablend.api.manage_runs import rename_run

    rename_run(what, run, new)
    _report({"run": new, "renamed_from": run}, f"run {run!r} is now {new!r}", as_json)


@runs.command("reset")
@where
@named_or_own
@as_json
def reset_command(what: str, run: str | None, as_json: bool) -> None:
    """Make the next build plan a run again, from its config as it is then. Its current ledger is moved aside. By default RUN
    is the config's."""
    from megablend.api.manage_runs import reset_run
    from megablend.api.runs import resolve_run

    run = resolve_run(what, run)
    aside = str(reset_run(what, run))
    text = f"run {run!r} was reset: the next `megablend build CONFIG` plans it again; its ledger was moved to {aside}"
    _report({"run": run, "ledger_moved_to": aside}, text, as_json)


@runs.command("remove")
@where
@named
@as_json
def remove_command(what: str, run: str, as_json: bool) -> None:
    """Remove a run permanently, with the ledgers that resets of it moved aside. Its index is kept until `gc` removes it."""
    from megablend.api.manage_runs import remove_run

    remove_run(what, run)
    _report({"run": run, "removed": True}, f"run {run!r} was removed", as_json)


def _report(found: dict[str, object], text: str, as_json: bool) -> None:
    if as_json:
        print_json(found)
    else:
        print_line(text)
