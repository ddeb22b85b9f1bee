"""The commands `megablend runs`, `amend` and `skip`, which show and change what the runs of a cache
are committed to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from megablend.cli.options import (
    CommandGroup,
    FirstRankCommand,
    as_json,
    command,
    finish,
    in_cache,
    of_run,
    of_what,
    read_state,
    refuse_options,
)
from megablend.cli.output import Column, print_first, print_line, print_table

if TYPE_CHECKING:
    from megablend.operations.amend import Amendment
    from megablend.operations.drains import Drain
    from megablend.operations.manage_runs import DamagedRun, RunCommitment, RunSummary
    from megablend.operations.skip import SkipsResult

_SHOWN_CHANGES = 20
"""The maximum number of changes of a stage to print."""
_SHOWN_DRAIN_SOURCES = 12
"""The maximum number of sources of a drain to print."""
named = click.argument("run", metavar="RUN")
named_or_own = click.argument("run", metavar="[RUN]", required=False)


@click.group(cls=CommandGroup)
def runs() -> None:
    """List, show, rename, reset or remove the runs of a cache.

    A checkpoint's state still opens the plan with which it was saved.
    """


@runs.command("list")
@of_what
@as_json
def list_command(what: str, as_json: bool) -> None:
    """List the runs of a cache."""
    from megablend.operations.manage_runs import list_runs

    listed = list_runs(what)
    finish({"runs": [run.to_dict() for run in listed]}, as_json, lambda _: print_runs(listed))


@runs.command("show")
@of_what
@named_or_own
@as_json
def show_command(what: str, run: str | None, as_json: bool) -> None:
    """Show what a run is committed to: its index, stages and blend.

    By default, RUN is the run of the config.
    """
    from megablend.operations.manage_runs import show_run
    from megablend.operations.session import Session

    finish(show_run(what, Session(what, run=run).run), as_json, _print_run)


@runs.command("rename", cls=FirstRankCommand)
@of_what
@named
@click.argument("new", metavar="NEW")
@as_json
def rename_command(what: str, run: str, new: str, as_json: bool) -> None:
    """Rename a run; its plan does not change.

    Also set the new name in your configs (`run:`).
    """
    from megablend.operations.manage_runs import rename_run

    rename_run(what, run, new)
    finish(
        {"run": new, "renamed_from": run},
        as_json,
        lambda _: print_line(f"run {run!r} is now {new!r}"),
    )


@runs.command("reset", cls=FirstRankCommand)
@of_what
@named_or_own
@as_json
def reset_command(what: str, run: str | None, as_json: bool) -> None:
    """Reset a run, so that the next build plans it again.

    The build plans it from the config as it is at that time. The run's current ledger is moved
    aside. By default, RUN is the run of the config.
    """
    from megablend.operations.manage_runs import reset_run
    from megablend.operations.session import Session

    run = Session(what, run=run).run
    aside = str(reset_run(what, run))
    text = f"run {run!r} was reset: the next `megablend build CONFIG` plans it again; its ledger was moved to {aside}"
    finish({"run": run, "ledger_moved_to": aside}, as_json, lambda _: print_line(text))


@runs.command("remove", cls=FirstRankCommand)
@of_what
@named
@as_json
def remove_command(what: str, run: str, as_json: bool) -> None:
    """Remove a run permanently.

    Ledgers that were moved aside by resets of the run are removed as well. Its index is kept until
    `gc` removes it.
    """
    from megablend.operations.manage_runs import remove_run

    remove_run(what, run)
    finish({"run": run, "removed": True}, as_json, lambda _: print_line(f"run {run!r} was removed"))


def print_runs(runs: Sequence[RunSummary | DamagedRun]) -> None:
    """Print the runs of a cache, and which ledgers are damaged."""
    from megablend.operations.manage_runs import DamagedRun

    readable = [run for run in runs if not isinstance(run, DamagedRun)]
    columns: dict[str, Column] = {
        "run": "run",
        "samples": lambda run: run.stages[-1],
        "stages": lambda run: len(run.stages),
        "index": "index",
        "plan": "plan",
    }
    print_table("runs", columns, readable)
    for run in runs:
        if isinstance(run, DamagedRun):
            print_line(f"damaged: {run.problem}")
        elif not run.index_exists:
            print_line(f"run {run.run!r} reads index {run.index}, which does not exist")


def _print_run(commitment: RunCommitment) -> None:
    """Print what a run is committed to."""
    blend = dict(commitment.blend)
    sources = blend.pop("sources")
    keys = dict.fromkeys(key for source in sources for key in source if key != "name")
    columns: dict[str, Column] = {"source": "name"}
    titles = {"cycles": "cycles per period"}
    columns |= {titles.get(key, key): partial(_write_setting, key) for key in keys}
    print_table(f"run {commitment.run!r}", columns, sources)
    for key, value in blend.items():
        print_line(f"{key}: {value}")
    gone = "" if commitment.index_exists else " (which does not exist)"
    print_line(f"index {commitment.index}{gone}")
    print_line(
        f"stages end at sample {', '.join(f'{end:,}' for end in commitment.stages)}; plan {commitment.plan}"
    )
    for number, stage in enumerate(commitment.chain[1:], 1):
        drain = "" if stage.drain is None else f", the first {stage.drain:,} of them a drain"
        print_line(f"stage {number}, samples {stage.start:,} to {stage.stop:,}{drain}, changes:")
        lines = [
            f"  {change['what']}: {change['before']} -> {change['after']}"
            for change in stage.changes
        ]
        print_first(lines, _SHOWN_CHANGES, "  and {n} more (--json)")


def _write_setting(key: str, source: dict[str, Any]) -> str:
    """Return the value of a source's setting as text; empty if it is not set."""
    value = source.get(key)
    return "" if value is None else str(value)


@command()
@click.argument("config")
@click.option(
    "--at",
    type=click.IntRange(1),
    metavar="SAMPLE",
    help="Sample from which the next stage applies.",
)
@click.option(
    "--state", metavar="FILE", help="Use the position of this checkpoint's state (JSON) instead."
)
@click.option(
    "--plus", type=click.IntRange(0), default=0, help="Samples to add to the state's position."
)
@click.option(
    "--batch",
    type=click.IntRange(1),
    metavar="N",
    help="Samples per step (micro batch x ranks); the length of samples changes only between steps.  [default: lanes]",
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
    """Change a committed run from a sample on.

    From that sample on, the run has the settings of its config's next stage. The sample is rounded
    up to the end of a cycle (lanes x shuffle_window samples). No sample before it changes, and no
    token is lost or repeated. Checkpoints taken at that sample or earlier resume on the new plan:
    give the position of the checkpoint from which the job resumes, or a sample after all that it
    has trained on.
    """
    from megablend.operations.amend import amend as amend_run

    if (at is None) == (state is None):
        raise click.UsageError("give either --at SAMPLE or --state FILE")
    if plus and state is None:
        raise click.UsageError("--plus needs --state")
    loaded_state = None if state is None else read_state(state)
    amendment = amend_run(
        config, at=at, state=loaded_state, after=plus, batch=batch, cache=cache, dry_run=dry_run
    )
    finish(amendment, as_json, _print_amendment)


def _print_amendment(amendment: Amendment) -> None:
    """Print the settings and figures that an amendment changes."""
    verb = "continues" if amendment.committed else "would continue"
    rounded = ""
    if amendment.at != amendment.requested:
        rounded = f" ({amendment.requested:,} rounded up to the end of a cycle)"
    before = (amendment.plan_before, amendment.samples_before)
    how = "with new settings" if (amendment.plan, amendment.samples) != before else "unchanged"
    print_line(f"run {amendment.run!r} {verb} {how} from sample {amendment.at:,} on{rounded}")
    if amendment.drained is not None:
        print_drain(amendment.drained)
    if amendment.fitting_unit is not None:
        print_fitting(amendment.fitting_unit)
    for change in amendment.changes:
        print_line(f"  {change['what']}: {change['before']} -> {change['after']}")
    columns: dict[str, Column] = {"source": "name"}
    for title, attribute, digits in (
        ("share", "share", ".4f"),
        ("tokens", "tokens", ","),
        ("epochs", "epochs", ".2f"),
        ("repeats", "first_repeat", ","),
    ):
        columns[title] = partial(_write_outlook, "before", attribute, digits)
        columns[f"{title} now"] = partial(_write_outlook, "after", attribute, digits)
    print_table(
        f"the rest of the run, {amendment.samples:,} samples in all", columns, amendment.sources
    )
    if amendment.note is not None:
        print_line(f"note: {amendment.note}")
    if amendment.committed:
        print_line(
            f"to build this run from its config alone, write `from: {amendment.at}` into the stage"
        )
        for setting in amendment.drain_settings:
            print_line(
                f"and `drain: {setting['drain']}` into the stage from sample {setting['from']:,} on"
            )


def _write_outlook(when: str, attribute: str, digits: str, source: object) -> str:
    """Return a figure of a source's forecast `before` or `after` the amendment, as text."""
    value = getattr(getattr(source, when), attribute)
    return "-" if value is None else format(value, digits)


def print_drain(drain: Drain) -> None:
    """Print the samples of a drain, and the sources whose shares differ most from their shares
    before it."""
    samples = drain.stop - drain.start
    print_line(
        f"samples {drain.start:,} to {drain.stop:,}, {samples:,} of {drain.sequence_length:,} tokens, are a drain: "
        "they continue the previous stage with the rest of what its lanes have begun to read"
    )
    by_difference = sorted(
        drain.sources, key=lambda source: -abs(source.share - source.share_before)
    )
    columns: dict[str, Column] = {
        "source": "name",
        "share": "share:.4f",
        "share before": "share_before:.4f",
        "samples": "samples",
        "beyond its share": lambda source: (
            f"{source.samples - source.share_before * samples:+,.1f}"
        ),
    }
    left_out = len(by_difference) - _SHOWN_DRAIN_SOURCES
    title = "the drain"
    if left_out > 0:
        title += f", without {left_out:,} sources whose shares differ less"
    print_table(title, columns, by_difference[:_SHOWN_DRAIN_SOURCES])


def print_fitting(unit: int) -> None:
    """Print the step sizes that are possible in a run whose sample length or masks change."""
    print_line(
        f"a step size (micro batch x ranks, counted from sample 0) fits if it divides {unit:,}"
    )


@command()
@of_what
@click.option("--from", "start", type=click.IntRange(0), help="First sample to skip.")
@click.option("--to", "stop", type=click.IntRange(1), help="Sample to stop before.")
@click.option(
    "--batch", type=click.IntRange(1), help="Global batch size (samples per step, over all ranks)."
)
@click.option("--dry-run", is_flag=True, help="Only print what would be skipped.")
@click.option("--clear", is_flag=True, help="Remove all skips of the run.")
@of_run
@in_cache
@as_json
def skip(
    what: str,
    start: int | None,
    stop: int | None,
    batch: int | None,
    dry_run: bool,
    clear: bool,
    run: str | None,
    cache: str | None,
    as_json: bool,
) -> None:
    """Skip samples of train, for example after a loss spike.

    Without --from, list the skipped samples. The range is extended to whole steps and lanes. Sample
    numbers, digests and checkpoints' states do not change. Resume from a checkpoint taken at or
    before the start of the range.
    """
    from megablend.operations.skip import list_skips, unskip
    from megablend.operations.skip import skip as skip_samples

    if start is None:
        refuse_options({"--to": stop, "--batch": batch}, "needs --from")
        if dry_run:
            hint = "; `megablend skip` lists what --clear removes" if clear else ""
            raise click.UsageError(f"--dry-run needs --from{hint}")
        if clear:
            unskip(what, run=run, cache=cache)
        skips = list_skips(what, run=run, cache=cache)
    else:
        if stop is None or batch is None or clear:
            raise click.UsageError(
                "--from needs --to and --batch, and cannot be combined with --clear"
            )
        skips = skip_samples(
            what, start, stop, batch_size=batch, run=run, cache=cache, dry_run=dry_run
        )
    finish(skips, as_json, partial(_print_skips, "would skip" if dry_run else "skips"))


def _print_skips(verb: str, result: SkipsResult) -> None:
    """Print a line for each range of skipped samples."""
    for skipped in result.skips:
        print_line(
            f"run {result.run!r} {verb} samples {skipped.start:,} to {skipped.stop:,}: "
            f"{skipped.samples:,} samples, {skipped.tokens:,} tokens"
        )
    if not result.skips:
        print_line(f"run {result.run!r} skips no samples")
