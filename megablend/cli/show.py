"""megablend show: what a sample, or a rank's samples of a step, consists of."""

from __future__ import annotations

from typing import Any

import click

from megablend.cli.lines import print_line
from megablend.cli.options import as_json, in_cache, of_run, of_split, print_json
from megablend.errors import ConfigError

SHOWN_TEXT = 60
"""Characters printed of each sample's text, unless all is requested."""
SHOWN_TOKENS = 8
"""First tokens of each sample of a step."""


@click.command()
@click.argument("what", metavar="CONFIG|CACHE")
@click.option("--sample", "-k", type=int, help="Sample number, from 0.")
@click.option("--step", type=click.IntRange(0), help="Show a rank's samples of this step, from 0; needs --micro-batch.")
@click.option("--rank", type=click.IntRange(0), help="Data-parallel rank.  [default: 0]")
@click.option("--micro-batch", type=click.IntRange(1), help="Micro-batch size: samples of a rank in a micro step.")
@click.option("--data-parallel", "--ranks", type=click.IntRange(1), help="Number of data-parallel ranks.  [default: 1]")
@click.option(
    "--global-batch",
    type=click.IntRange(1),
    help="Samples of a step, with gradient accumulation.  [default: micro batch x ranks]",
)
@of_run
@of_split
@click.option("--tokenizer", metavar="FILE", help="Tokenizer file (tokenizer.json) to decode the text with.")
@click.option(
    "--all",
    "whole",
    is_flag=True,
    help="Print all tokens and all text, not just the first few. JSON always has all.",
)
@in_cache
@as_json
def show(
    what: str,
    sample: int | None,
    step: int | None,
    rank: int | None,
    micro_batch: int | None,
    data_parallel: int | None,
    global_batch: int | None,
    run: str | None,
    split: str,
    tokenizer: str | None,
    whole: bool,
    cache: str | None,
    as_json: bool,
) -> None:
    """Show what a sample contains and where it comes from, or (--step) what a rank read at a step.

    The run's ledger is enough: with a cache folder give --run. If the config was edited since, the ledger decides.
    """
    from megablend.api.show import show as show_sample
    from megablend.api.show import show_step

    batch = {
        "--rank": rank,
        "--micro-batch": micro_batch,
        "--data-parallel": data_parallel,
        "--global-batch": global_batch,
    }
    if (sample is None) == (step is None):
        raise click.UsageError("give one of --sample and --step")
    if step is None and (given := [name for name, value in batch.items() if value is not None]):
        raise click.UsageError(f"{given[0]} needs --step: a sample is the same for all batches")
    if step is not None and micro_batch is None:
        raise click.UsageError(
            "--step needs --micro-batch, which with --data-parallel determines the samples of a step"
        )
    decoder = None if tokenizer is None else _load_tokenizer(tokenizer)
    if sample is not None:
        found = show_sample(what, sample, split, run=run, cache=cache).to_dict()
        samples = [found]
    else:
        assert step is not None
        assert micro_batch is not None
        found = show_step(
            what,
            step,
            rank=rank or 0,
            micro_batch_size=micro_batch,
            data_parallel_size=data_parallel or 1,
            global_batch_size=global_batch,
            split=split,
            run=run,
            cache=cache,
        ).to_dict()
        samples = found["samples"]
    if decoder is not None:
        for each in samples:
            each["text"] = decoder.decode(each["tokens"], skip_special_tokens=False)
    if as_json:
        print_json(found)
    elif sample is not None or whole:
        from megablend.cli.tables import print_sample

        for each in samples:
            print_sample(each, whole=whole)
    else:
        _print_step(found)


def _print_step(found: dict[str, Any]) -> None:
    """Print a line for each sample."""
    from megablend.cli.tables import new_console, print_table

    console, samples = new_console(), found["samples"]
    title = (
        f"run {found['run']!r}, {found['split']} step {found['step']:,}, rank {found['rank']}: {len(samples)} samples"
    )
    rows = [
        (
            f"{each['sample']:,}",
            each["source"],
            ", ".join(map(str, each["epochs"])),
            str(len(each["document_starts"])),
            each["pieces"][0]["file"].rpartition("/")[2] + (", ..." if _num_files(each) > 1 else ""),
            " ".join(map(str, each["tokens"][:SHOWN_TOKENS])),
        )
        for each in samples
    ]
    print_table(console, title, ("sample", "source", "epoch", "pieces", "file", "first tokens"), rows)
    for each in samples:
        if "text" in each:
            text = " ".join(each["text"].split())
            shown = text if len(text) <= SHOWN_TEXT else f"{text[:SHOWN_TEXT]} ..."
            print_line(f"{each['sample']:,}: {shown}")


def _num_files(sample: dict[str, Any]) -> int:
    return len({piece["file"] for piece in sample["pieces"]})


def _load_tokenizer(path: str) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError("--tokenizer needs the tokenizers library: pip install tokenizers") from None
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path}: cannot load a tokenizer.json from it: {error}") from None
