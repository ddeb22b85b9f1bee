"""megablend amend: change a run's blend from a sample on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from megablend.cli.lines import print_line
from megablend.cli.options import as_json, in_cache, print_json

if TYPE_CHECKING:
    from megablend.api.amend import Amendment, Outlook


@click.command()
@click.argument("config")
@click.option("--at", type=click.IntRange(1), metavar="SAMPLE", help="Sample from which the next stage applies.")
@click.option("--state", metavar="FILE", help="Use the position of this checkpoint's state (JSON) instead.")
@click.option("--plus", type=click.IntRange(0), default=0, help="Samples to add to the state's position.")
@click.option(
    "--batch",
    type=click.IntRange(1),
    metavar="N",
    help="Samples of a step (micro batch x ranks): the length of samples changes between such steps.  [default: lanes]",
)
@click.option("--dry-run", is_flag=True, help="Only print what would change.")
@in_cache
@as_json
def amend(
    config: str,
    at: int | None,
    state: str | None,
    plus: int,
    batch: int | None,
    dry_run: bool,
    cache: str | None,
    as_json: bool,
) -> None:
    """Continue a run, from a sample on, with the next stage that its edited CONFIG lists in `stages`.

    The sample is rounded up to the end of a cycle (lanes x shuffle_window samples). No sample before it changes, and no token is
    lost or repeated. Checkpoints of that sample and earlier are resumed on the new plan; the position is in the checkpoint, so
    give the one that the job resumes from, or a sample beyond what it has trained on.
    """
    from megablend.api.amend import amend as amend_run
    from megablend.api.read_state import read_state

    if (at is None) == (state is None):
        raise click.UsageError("give either --at SAMPLE or --state FILE")
    if plus and state is None:
        raise click.UsageError("--plus needs --state")
    taken = None if state is None else read_state(state)
    found = amend_run(config, at=at, state=taken, after=plus, batch=batch, cache=cache, dry_run=dry_run)
    if as_json:
        print_json(found.to_dict())
    else:
        _print_amendment(found)


def _print_amendment(found: Amendment) -> None:
    from megablend.cli.tables import describe_fitting, new_console, print_drain, print_table

    console = new_console()
    does = "continues" if found.committed else "would continue"
    rounded = "" if found.at == found.requested else f" ({found.requested:,} rounded up to the end of a cycle)"
    print_line(f"run {found.run!r} {does} with other settings from sample {found.at:,} on{rounded}")
    if found.drained is not None:
        print_drain(console, found.drained.to_dict())
    if found.fitting_unit is not None:
        print_line(describe_fitting(found.fitting_unit))
    for change in found.changes:
        print_line(f"  {change['what']}: {change['before']} -> {change['after']}")
    columns = ["source", "share", "share now", "tokens", "tokens now", "epochs", "epochs now", "repeats", "repeats now"]
    rows = []
    for source in found.sources:
        pairs = zip(_format(source.before), _format(source.after), strict=True)
        rows.append([source.name, *(cell for pair in pairs for cell in pair)])
    print_table(console, f"the rest of the run, {found.samples:,} samples in all", columns, rows)
    if found.note is not None:
        print_line(f"note: {found.note}")
    if found.committed:
        print_line(f"to build this run from its config alone, write `from: {found.at}` into the stage")
        for each in found.drain_settings:
            print_line(f"and `drain: {each['drain']}` into the stage from sample {each['from']:,} on")


def _format(outlook: Outlook) -> list[str]:
    repeat = "-" if outlook.first_repeat is None else f"{outlook.first_repeat:,}"
    return [f"{outlook.share:.4f}", f"{outlook.tokens:,}", f"{outlook.epochs:.2f}", repeat]
