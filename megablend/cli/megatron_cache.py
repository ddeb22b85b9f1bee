"""The command `megablend megatron-cache`, which builds Megatron's dataset cache before training,
from the flags of the training script."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any, TypeVar

import click

import megablend
from megablend.cli.options import Command, as_json, finish
from megablend.cli.output import Column, print_line, print_lines, print_table
from megablend.errors import ConfigError
from megablend.storage.setting_values import parse_size

F = TypeVar("F", bound=Callable[..., Any])

_TOKENIZER_FLAGS: dict[str, dict[str, Any]] = {
    "--tokenizer-type": {
        "help": "Build the tokenizer with the installed megatron-core, from the flags below."
    },
    "--tokenizer-model": {},
    "--tokenizer-metadata": {},
    "--tokenizer-special-tokens": {"multiple": True, "metavar": "WORDS..."},
    "--vocab-size": {"type": int},
    "--vocab-file": {},
    "--merge-file": {},
    "--tiktoken-pattern": {},
    "--tiktoken-num-special-tokens": {"type": int, "default": 1000},
    "--tokenizer-sentencepiece-legacy": {"is_flag": True},
    "--tokenizer-hf-use-fast": {"is_flag": True},
    "--tokenizer-hf-include-special-tokens": {"is_flag": True},
    "--tokenizer-hf-no-use-fast": {"is_flag": True},
    "--tokenizer-hf-no-include-special-tokens": {"is_flag": True},
    "--no-tokenizer-sentencepiece-ignore-extra-whitespaces": {"is_flag": True},
    "--null-tokenizer-eod-id": {"type": int},
    "--null-tokenizer-pad-id": {"type": int, "default": -1},
    "--chat-template": {},
    "--use-gigatoken": {"is_flag": True},
    "--trust-remote-code": {"is_flag": True},
    "--legacy-tokenizer": {"is_flag": True},
}
"""Flags of tokenizers in the training scripts of Megatron 0.16 to 0.20. Their values are part of
the identifiers."""
_IDLE_FLAGS: dict[str, dict[str, Any]] = {
    "--num-workers": {},
    "--num-dataset-builder-threads": {},
    "--object-storage-cache-path": {},
    "--per-dataset-sequences-path": {},
    "--validation-set-names": {"multiple": True},
    "--eval-micro-batch-size": {},
    "--padded-vocab-size": {},
    "--no-pad-vocab-size": {"is_flag": True},
    "--disable-pad-vocab-size": {"is_flag": True},
    "--vocab-extra-ids": {},
    "--no-mmap-bin-files": {"is_flag": True},
    "--reset-position-ids": {"is_flag": True},
    "--reset-attention-mask": {"is_flag": True},
    "--eod-mask-loss": {"is_flag": True},
    "--no-create-attention-mask-in-dataloader": {"is_flag": True},
    "--allow-ambiguous-pad-tokens": {"is_flag": True},
    "--dataloader-fast-cache-load": {"is_flag": True},
    "--dataloader-defer-npy-index-mmap": {"is_flag": True},
    "--dataloader-inter-document-masking": {"is_flag": True},
}
"""Flags that do not affect a cache. They are accepted so that all data flags of a training script
can be passed on."""
_EXPLAINED = {
    "--eval-global-batch-size": (
        "validation has a batch size of its own: set --valid-samples N (--eval-iters x that batch x the number of "
        "validations)"
    ),
    "--start-eval-at-iter": (
        "the first validations are left out: set --valid-samples N (--eval-iters x batch x the number of validations)"
    ),
    "--skip-train": "only one validation takes place: set --valid-samples N to --eval-iters x batch",
    "--phase-transition-iterations": (
        "steps change during training: set --train-samples N to the samples of all phases"
    ),
    "--step-batch-size-schedule": (
        "batches change during training: set --train-samples N and --valid-samples N (--eval-iters x batch x the "
        "number of validations)"
    ),
    "--mock-data": "mock data needs no cache",
    "--fim-data": "GPTFIMDataset is not built by this command: Megatron builds its cache itself",
}
"""The advice for each flag of training scripts that changes the contents of a cache and that this
command does not have."""
_OTHER_DATASETS = re.compile(r"--(sft|[a-z-]*varlen)")
"""Matches the flags of datasets of classes other than GPTDataset."""
_SIMILARITY = 0.85
"""The minimum similarity (0 to 1) of a flag that is suggested instead of an unknown one."""


class _MegatronCommand(Command):
    """A command that explains the flags of training scripts that it does not have, rather than
    suggesting similar flags with another meaning.

    Its `multiple` options take all arguments up to the next flag, like argparse's nargs="*", which
    click lacks: --data-path 0.3 a 0.7 b.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See click.Command. Raises: click.UsageError."""
        for arg in args:
            name = arg.partition("=")[0]
            if name in _EXPLAINED:
                raise click.UsageError(f"{name}: {_EXPLAINED[name]}")
            if _OTHER_DATASETS.match(name):
                raise click.UsageError(
                    f"{name}: this command builds only the cache of GPTDataset; Megatron builds those of "
                    "other datasets when training starts"
                )
        repeatable = [
            param for param in self.params if isinstance(param, click.Option) and param.multiple
        ]
        names = {name for option in repeatable for name in option.opts}
        try:
            return super().parse_args(ctx, spread(args, names))
        except click.NoSuchOption as error:
            known = [name for option in self.params for name in option.opts]
            similar = difflib.get_close_matches(error.option_name, known, n=1, cutoff=_SIMILARITY)
            raise click.NoSuchOption(error.option_name, possibilities=similar, ctx=ctx) from None


def spread(args: Iterable[str], names: Collection[str]) -> list[str]:
    """Repeat each flag of `names` before each of the values that follow the flag. If a flag occurs
    twice, its last values count.

    Raises: click.UsageError for a flag without a value.
    """
    words: dict[str, list[str]] = {}
    others: list[str] = []
    flag = None
    for arg in args:
        if arg.startswith("--"):
            name, equals, word = arg.partition("=")
            flag = name if name in names and not equals else None
            if name in names:
                words[name] = [word] if equals else []
            else:
                others.append(arg)
        elif flag:
            words[flag].append(arg)
        else:
            others.append(arg)
    for name, values in words.items():
        if not values:
            raise click.UsageError(f"{name} has no value; give weights and prefixes, or omit it")
    repeated = list[str]()
    for name, values in words.items():
        for word in values:
            repeated += [name, word]
    return repeated + others


def _options(flags: dict[str, dict[str, Any]], **common: Any) -> Callable[[F], F]:
    """Return a decorator that adds an option to a command for each flag.

    Args:
        flags: the arguments of click.option for each flag.
        common: the arguments that all flags have in common.
    """

    def add(function: F) -> F:
        for name, settings in reversed(flags.items()):
            function = click.option(name, **settings, **common)(function)
        return function

    return add


def _words(name: str, text: str) -> Callable[[F], F]:
    """Return a decorator that adds an option which takes several words; see `spread`."""
    return click.option(name, multiple=True, metavar="WORDS...", help=text)


@click.command("megatron-cache", cls=_MegatronCommand)
@_words(
    "--data-path", "One blend for all splits: alternating weights and prefixes, or prefixes alone."
)
@click.option("--data-args-path", metavar="FILE", help="Read the --data-path entries from FILE.")
@_words("--train-data-path", "Blend of the train split only.")
@_words("--valid-data-path", "Blend of the valid split only.")
@_words("--test-data-path", "Blend of the test split only.")
@click.option(
    "--per-split-data-args-path",
    metavar="FILE",
    help="JSON file with the blends of train, valid and test.",
)
@click.option(
    "--split", metavar="A,B,C", help="Proportions of the sequences for train, valid and test."
)
@click.option("--seq-length", type=int, required=True, help="Tokens per sample.")
@click.option("--seed", type=int, default=1234, show_default=True, help="Seed of all shuffles.")
@click.option("--train-samples", type=int, help="Size of train, in samples.")
@click.option("--train-iters", type=int, help="Size of train, in steps of --global-batch-size.")
@click.option("--global-batch-size", type=int, help="Samples per step.")
@click.option("--rampup-batch-size", multiple=True, hidden=True)
@click.option("--eval-interval", type=int, help="Steps from one validation to the next.")
@click.option(
    "--eval-iters", type=int, default=100, show_default=True, help="Steps per validation."
)
@click.option("--valid-samples", type=int, help="Size of valid, in samples.")
@click.option("--test-samples", type=int, help="Size of test, in samples.")
@click.option("--full-validation", is_flag=True, help="Validate on one full epoch.")
@click.option(
    "--multiple-validation-sets",
    is_flag=True,
    help="Treat each prefix of --valid-data-path as a separate validation set.",
)
@click.option(
    "--mid-level-dataset-surplus",
    type=float,
    default=0.005,
    show_default=True,
    help="Fraction of samples built beyond a dataset's share of the blend.",
)
@click.option(
    "--storage",
    "storage_file",
    metavar="FILE",
    help="YAML or JSON file with settings of object stores under `storage`. [default: MEGABLEND_STORAGE]",
)
@click.option("--data-cache-path", metavar="DIR", required=True, help="Folder of the cache.")
@click.option(
    "--tokenizer-identifiers",
    metavar="JSON|FILE",
    help="Identifiers as in the description.txt of an earlier run.",
)
@_options(_TOKENIZER_FLAGS)
@click.option(
    "--max-memory",
    metavar="SIZE",
    help="Memory for the arrays of a node's ranks, such as 64G, plus 0.2G per rank. [default: most of the free memory]",
)
@click.option(
    "--shared-fs",
    type=click.Choice(["auto", "yes", "no"]),
    default="auto",
    show_default=True,
    help="Whether all ranks share the cache's folder, or each node has its own.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Build nothing; report what would be built, and its cost.",
)
@as_json
@_options(_IDLE_FLAGS, expose_value=False, hidden=True)
def megatron_cache(
    as_json: bool,
    dry_run: bool,
    max_memory: str | None,
    shared_fs: str,
    storage_file: str | None,
    **flags: Any,
) -> None:
    """Write Megatron's dataset cache before training starts.

    Flags have the same names and meanings as in Megatron. Under mpirun, srun or torchrun the ranks
    share the work.
    """
    from megablend.cli.progress import progress_on
    from megablend.config.storage_settings import load_storage_settings
    from megablend.distributed.find_job import program_job
    from megablend.distributed.same_settings import check_same_settings
    from megablend.megatron.api import prepare_on_ranks
    from megablend.megatron.request.flags import request_of_flags
    from megablend.storage.by_scheme import make_storage

    with program_job() as job:
        request = None
        try:
            memory = None if max_memory is None else parse_bytes(max_memory)
            objects = load_storage_settings(storage_file).alone()
            alike = {name: flags[name] for name in flags if name != "data_cache_path"}
            alike |= {"megablend": megablend.__version__}
            check_same_settings(job.world, alike | {"dry_run": dry_run, "shared_fs": shared_fs})
            if job.rank == 0:  # one rank builds the tokenizer, for all
                request = request_of_flags(
                    flags, {name: flags[name] for name in map(_attribute, _TOKENIZER_FLAGS)}
                )
            request = job.world.bcast(request)
        except BaseException as error:
            job.world.abort(error)
        assert request is not None
        # A node may have a folder of its own
        own_request = replace(request, path_to_cache=flags["data_cache_path"])
        with progress_on(
            sys.stderr, quiet=job.rank != 0, doing="building", done="built"
        ) as progress:
            report = prepare_on_ranks(
                own_request,
                job,
                storage=make_storage(objects=objects),
                shared_fs=shared_fs,
                dry_run=dry_run,
                max_memory=memory,
                progress=progress,
            )
    if job.rank == 0:
        finish(report.to_dict(), as_json, _print_report)


def parse_bytes(text: str) -> int:
    """Parse a number of bytes such as "64G", "512 MiB", "1000000". Raises: ConfigError."""
    try:
        return parse_size(text, minimum=0)
    except ValueError:
        raise ConfigError(
            f"--max-memory {text!r}: expected bytes, or a size such as 64G or 64GiB"
        ) from None


def _attribute(flag: str) -> str:
    """Return the name of the argument that a flag sets."""
    return flag.removeprefix("--").replace("-", "_")


def _print_report(report: dict[str, Any]) -> None:
    """Print a line for each split, and the total cost."""
    columns: dict[str, Column] = {
        "split": "split",
        "datasets": "datasets",
        "samples": "samples",
        "least epochs": lambda split: split["epochs"][0],
        "most epochs": lambda split: split["epochs"][1],
        "blended": lambda split: "yes" if split["blended"] else "no",
        "MB": lambda split: f"{split['bytes'] / 1e6:,.1f}",
        "missing": "missing",
        "missing MB": lambda split: f"{split['missing_bytes'] / 1e6:,.1f}",
    }
    print_table(f"cache {report['cache']}", columns, report["splits"])
    print_lines(report["notes"], "note: ")
    missing = sum(split["missing"] for split in report["splits"])
    if not missing:
        outcome = "nothing is missing"
    elif report["dry_run"]:
        outcome = (
            f"{missing:,} are missing; building them takes at most {report['memory_bytes'] / 1e6:,.0f} MB of memory per node "
            f"and about {report['expected_seconds']:,.0f} s, not counting writing (ranks: {report['ranks']})"
        )
    else:
        outcome = f"{missing:,} were missing and have been built: {report['seconds']:.1f} s (ranks: {report['ranks']})"
    print_line(outcome)
