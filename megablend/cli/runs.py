"""megablend runs: what a cache's runs are committed to, and how to change that."""

from __future__ import annotations

import click

from megablend.cli.options import as_json, print_json

where = click.argument("what", metavar="CONFIG|CACHE")
named = click.argument("run", metavar="RUN")
named_or_own = click.argument("run", metavar="[RUN]", required=False)


@click.group()
def runs() -> None:
    """List, show, rename, reset or remove the runs of a cache. Checkpoints' states keep opening their own plan."""


@runs.command("list")
@where
@as_json
def list_command(what: str, as_json: bool) -> None:
    """List the runs of a cache."""
    from megablend.api.manage_runs import list_runs

    found = list_runs(what)
    if as_json:
        print_json({"runs": found})
    else:
        from megablend.cli.describe_tables import print_runs
        from megablend.cli.tables import new_console

        print_runs(new_console(), found)


@runs.command("show")
@where
@named_or_own
@as_json
def show_command(what: str, run: str | None, as_json: bool) -> None:
    """Show what a run is committed to: its index, its stages, its blend. RUN is the config's if it is not given."""
    from megablend.api.manage_runs import show_run
    from megablend.api.runs import resolve_run

    found = show_run(what, resolve_run(what, run))
    if as_json:
        print_json(found)
    else:
        from megablend.cli.describe_tables import print_run

        print_run(found)


@runs.command("rename")
@where
@named
@click.argument("new", metavar="NEW")
@as_json
def rename_command(what: str, run: str, new: str, as_json: bool) -> None:
    """Give a run another name; its plan stays. Configs have to give the new name, too (`run:`)."""
    from megablend.api.manage_runs import rename_run

    rename_run(what, run, new)
    _report({"run": new, "renamed_from": run}, f"run {run!r} is now {new!r}", as_json)


@runs.command("reset")
@where
@named_or_own
@as_json
def reset_command(what: str, run: str | None, as_json: bool) -> None:
    """Let the next build plan a run again, as its config then says. Its present ledger is kept aside. RUN is the config's if it
    is not given."""
    from megablend.api.manage_runs import reset_run
    from megablend.api.runs import resolve_run

    run = resolve_run(what, run)
    aside = str(reset_run(what, run))
    text = f"run {run!r} is reset: the next `megablend build CONFIG` plans it again; its ledger was moved to {aside}"
    _report({"run": run, "ledger_moved_to": aside}, text, as_json)


@runs.command("remove")
@where
@named
@as_json
def remove_command(what: str, run: str, as_json: bool) -> None:
    """Remove a run for good, and what resets of it kept aside. Its index stays until `gc` removes it."""
    from megablend.api.manage_runs import remove_run

    remove_run(what, run)
    _report({"run": run, "removed": True}, f"run {run!r} is removed", as_json)


def _report(found: dict[str, object], text: str, as_json: bool) -> None:
    if as_json:
        print_json(found)
    else:
        click.echo(text)
