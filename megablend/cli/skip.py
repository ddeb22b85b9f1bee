"""megablend skip: leave out a range of a run's samples."""

from __future__ import annotations

import click

from megablend.cli.lines import print_line
from megablend.cli.options import as_json, in_cache, of_run, print_json


@click.command()
@click.argument("what", metavar="CONFIG|CACHE")
@click.option("--from", "start", type=click.IntRange(0), help="First sample to skip.")
@click.option("--to", "stop", type=click.IntRange(1), help="Sample to stop before.")
@click.option("--batch", type=click.IntRange(1), help="Global batch size (samples of a step, over all ranks).")
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
    """Skip samples of train, such as after a loss spike; without --from, list what is skipped.

    The range is rounded outwards to whole steps and lanes. Sample numbers, digests and checkpoints' states stay as they are.
    Resume from a checkpoint taken at the range's start or before.
    """
    from megablend.api.skip import list_skips, unskip
    from megablend.api.skip import skip as skip_samples

    if start is None:
        if given := [name for name, value in (("--to", stop), ("--batch", batch)) if value is not None]:
            raise click.UsageError(f"{given[0]} needs --from")
        if clear:
            unskip(what, run=run, cache=cache)
        found = list_skips(what, run=run, cache=cache)
    else:
        if stop is None or batch is None or clear:
            raise click.UsageError("--from needs --to and --batch, and cannot be combined with --clear")
        found = skip_samples(what, start, stop, batch_size=batch, run=run, cache=cache, dry_run=dry_run)
    if as_json:
        print_json(found)
        return
    for each in found.to_dict()["skips"]:
        print_line(
            f"run {found['run']!r} {'would skip' if dry_run else 'skips'} samples {each['start']:,} to {each['stop']:,}: "
            f"{each['samples']:,} samples, {each['tokens']:,} tokens"
        )
    if not found["skips"]:
        print_line(f"run {found['run']!r} skips no samples")
