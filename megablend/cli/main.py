"""The commands, and how they end.

Results go to stdout (a table, or with --json one JSON object), everything else to stderr. Exit codes: 0 done; 2 usage, config,
blend, state or launcher; 3 data or cache; 70 a bug of megablend; 130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import click

from megablend import __version__
from megablend.cli.megatron_cache import megatron_cache
from megablend.errors import ConfigError, MegablendError

EXIT_USAGE, EXIT_BUG, EXIT_INTERRUPTED = 2, 70, 130

as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
in_cache = click.option("--cache", metavar="DIR", help="Cache folder, in place of the config's.")
of_split = click.option("--split", default="train", show_default=True, help="train, valid or test.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """Index token files, blend them, read them back as training batches."""


@cli.command()
@click.argument("config")
@in_cache
@as_json
def build(config: str, cache: str | None, as_json: bool) -> None:
    """Index what CONFIG lists and write its run's ledger. Under mpirun or srun the ranks share the work."""
    from megablend.api.build import build as build_run
    from megablend.cli.progress import progress_on
    from megablend.index.launch import detect

    launch = detect()
    with progress_on(sys.stderr, quiet=launch.rank != 0) as progress:
        built = build_run(config, cache=cache, progress=progress, launch=launch)
    if launch.rank != 0:
        return
    if as_json:
        ledger = {"name": built.ledger.run, "index": built.ledger.index, "plan": built.ledger.digest}
        run = {
            **ledger,
            "stages": list(built.ledger.ends),
            "stages_before": built.stages_before,
            "pinned": built.pinned,
        }
        documents = None if built.documents is None else asdict(built.documents)
        _print_json({"index": asdict(built.index), "documents": documents, "run": run, "ranks": launch.size})
    else:
        from megablend.cli.tables import print_built

        print_built(built, ranks=launch.size)


@cli.command()
@click.argument("what", metavar="CONFIG|CACHE")
@click.option(
    "--micro-batch", type=click.IntRange(1), help="Tell the read amplification of loaders of this micro batch,"
)
@click.option("--ranks", type=click.IntRange(1), default=1, help="on so many data-parallel ranks,")
@click.option("--workers", type=click.IntRange(0), default=0, help="with so many workers each.")
@in_cache
@as_json
def describe(what: str, micro_batch: int | None, ranks: int, workers: int, cache: str | None, as_json: bool) -> None:
    """Say what a run will read (for a config), or what a cache holds (for its folder)."""
    from megablend.api.describe import describe as describe_run

    found = describe_run(what, cache=cache, micro_batch_size=micro_batch, data_parallel_size=ranks, num_workers=workers)
    if as_json:
        _print_json(found)
    else:
        from megablend.cli.tables import print_cache, print_description

        (print_cache if "indices" in found else print_description)(found)


@cli.command()
@click.argument("config")
@click.option("--sample", "-k", type=int, required=True, help="Sample number, from 0.")
@of_split
@click.option("--tokenizer", metavar="FILE", help="A tokenizer.json, to show the text.")
@in_cache
@as_json
def show(config: str, sample: int, split: str, tokenizer: str | None, cache: str | None, as_json: bool) -> None:
    """Show what a sample holds and where it comes from."""
    from megablend.api.show import show as show_sample

    decoder = None if tokenizer is None else _load_tokenizer(tokenizer)
    found = show_sample(config, sample, split, cache=cache)
    if decoder is not None:
        found["text"] = decoder.decode(found["tokens"], skip_special_tokens=False)
    if as_json:
        _print_json(found)
    else:
        from megablend.cli.tables import print_sample

        print_sample(found)


@cli.command()
@click.argument("config")
@click.option(
    "--data",
    is_flag=True,
    required=True,
    help="Read all tokens: smallest and largest of each source, ids that no vocabulary has.",
)
@in_cache
@as_json
def check(config: str, data: bool, cache: str | None, as_json: bool) -> None:
    """Check the data that CONFIG's run reads. Exits with 3 where something is wrong."""
    from megablend.api.check_data import check_data
    from megablend.cli.tables import print_checked

    found = check_data(config, cache=cache)
    if as_json:
        _print_json(asdict(found))
    else:
        print_checked(found)
    if found.problems:
        sys.exit(3)


@cli.command()
@click.argument("cache", metavar="CACHE")
@click.option("--data", is_flag=True, help="Read every block of every data file, too.")
@as_json
def verify(cache: str, data: bool, as_json: bool) -> None:
    """Check a cache: checksums, counts, runs, and with --data all data files. Exits with 3 where something is wrong."""
    from megablend.api.verify import verify as verify_cache

    if not Path(cache).is_dir():
        raise ConfigError(f"{cache}: found no such folder, expected a cache that `megablend build` filled")
    problems = verify_cache(cache, data=data)
    if as_json:
        _print_json({"cache": str(Path(cache).absolute()), "data": data, "problems": problems})
    else:
        for problem in problems:
            click.echo(problem)
        click.echo(f"{cache}: {f'{len(problems)} problems' if problems else 'sound'}")
    if problems:
        sys.exit(3)


@cli.command()
@click.argument("cache", metavar="CACHE")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.option(
    "--older-than",
    metavar="DAYS",
    type=click.FloatRange(min=0),
    default=7.0,
    show_default=True,
    help="Leave what was in use since: at least as long as jobs run that read an index without a run.",
)
@as_json
def gc(cache: str, dry_run: bool, older_than: float, as_json: bool) -> None:
    """Remove from a cache what nothing needs: old indices that no run stands on, and files' fragments that no index uses."""
    from megablend.api.gc import gc as collect

    found = collect(cache, older_than_days=older_than, dry_run=dry_run)
    if as_json:
        _print_json({"cache": str(Path(cache).absolute()), "dry_run": dry_run, **asdict(found)})
        return
    verb = "would go" if dry_run else "removed"
    for digest in found.generations:
        click.echo(f"{verb}: index {digest}")
    click.echo(
        f"{cache}: {verb}: {len(found.generations)} indices, {found.others} fragments and tables, "
        f"{found.bytes / 1e6:,.1f} MB; {len(found.kept)} indices stay"
    )


cli.add_command(megatron_cache)


def main() -> NoReturn:
    """Entry point of `megablend` and `python -m megablend`."""
    try:
        cli.main(standalone_mode=False)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(EXIT_USAGE)
    except MegablendError as error:
        click.echo(f"megablend: {error}", err=True)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("megablend: interrupted", err=True)
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception:
        traceback.print_exc()
        click.echo(
            "megablend: the above is a bug of megablend: please report it with the command and the trace", err=True
        )
        sys.exit(EXIT_BUG)
    sys.exit(0)


def _print_json(value: dict[str, Any]) -> None:
    click.echo(json.dumps(value))


def _load_tokenizer(path: str) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError("--tokenizer needs the tokenizers library: pip install tokenizers") from None
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path}: cannot load a tokenizer.json from it: {error}") from None
