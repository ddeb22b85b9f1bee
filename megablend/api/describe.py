"""describe: what a run will read, before it runs; what a cache contains."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path

from megablend.api.check import check_store
from megablend.api.description import (
    CacheDescription,
    DamagedIndex,
    Description,
    FilesDescription,
    FirstRepeat,
    IndexDescription,
    IndexedSource,
    RunDescription,
    SourceDescription,
    SplitDescription,
)
from megablend.api.manage_runs import list_runs
from megablend.api.runs import ConfigLike, newest_snapshot
from megablend.api.skip import describe_skips
from megablend.api.warn import find_warnings, warn_of_amplification
from megablend.api.what_if import Foreseen, foresee_run, list_files
from megablend.config import SPLITS, Config, load_config
from megablend.config.numbers import whole_number
from megablend.errors import CacheError, ConfigError, PlanError, ResourceError
from megablend.fs.atomic_write import list_committed
from megablend.index.document_table import table_bytes, tables
from megablend.index.list_snapshots import list_snapshots
from megablend.index.snapshot import Snapshot, open_snapshot
from megablend.plan.fitting_lanes import fitting_lanes, unfit_lanes
from megablend.plan.run import Run, as_promised, plan_run
from megablend.prefetch.estimate_transfer import estimate_transfer
from megablend.prefetch.read_amplification import read_amplification
from megablend.storage.base import Storage
from megablend.system.failures import translating

SIMULATED_SAMPLES = 1 << 16
"""Samples over which read amplification is estimated: some shuffle windows, in some tenths of a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaders:
    """The loaders whose steps and read amplification are estimated."""

    micro_batch_size: int
    data_parallel_size: int
    num_workers: int


@translating("describe")
def describe(
    what: ConfigLike,
    *,
    cache: str | None = None,
    micro_batch_size: int | None = None,
    data_parallel_size: int = 1,
    num_workers: int = 0,
    storage: Storage | None = None,
) -> Description:
    """Describe what a run reads (for a config), or what a cache contains (for its folder).

    Nothing needs to be built: a run that is not committed is described as `build` would commit it, with `committed` False and a
    `note`; where no index has its sources, `files` lists what is there.

    Args:
        cache: cache folder, in place of the config's `cache`.
        micro_batch_size, data_parallel_size, num_workers: of the loaders whose steps and read amplification to estimate.
        storage: where files are found and read, in place of the one that the config asks for.

    Returns: a RunDescription; a FilesDescription where no index has the config's sources; a CacheDescription for a folder.
    Raises: as `build` where the config cannot be planned; CacheError for a folder without an index; ConfigError where a
        number is out of range, or `memory` too small for the loaders.
    """
    loaders = _check_loaders(micro_batch_size, data_parallel_size, num_workers)
    if isinstance(what, str | Path) and Path(what).is_dir():
        if cache is not None:
            raise ConfigError(f"found the folder of a cache, {what}, and cache={str(cache)!r}, expected one of them")
        return describe_cache(str(what))
    config = load_config(what, cache=cache)
    planned = foresee_run(config, storage=storage)
    if isinstance(planned, str):
        return FilesDescription(
            cache=config.cache,
            run=config.run,
            order=config.order,
            sequence_length=config.sequence_length,
            committed=False,
            note=planned,
            files=list_files(config, storage=storage),
        )
    return _describe_planned(config, planned, loaders)


def _check_loaders(micro_batch_size: int | None, data_parallel_size: int, num_workers: int) -> _Loaders | None:
    """The loaders to estimate; None without a micro batch. Raises: ConfigError for a number out of range."""
    whole_number("data_parallel_size", data_parallel_size, least=1)
    whole_number("num_workers", num_workers, least=0)
    if micro_batch_size is None:
        return None
    whole_number("micro_batch_size", micro_batch_size, least=1)
    return _Loaders(micro_batch_size=micro_batch_size, data_parallel_size=data_parallel_size, num_workers=num_workers)


def _describe_planned(config: Config, planned: Foreseen, loaders: _Loaders | None) -> RunDescription:
    run = planned.run
    splits, warnings = _describe_splits(config, run, loaders)
    described = RunDescription(
        cache=config.cache,
        run=config.run,
        order=config.order,
        sequence_length=config.sequence_length,
        committed=planned.committed,
        note=planned.note,
        plan=run.ledger.digest,
        stages=tuple(run.ledger.ends),
        skips=tuple(describe_skips(run)),
        lanes=config.lanes,
        index=_describe_index(run.store.generation, config.cache),
        splits=splits,
        problems=check_store(config, run.store).problems,
        warnings=tuple(warnings),
        transfer=estimate_transfer(run, [source.epochs for source in splits["train"].sources]),
    )
    return described if loaders is None else _with_estimates(described, config, run, loaders)


def _describe_splits(
    config: Config, run: Run, loaders: _Loaders | None
) -> tuple[dict[str, SplitDescription], list[str]]:
    """The splits of a run of train that have sources, and the warnings about them."""
    splits, warnings = {"train": describe_split(run, _count_steps(run, loaders))}, find_warnings(run)
    for number, split in enumerate(SPLITS[1:], 1):
        is_used = split in config.sources if config.listed_by_split else config.shares[number] > 0
        if not is_used:
            continue
        try:
            other = as_promised(plan_run(config, split, run.store), run.ledger)
        except PlanError as error:
            splits[split] = SplitDescription(
                samples=0,
                tokens=0,
                blended=False,
                first_repeated_source=None,
                sources=(),
                problem=str(error),
                steps=None if loaders is None else 0,
            )
            continue
        splits[split] = describe_split(other, _count_steps(other, loaders))
        warnings += find_warnings(other)
    return splits, warnings


def _count_steps(run: Run, loaders: _Loaders | None) -> int | None:
    return None if loaders is None else run.num_samples // (loaders.micro_batch_size * loaders.data_parallel_size)


def _with_estimates(described: RunDescription, config: Config, run: Run, loaders: _Loaders) -> RunDescription:
    """The description with what its loaders read, and the warnings about that."""
    sizes = asdict(loaders)
    amplification = read_amplification(run, **sizes, first=0, stop=min(run.num_samples, SIMULATED_SAMPLES))
    warnings = [*described.warnings, *warn_of_amplification(config, amplification)]
    if problem := unfit_lanes(config.lanes, **sizes):
        warnings.append(problem)
    return dataclasses.replace(
        described,
        warnings=tuple(warnings),
        read_amplification=amplification,
        fitting_lanes=fitting_lanes(config.lanes, **sizes),
    )


def describe_cache(cache: str) -> CacheDescription:
    """Indexes and runs of a cache. Those that cannot be read have only a `problem`."""
    digests = list_snapshots(cache)
    if not digests:
        newest_snapshot(cache)  # raises: says what is missing
    return CacheDescription(
        cache=str(Path(cache).absolute()),
        indices=tuple(_describe_readable(cache, digest) for digest in digests),
        runs=tuple(list_runs(cache)),
    )


def _describe_readable(cache: str, digest: str) -> IndexDescription | DamagedIndex:
    """An index of a cache, or what is wrong with it."""
    try:
        with translating(cache):
            return _describe_index(open_snapshot(cache, digest), cache)
    except (CacheError, ResourceError) as error:
        return DamagedIndex(digest=digest, problem=str(error))


def describe_split(run: Run, steps: int | None = None) -> SplitDescription:
    """The sources of one split: what they hold, what is requested of them, what the run reads."""
    counts, read = run.plan.counts(run.num_samples).tolist(), run.plan.count_tokens(run.num_samples).tolist()
    return SplitDescription(
        samples=run.num_samples,
        tokens=sum(read),
        blended=run.is_blended,
        first_repeated_source=_find_first_repeat(run),
        sources=tuple(_describe_source(run, number, samples, read[number]) for number, samples in enumerate(counts)),
        steps=steps,
    )


def _find_first_repeat(run: Run) -> FirstRepeat | None:
    if not run.is_blended:
        return None
    extra = int(run.config.add_extra_token_to_sequence)
    repeats = []
    for number, (source, tokens) in enumerate(zip(run.sources, run.parts["tokens"].tolist(), strict=True)):
        # The next sample reads a token again, perhaps before some of these.
        one_pass = run.plan.count_within(number, tokens, extra)
        if (again := run.plan.first_sample_from(number, one_pass)) is not None:
            repeats.append((again, source.name))
    first = min(repeats, default=None)
    return None if first is None else FirstRepeat(source=first[1], sample=first[0])


def _describe_source(run: Run, number: int, samples: int, read: int) -> SourceDescription:
    source, part = run.sources[number], run.parts[number]
    tokens = int(part["tokens"])
    used = read + int(run.config.add_extra_token_to_sequence) if samples else 0
    requested = run.weights[number] if run.weights else Fraction(samples, run.num_samples)
    return SourceDescription(
        name=source.name,
        blocks=int(part["stop_block"] - part["first_block"]),
        documents=int(part["documents"]),
        tokens=tokens,
        requested_share=float(requested),
        actual_share=samples / run.num_samples,
        samples=samples,
        epochs=used / tokens if tokens else 0.0,
        max_epochs=None if source.max_epochs is None else float(source.max_epochs),
        tokens_left_in_epoch=-used % tokens if tokens else 0,
    )


def _describe_index(snapshot: Snapshot, cache: str) -> IndexDescription:
    folder = Path(cache) / "generations" / snapshot.digest
    has_tables = bool(list_committed(tables(cache)))  # looking for each costs much where sources are many
    sources = tuple(
        IndexedSource(
            name=entry.name,
            format=entry.format,
            column=entry.column,
            column_taken=entry.column_taken,
            skipped=tuple(entry.skipped),
            files=len(entry.files),
            blocks=len(entry.blocks),
            rows=entry.rows,
            tokens=entry.tokens,
            document_table_bytes=table_bytes(snapshot, number) if has_tables else None,
            extra_columns=tuple(each.column for each in entry.extra_columns),
        )
        for number, entry in enumerate(snapshot.sources)
    )
    return IndexDescription(
        digest=snapshot.digest,
        index_bytes=sum(path.stat().st_size for path in folder.iterdir() if path.is_file()),
        files=sum(source.files for source in sources),
        blocks=sum(source.blocks for source in sources),
        rows=sum(source.rows for source in sources),
        tokens=sum(source.tokens for source in sources),
        sources=sources,
    )
