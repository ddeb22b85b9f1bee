"""megablend describe: what a run reads, or would read, and what a cache contains."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from megablend.cli.options import as_json, in_cache, print_json

if TYPE_CHECKING:
    from megablend.api.description import CacheDescription, FilesDescription

TOP = 50
"""Sources that tables show by default."""


@click.command()
@click.argument("what", metavar="CONFIG|CACHE")
@click.option(
    "--micro-batch",
    type=click.IntRange(1),
    help="Micro-batch size to estimate steps and read amplification for.",
)
@click.option(
    "--ranks",
    "--data-parallel",
    type=click.IntRange(1),
    help="Number of data-parallel ranks to estimate for.  [default: 1]",
)
@click.option(
    "--workers", type=click.IntRange(0), help="Number of workers of each loader to estimate for.  [default: 0]"
)
@click.option(
    "--top",
    type=click.IntRange(0),
    help=f"Number of sources to show; 0 shows all.  [default: {TOP} in tables, all in JSON]",
)
@click.option("--sort", metavar="KEY", help="Sort sources by name, tokens, share, samples or epochs.")
@click.option("--match", metavar="PATTERN", help="Show only sources whose names match a pattern such as 'web-*'.")
@click.option(
    "--html",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Also write the description with charts to FILE, one page that needs no network.",
)
@in_cache
@as_json
def describe(
    what: str,
    micro_batch: int | None,
    ranks: int | None,
    workers: int | None,
    top: int | None,
    sort: str | None,
    match: str | None,
    html: str | None,
    cache: str | None,
    as_json: bool,
) -> None:
    """Describe what a run reads, or before it is built would read (for a CONFIG), or what a CACHE folder contains."""
    from megablend.api.describe import describe as describe_run
    from megablend.api.select import select_sources

    if micro_batch is None:
        for name, value in (("--ranks", ranks), ("--workers", workers)):
            if value is not None:
                raise click.UsageError(
                    f"{name} {value} needs --micro-batch: without it no read amplification is estimated"
                )
    described = describe_run(
        what,
        cache=cache,
        micro_batch_size=micro_batch,
        data_parallel_size=ranks or 1,
        num_workers=workers or 0,
        document_lengths=html is not None,
    )
    if html is not None:
        from megablend.api.description import RunDescription
        from megablend.api.output_file import check_output
        from megablend.report import write_html

        if not isinstance(described, RunDescription):
            raise click.UsageError(f"--html draws an indexed run: {_why_no_run(described, what)}")
        write_html(described, check_output(html, what, cache=cache))
    found = described.to_dict()
    if "indices" in found:
        if given := [
            name for name, value in (("--top", top), ("--sort", sort), ("--match", match)) if value is not None
        ]:
            raise click.UsageError(f"{given[0]} selects sources of a config, but {what} is a cache; give a config")
    else:
        select_sources(found, top=TOP if top is None and not as_json else top, sort=sort, match=match)
    if as_json:
        print_json(found)
    else:
        from megablend.cli.describe_tables import print_description
        from megablend.cli.run_tables import print_cache

        (print_cache if "indices" in found else print_description)(found)


def _why_no_run(described: CacheDescription | FilesDescription, what: str) -> str:
    from megablend.api.description import CacheDescription

    if isinstance(described, CacheDescription):
        return f"{what} is a cache; give a config"
    return f"{described.note}"
