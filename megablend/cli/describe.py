"""The command `megablend describe`, which prints what a run reads, or would read, and what a cache
contains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from megablend.cli.options import as_json, command, finish, in_cache, of_what, refuse_options
from megablend.cli.output import Column, print_first, print_line, print_lines, print_table

if TYPE_CHECKING:
    from megablend.inspect.description import (
        CacheDescription,
        Description,
        FilesDescription,
        IndexDescription,
        RunDescription,
        SourceDescription,
        SourceFiles,
        SplitDescription,
        StageDescription,
    )
    from megablend.prefetch.estimate_mirror import MirrorEstimate

TOP = 50
"""The number of sources that tables show by default if `--all` is given."""
TOP_OF_SUMMARY = 12
"""The number of sources that the summary shows by default, so that it fits one screen."""
_WARNINGS_OF_SUMMARY = 6
"""The maximum number of warnings that the summary prints."""
STAGES = 12
"""The maximum number of stages to print."""


@command()
@of_what
@click.option(
    "--all",
    "whole",
    is_flag=True,
    help="Print all figures, for every split and stage and for the index.",
)
@click.option(
    "--micro-batch",
    type=click.IntRange(1),
    help="Estimate steps and read amplification for this micro-batch size.",
)
@click.option(
    "--ranks",
    "--data-parallel",
    type=click.IntRange(1),
    help="Number of data-parallel ranks, for estimates.  [default: 1]",
)
@click.option(
    "--workers",
    type=click.IntRange(0),
    help="Number of workers of each loader, for estimates.  [default: 0]",
)
@click.option(
    "--nodes",
    type=click.IntRange(1),
    help="Number of nodes with mirrors, among which the ranks are divided, for estimates.",
)
@click.option(
    "--mirror-size",
    metavar="SIZE",
    help="Size of each node's mirror, such as 2TB, for estimates.  [default: the config's]",
)
@click.option(
    "--top",
    type=click.IntRange(0),
    help=f"Number of sources to show; 0 shows all.  [default: {TOP_OF_SUMMARY}, {TOP} with --all, all in JSON]",
)
@click.option(
    "--sort",
    metavar="KEY",
    help="Sort sources by name, tokens, share, samples or epochs.  [default: the config's order; share if some are left out]",
)
@click.option(
    "--match",
    metavar="PATTERN",
    help="Show only sources whose names match a pattern such as 'web-*'.",
)
@click.option(
    "--html",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Also write the description, with charts, to FILE, an HTML page that works offline.",
)
@in_cache
@as_json
def describe(
    what: str,
    whole: bool,
    micro_batch: int | None,
    ranks: int | None,
    workers: int | None,
    nodes: int | None,
    mirror_size: str | None,
    top: int | None,
    sort: str | None,
    match: str | None,
    html: str | None,
    cache: str | None,
    as_json: bool,
) -> None:
    """Describe what a run reads, or what a cache contains.

    If CONFIG's run has not been built, describe what it would read. A CACHE is a folder or a URL.
    """
    from megablend.inspect.describe import describe as describe_run
    from megablend.inspect.description import CacheDescription, FilesDescription, RunDescription
    from megablend.inspect.select import select_sources

    if micro_batch is None:
        for name, value in {
            "--ranks": ranks,
            "--workers": workers,
            "--nodes": nodes,
            "--mirror-size": mirror_size,
        }.items():
            if value is not None:
                raise click.UsageError(
                    f"{name} {value} needs --micro-batch: without it nothing is estimated"
                )
    description: Description = describe_run(
        what,
        cache=cache,
        micro_batch_size=micro_batch,
        data_parallel_size=ranks or 1,
        num_workers=workers or 0,
        num_nodes=nodes,
        mirror_size=mirror_size,
    )
    if html is not None:
        _write_html(description, html, what, cache)
    if isinstance(description, CacheDescription):
        refuse_options(
            {"--top": top, "--sort": sort, "--match": match},
            f"selects sources of a config, but {what} is a cache; give a config",
        )
        finish(description, as_json, print_cache)
        return
    if top is None and not as_json:
        top = TOP if whole else TOP_OF_SUMMARY
    is_summary = not (as_json or whole)
    num_sources = len(description.index.sources) if isinstance(description, RunDescription) else 0
    if is_summary and sort is None and top and top < num_sources:
        sort = "share"
    description = select_sources(description, top=top, sort=sort, match=match)
    if isinstance(description, FilesDescription):
        finish(description, as_json, _print_files)
    else:
        finish(description, as_json, print_tables if whole else print_summary)


def _write_html(description: Description, html: str, what: str, cache: str | None) -> None:
    """Write the page of a run. Raises: click.UsageError if there is no indexed run."""
    from megablend.inspect.description import CacheDescription, RunDescription
    from megablend.inspect.html import write_html
    from megablend.inspect.output_file import check_output
    from megablend.operations.session import Session

    if isinstance(description, RunDescription):
        write_html(description, check_output(html, Session(what, cache=cache)))
        return
    if isinstance(description, CacheDescription):
        raise click.UsageError(f"--html needs an indexed run: {what} is a cache; give a config")
    raise click.UsageError(f"--html needs an indexed run: {description.note}")


def print_cache(description: CacheDescription) -> None:
    """Print the indexes and runs of a cache."""
    from megablend.cli.runs import print_runs
    from megablend.inspect.description import DamagedIndex

    columns: dict[str, Column] = {
        "index": "digest",
        "sources": lambda index: str(len(index.sources)),
        "files": "files",
        "blocks": "blocks",
        "rows": "rows",
        "tokens": "tokens",
        "kB": lambda index: f"{index.index_bytes / 1e3:,.1f}",
    }
    print_table(
        f"cache {description.cache}",
        columns,
        (index for index in description.indices if not isinstance(index, DamagedIndex)),
    )
    print_runs(description.runs)
    print_lines(
        (index.problem for index in description.indices if isinstance(index, DamagedIndex)),
        "damaged: ",
    )


def _print_files(description: FilesDescription) -> None:
    """Print the files of sources without an index, in the same way with and without `--all`."""
    columns: dict[str, Column] = {
        "source": "name",
        "format": "format",
        "files": "files",
        "MB": lambda source: f"{source.bytes / 1e6:,.1f}",
        "requested": _write_request,
    }
    print_table(f"run {description.run!r}", columns, description.files)
    _print_left_out(description.sources_left_out)
    print_line(f"note: {description.note}")


def _write_request(source: SourceFiles) -> str:
    """Return the share that the config gives a source, such as `weight 2`."""
    return " ".join(
        f"{unit} {value if isinstance(value, str) else format(value, 'g')}"
        for unit, value in (source.share or {}).items()
    )


def print_summary(description: RunDescription) -> None:
    """Print a summary on one screen: warnings, a line for each source of train, and a line for each
    other split."""
    _print_doubts(description, most_warnings=_WARNINGS_OF_SUMMARY)
    state = "committed" if description.committed else "not committed"
    index = f"index of {description.index.files:,} files, {description.index.tokens:,} tokens, in {description.cache}"
    train = description.splits["train"]
    stages = train.stages or ()
    lengths = dict.fromkeys(
        [description.sequence_length, *(stage.sequence_length for stage in stages)]
    )
    listed = ", then ".join(f"{length:,}" for length in lengths)
    print_line(f"run {description.run!r}, {state}: samples of {listed} tokens; {index}")
    columns: dict[str, Column] = {
        "source": "name",
        "share": lambda source: _write_share(source.actual_share),
        "tokens read": "tokens_read",
        "epochs": "epochs:,.2f",
        "remarks": lambda source: ", ".join(_find_remarks(source, train)),
    }
    print_table(_title_split("train", train), columns, train.sources, words=("remarks",))
    _print_left_out(train.sources_left_out)
    for name, split in description.splits.items():
        if name == "train":
            continue
        if split.problem is None:
            print_line(_title_split(name, split))
        else:
            print_line(f"{name}: {split.problem}")
    if len(description.stages) > 1:
        print_line(
            f"{len(description.stages):,} stages, which end at sample {_list_ends(description)}"
        )
    _print_estimates(description)
    print_line("`--all` prints all figures, for every split and stage and for the index")


def _print_doubts(description: RunDescription, *, most_warnings: int) -> None:
    """Print the problems, warnings and notes of a run, which come before everything else.

    Args:
        most_warnings: number of warnings that are printed; the others are counted.
    """
    from megablend.cli.build import print_problems

    print_problems(description.problems)
    print_first(
        [f"warning: {warning}" for warning in description.warnings],
        most_warnings,
        "warning: {n} more; `--all` prints them",
    )
    if description.note is not None:
        print_line(f"note: {description.note}")
    for skipped in description.skips:
        print_line(
            f"samples {skipped.start:,} to {skipped.stop:,} are skipped: {skipped.tokens:,} tokens are not read"
        )
    for bad in description.bad_documents or ():
        print_line(
            f"source {bad.source!r}: {bad.count:,} documents were left out ({bad.kind}): {'; '.join(bad.first)}"
        )


def _title_split(name: str, split: SplitDescription) -> str:
    """Return the title of a split: its name, size and kind."""
    scope = "blended" if split.blended else "one unblended pass"
    return f"{name}: {split.samples:,} samples, {split.tokens:,} tokens, {scope}"


def _write_share(share: float) -> str:
    """Return a share as text, in percent."""
    return "<0.01 %" if 0 < share < 5e-5 else f"{share * 100:.2f} %"


def _find_remarks(source: SourceDescription, split: SplitDescription) -> Iterator[str]:
    """Yield remarks on anything unusual about a source."""
    if not source.samples:
        yield "is not read"
    # Rounding changes a share by less than a sample, in each stage
    most_rounded = len(split.stages or ("one",))
    difference = abs(source.requested_share - source.actual_share) * split.samples
    if split.blended and difference > most_rounded:
        yield f"{_write_share(source.requested_share)} requested"
    if source.samples and source.samples == source.most_samples:
        yield "all that its caps allow"
    if source.epoch_ends:
        yield f"epoch 1 from about sample {source.epoch_ends[0]:,}"
    if source.withdrawn_tokens is not None:
        yield f"{source.withdrawn_tokens:,} tokens withdrawn"


def _list_ends(description: RunDescription) -> str:
    """Return the ends of the first STAGES stages as text."""
    shown = [f"{end:,}" for end in description.stages[:STAGES]]
    return ", ".join(shown) + (", ..." if len(description.stages) > STAGES else "")


def print_tables(description: RunDescription) -> None:
    """Print all figures of the index and of each split."""
    _print_doubts(description, most_warnings=len(description.warnings))
    _print_index(description.index, description.cache)
    for name, split in description.splits.items():
        if split.problem is not None:
            print_line(f"{name}: {split.problem}")
        else:
            _print_split(name, split)
    verb = "end" if description.committed else "would end"
    stages = ", ".join(f"{end:,}" for end in description.stages)
    print_line(
        f"run {description.run!r}: stages {verb} at sample {stages}; plan {description.plan}"
    )
    _print_estimates(description)


def _print_estimates(description: RunDescription) -> None:
    """Print what loaders read and need, and the stages that could replace `on_exhausted`."""
    from megablend.cli.build import format_transfer
    from megablend.cli.runs import print_fitting
    from megablend.order.registry import find_order
    from megablend.prefetch.memory_budget import format_bytes

    if description.transfer is not None:
        loaders = "" if description.read_amplification is not None else " with one loader"
        print_line(
            f"reading train from object stores takes {format_transfer(description.to_dict()['transfer'])}{loaders}"
        )
    if description.mirror is not None:
        _print_mirror(description.mirror)
    if description.read_amplification is not None:
        print_line(
            f"read amplification: {description.read_amplification:.3f} bytes are read for each byte that is used"
        )
        order = find_order(description.order)
        if not order.consumes_whole_blocks:
            reads = f"order: {description.order} reads a whole block for each {order.unit}"
            print_line(f"{reads}, which is the reason (with `order: block` it would be close to 1)")
    if description.memory_per_rank is not None and description.memory_limit_per_rank is not None:
        needed = format_bytes(description.memory_per_rank, up=True)
        limit = format_bytes(description.memory_limit_per_rank)
        print_line(f"memory of a rank: at least {needed} of the {limit} that `memory` allows")
    if description.fitting_unit is not None:
        print_fitting(description.fitting_unit)


def _print_mirror(estimate: MirrorEstimate) -> None:
    """Print what reading train takes through mirrors, by epoch."""
    from megablend.prefetch.memory_budget import format_bytes

    if not estimate.epochs:
        print_line("mirror: train reads no remote data")
        return
    held = "without limit" if estimate.size is None else f"{format_bytes(estimate.size)} each"
    needed = format_bytes(estimate.needed_bytes, up=True)
    fits = "fit" if estimate.fits else "do not fit"
    about = "" if estimate.is_exact else " (estimated from a part of them)"

    def write(kind: str) -> dict[str, Column]:
        return {
            f"{kind} GB": lambda epoch: f"{getattr(epoch, f'{kind}_bytes') / 1e9:,.3f}",
            f"{kind} requests": f"{kind}_requests",
        }

    columns: dict[str, Column] = {"epoch": "number", "samples": "samples"}
    nodes = "1 node" if estimate.nodes == 1 else f"{estimate.nodes:,} nodes"
    print_table(
        f"mirrors of {nodes}, {held}, copies: {estimate.copies}: "
        f"the {needed} that train reads {fits}{about}",
        columns | write("source") | write("network") | write("disk"),
        estimate.epochs,
    )


def _print_index(index: IndexDescription, cache: str) -> None:
    """Print a table of the sources of an index."""
    columns: dict[str, Column] = {
        "source": "name",
        "format": "format",
        "column": "column_taken",
        "files": "files",
        "blocks": "blocks",
        "rows": "rows",
        "tokens": "tokens",
    }
    title = f"index {index.digest} in {cache} ({index.index_bytes / 1e3:,.1f} kB)"
    print_table(title, columns, index.sources, total=index)
    _print_left_out(index.sources_left_out)
    for source in index.sources:
        print_lines(source.skipped, f"skipped, cannot be read: source {source.name!r}: ")
    tables = [
        listed.document_table_bytes
        for listed in index.sources
        if listed.document_table_bytes is not None
    ]
    if tables:
        print_line(f"document tables: {len(tables):,} sources, {sum(tables) / 1e3:,.1f} kB")


def _print_split(name: str, split: SplitDescription) -> None:
    """Print all figures of the sources and stages of a split."""
    from megablend.inspect.figures import list_figures

    columns: dict[str, Column] = {"source": "name"}
    columns |= {figure.title: figure.write for figure in list_figures(split)}
    print_table(_title_split(name, split), columns, split.sources)
    _print_left_out(split.sources_left_out)
    if split.stages is not None:
        _print_stages(name, split.stages)
    for source in split.sources:
        if source.withdrawn_tokens is not None:
            tokens = f"{source.withdrawn_tokens:,} tokens of withdrawn files are not read"
            print_line(
                f"source {source.name!r}: {tokens} in the epoch in which they were withdrawn"
            )
    first = split.first_repeated_source
    if first is not None:
        print_line(
            f"first source to begin epoch 1, which reads its tokens again: {first.source!r}, at about sample {first.sample:,}"
        )
    elif split.blended:
        print_line("no source begins epoch 1: none has as many samples as its first epoch")


def _print_stages(split: str, stages: Sequence[StageDescription]) -> None:
    """Print the first STAGES stages, each with the sources whose shares it changes."""
    from megablend.cli.runs import print_drain

    columns: dict[str, Column] = {
        "changed source": "name",
        "share": "share:.6f",
        "actual": "actual_share:.6f",
        "samples": "samples",
        "tokens": "tokens",
        "first sample": "first_sample",
        "last sample": "last_sample",
        "worst error": "worst_prefix_error:.2f",
    }
    before: dict[str, float] = {}
    for number, stage in enumerate(stages[:STAGES]):
        changed = [source for source in stage.sources if source.share != before.get(source.name)]
        title = (
            f"{split}, stage {number}: samples {stage.start:,} to {stage.stop:,} of {stage.sequence_length:,} "
            f"tokens, {stage.lanes:,} lanes"
        )
        if changed:
            print_table(title, columns, changed)
        else:
            drained = ", after a drain" if stage.drain is not None else ""
            print_line(f"{title}; all shares as before{drained}")
        if stage.drain is not None:
            print_drain(stage.drain)
        before = {source.name: source.share for source in stage.sources}
    if len(stages) > STAGES:
        print_line(f"and {len(stages) - STAGES:,} more stages (--json has all)")


def _print_left_out(count: int | None) -> None:
    """Print the number of sources that a table leaves out, if there are any."""
    if count:
        print_line(f"and {count:,} more sources (--top 0 shows all; --sort and --match select)")
