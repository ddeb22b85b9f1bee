"""The commands `megablend show`, `find`, `diff` and `export`, which print what a step saw, when a
document is read and where runs differ, and write the order as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from megablend.cli.options import (
    as_json,
    command,
    finish,
    in_cache,
    of_run,
    of_split,
    of_what,
    refuse_options,
)
from megablend.cli.output import (
    Column,
    print_first,
    print_json,
    print_line,
    print_table,
    print_text,
)
from megablend.errors import ConfigError

if TYPE_CHECKING:
    from megablend.inspect.diff import DiffResult
    from megablend.inspect.export import ExportResult
    from megablend.inspect.find import FindResult
    from megablend.inspect.show import SampleDescription, StepDescription

SHOWN_TEXT = 60
"""The maximum number of characters of each sample's text to print without --all."""
SHOWN_TOKENS = 8
"""The number of tokens to print from the start of each sample of a step."""
SHOWN_FIRST = 24
"""The number of tokens to print from the start of a sample without --all."""
SHOWN_LAST = 8
"""The number of tokens to print from the end of a sample without --all."""
SHOWN_SAMPLES = 20
"""The maximum number of samples of each source to list without --all."""
SHOWN_DIFFERENCES = 30
"""The maximum number of differences to print. The JSON output has all differences."""


@command()
@of_what
@click.option("--sample", "-k", type=int, help="Sample number, from 0.")
@click.option(
    "--step",
    type=click.IntRange(0),
    help="Step number, from 0: show a rank's samples at this step; needs --micro-batch.",
)
@click.option("--rank", type=click.IntRange(0), help="Data-parallel rank.  [default: 0]")
@click.option(
    "--micro-batch",
    type=click.IntRange(1),
    help="Micro-batch size: samples per rank in a micro step.",
)
@click.option(
    "--data-parallel",
    "--ranks",
    type=click.IntRange(1),
    help="Number of data-parallel ranks.  [default: 1]",
)
@click.option(
    "--global-batch",
    type=click.IntRange(1),
    help="Samples per step, including gradient accumulation.  [default: micro batch x ranks]",
)
@of_run
@of_split
@click.option(
    "--tokenizer", metavar="FILE", help="Tokenizer file (tokenizer.json) to decode the text with."
)
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
    """Show a sample, or what a rank read at a step.

    Each sample is shown with the locations of its tokens. For a cache folder, give --run: the run's
    ledger is enough. If the config has been edited since the build, the ledger applies.
    """
    from megablend.inspect.show import StepDescription, show_step
    from megablend.inspect.show import show as show_sample

    if (sample is None) == (step is None):
        raise click.UsageError("give either --sample or --step")
    decoder = None if tokenizer is None else _load_tokenizer(tokenizer)
    description: SampleDescription | StepDescription
    if sample is not None:
        batch = {
            "--rank": rank,
            "--micro-batch": micro_batch,
            "--data-parallel": data_parallel,
            "--global-batch": global_batch,
        }
        refuse_options(batch, "needs --step: a sample does not depend on the batch")
        description = show_sample(what, sample, split, run=run, cache=cache)
        samples: Sequence[SampleDescription] = [description]
    else:
        assert step is not None
        if micro_batch is None:
            raise click.UsageError(
                "--step needs --micro-batch, which with --data-parallel determines the samples of a step"
            )
        description = show_step(
            what,
            step,
            rank=rank or 0,
            micro_batch_size=micro_batch,
            data_parallel_size=data_parallel or 1,
            global_batch_size=global_batch,
            split=split,
            run=run,
            cache=cache,
        )
        samples = description.samples
    texts = [None if decoder is None else _decode(decoder, described) for described in samples]
    if as_json:
        print_json(_add_texts(description.to_dict(), texts))
    elif isinstance(description, StepDescription) and not whole:
        _print_step(description, texts)
    else:
        for described, text in zip(samples, texts, strict=True):
            print_sample(described, text, whole=whole)


def _load_tokenizer(path: str) -> Any:
    """Load a tokenizer.json with the tokenizers library. Raises: ConfigError."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError(
            "--tokenizer needs the tokenizers library: pip install tokenizers"
        ) from None
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(
            f"{path}: cannot be loaded as a tokenizer.json: {error}; write it with `tokenizer.save`"
        ) from None


def _decode(decoder: Any, sample: SampleDescription) -> str:
    """Return the text of a sample. Ids that are not in the tokenizer's vocabulary are left out,
    including ids of more than 32 bits."""
    ids = [token for token in sample.tokens if 0 <= token < 1 << 32]
    text: str = decoder.decode(ids, skip_special_tokens=False)
    return text


def _add_texts(description: dict[str, Any], texts: Sequence[str | None]) -> dict[str, Any]:
    """Add texts, if they were decoded, to the JSON of a sample or of a step's samples."""
    for sample, text in zip(description.get("samples", [description]), texts, strict=True):
        if text is not None:
            sample["text"] = text
    return description


def print_sample(
    sample: SampleDescription, text: str | None = None, *, whole: bool = False
) -> None:
    """Print the locations of a sample's pieces, its first and last tokens (or all), and its text if
    it was decoded."""
    epochs = ", ".join(map(str, sample.epochs))
    print_line(
        f"{sample.split} sample {sample.sample:,}: source {sample.source!r}, ordinal {sample.ordinal:,}, epoch {epochs}"
    )
    columns: dict[str, Column] = {
        "file": "file",
        "block of the index": "block",
        "byte offset": "byte_offset",
        "tokens of the block": lambda piece: f"{piece.first_token:,} to {piece.stop_token:,}",
        "epoch": "epoch",
    }
    print_table("pieces", columns, sample.pieces)
    for text_place in dict.fromkeys(
        text_place for piece in sample.pieces for text_place in piece.texts
    ):
        key = "" if text_place.key is None else f", key {text_place.key}"
        print_line(
            f"text: {text_place.text}, line {text_place.line:,}, byte {text_place.offset:,}{key}"
        )
    print_line(
        f"documents, or their continuations in other blocks, begin at tokens {_shorten_list(sample.document_starts, whole, ', ')}"
    )
    appended = set(sample.appended)
    tokens = [f"{token}*" if i in appended else str(token) for i, token in enumerate(sample.tokens)]
    note = "  (*: appended, not in any file)" if appended else ""
    print_line(f"tokens: {_shorten_list(tokens, whole)}{note}")
    for name, numbers in sample.extra.items():
        print_line(f"{name}: {_shorten_list(numbers, whole)}")
    if text is not None:
        print_line("text:")
        print_text(text)


def _shorten_list(numbers: Sequence[object], whole: bool, between: str = " ") -> str:
    """Return numbers as text: all of them, or the first and last few, and how many there are."""
    texts = [str(number) for number in numbers]
    if whole or len(texts) <= SHOWN_FIRST + SHOWN_LAST:
        return between.join(texts)
    first = between.join(texts[:SHOWN_FIRST])
    last = between.join(texts[-SHOWN_LAST:])
    return f"{first} ... {last} ({len(texts):,}; --all prints all)"


def _print_step(step: StepDescription, texts: Sequence[str | None]) -> None:
    """Print a line for each sample of a step."""
    columns: dict[str, Column] = {
        "sample": "sample",
        "source": "source",
        "epoch": lambda sample: ", ".join(map(str, sample.epochs)),
        "pieces": lambda sample: len(sample.document_starts),
        "file": _name_files,
        "first tokens": lambda sample: " ".join(map(str, sample.tokens[:SHOWN_TOKENS])),
    }
    title = f"run {step.run!r}, {step.split} step {step.step:,}, rank {step.rank}: {len(step.samples)} samples"
    print_table(title, columns, step.samples)
    for sample, text in zip(step.samples, texts, strict=True):
        if text is not None:
            print_line(f"{sample.sample:,}: {_shorten(' '.join(text.split()), SHOWN_TEXT)}")


def _name_files(sample: SampleDescription) -> str:
    """Return the name of a sample's first file, followed by an ellipsis if there are others."""
    files = dict.fromkeys(piece.file for piece in sample.pieces)
    return next(iter(files)).rpartition("/")[2] + (", ..." if len(files) > 1 else "")


def _shorten(text: str, length: int) -> str:
    """Return the beginning of a text, with dots if it is longer."""
    return text if len(text) <= length else f"{text[:length]} ..."


@command()
@of_what
@click.argument("place", metavar="FILE[:ROW]")
@of_run
@of_split
@click.option(
    "--batch",
    type=click.IntRange(1),
    help="Global batch size (samples per step, over all ranks): also print the step of each sample.",
)
@click.option(
    "--limit",
    type=click.IntRange(1),
    help=f"Number of samples to list.  [default: {SHOWN_SAMPLES} in tables, all in JSON]",
)
@click.option(
    "--line",
    type=click.IntRange(0),
    help="For a text file: the document's line, from 1 (in a table: its row, from 0).",
)
@click.option(
    "--byte",
    type=click.IntRange(0),
    help="For a text file: a byte offset within the document's line.",
)
@click.option("--key", help="For a text file: the value of the source's `key`.")
@click.option("--all", "whole", is_flag=True, help="List all samples.")
@in_cache
@as_json
def find(
    what: str,
    place: str,
    run: str | None,
    split: str,
    batch: int | None,
    limit: int | None,
    line: int | None,
    byte: int | None,
    key: str | None,
    whole: bool,
    cache: str | None,
    as_json: bool,
) -> None:
    """List the samples that read a file, a row, or a document.

    FILE is the path of a data file, or the end of an indexed path, long enough to be unique. Rows
    are counted from 0.
    """
    from megablend.inspect.find import find as find_samples

    if limit is not None and whole:
        raise click.UsageError("give only one of --limit and --all")
    if limit is None and not whole and not as_json:
        limit = SHOWN_SAMPLES
    if sum(location is not None for location in (line, byte, key)) > 1:
        raise click.UsageError("give only one of --line, --byte and --key")
    is_text = any(location is not None for location in (line, byte, key))
    file, row = (place, None) if is_text else split_place(place)
    result = find_samples(
        what,
        file,
        row,
        run=run,
        split=split,
        batch_size=batch,
        limit=limit,
        cache=cache,
        line=line,
        byte=byte,
        key=key,
    )
    finish(result, as_json, lambda result: _print_found(result, counts_steps=batch is not None))


def split_place(place: str) -> tuple[str, int | None]:
    """Split a place into a file and a row: the number after the last colon, or None without one."""
    file, colon, row = place.rpartition(":")
    return (file, int(row)) if colon and row.isascii() and row.isdigit() else (place, None)


def _print_found(result: FindResult, *, counts_steps: bool) -> None:
    """Print a table of the samples that read each file."""
    columns: dict[str, Column] = {
        "sample": "sample",
        "step": lambda match: "skipped" if match.skipped else match.step,
        "epoch": "epoch",
        "tokens of the sample": lambda match: ", ".join(
            f"{piece.first_token:,} to {piece.stop_token:,}" for piece in match.pieces
        ),
        "offset": lambda match: ", ".join(f"{piece.offset:,}" for piece in match.pieces),
    }
    if not counts_steps:
        del columns["step"]
    for file in result.found:
        row = "" if file.row is None else f" row {file.row:,}"
        title = (
            f"{file.file}{row}: {file.tokens:,} tokens in {result.split}, source {file.source!r}"
        )
        if not file.samples:
            print_line(f"{title}: no sample of run {result.run!r} reads it")
            continue
        print_table(title, columns, file.samples)
        if not file.complete:
            print_line(f"more samples follow; --all lists all (run {result.run!r})")


@command()
@click.argument("a", metavar="A", type=click.Path(exists=True))
@click.argument("b", metavar="B", type=click.Path(exists=True))
@as_json
def diff(a: str, b: str, as_json: bool) -> None:
    """Compare two runs: how and from which sample they differ.

    A and B are each a config (planned as `build` would plan it), a run's ledger (runs/NAME.json of
    a cache) or a checkpoint's state saved as JSON.
    """
    from megablend.inspect.diff import diff as compare

    finish(compare(a, b), as_json, _print_diff)


def _print_diff(result: DiffResult) -> None:
    """Print the differences between two runs, and the sample up to which they are the same."""
    lines = [
        f"{difference.what}: {_name_value(difference.a)} | {_name_value(difference.b)}"
        for difference in result.differences
    ]
    print_first(lines, SHOWN_DIFFERENCES, "and {n} more differences; --json has all")
    shorter = min(result.samples)
    if not result.is_by_samples:
        same = "the plans are the same"
        known = f"the plans are known to be the same up to sample {result.agrees_up_to:,}"
        print_line(known if result.differences else same)
    elif result.parts_at is not None:
        print_line(f"the same up to sample {result.parts_at:,}, which differs")
    elif shorter == max(result.samples):
        print_line(f"all {shorter:,} samples are the same")
    else:
        print_line(f"the same up to sample {shorter:,}, where one of them ends")


def _name_value(value: object) -> str:
    """Return a value of a setting as text, shortened if it is long."""
    text = "absent" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@command()
@of_what
@click.argument("target", metavar="FILE")
@click.option(
    "--from", "start", type=click.IntRange(0), default=0, show_default=True, help="First sample."
)
@click.option(
    "--to", "stop", type=click.IntRange(0), help="Sample to stop before.  [default: the run's end]"
)
@of_run
@of_split
@in_cache
@as_json
def export(
    what: str,
    target: str,
    start: int,
    stop: int | None,
    run: str | None,
    split: str,
    cache: str | None,
    as_json: bool,
) -> None:
    """Write the order of a run to a Parquet FILE.

    The file has a row for each sample: its source, epoch and pieces (file, block, tokens).
    """
    from megablend.inspect.export import export as export_order

    written = export_order(what, target, start=start, stop=stop, run=run, split=split, cache=cache)
    finish(written, as_json, _print_written)


def _print_written(written: ExportResult) -> None:
    """Print the file that was written."""
    print_line(
        f"{written.file}: samples {written.start:,} to {written.stop:,} of run {written.run!r}, "
        f"{written.bytes / 1e6:,.1f} MB"
    )
