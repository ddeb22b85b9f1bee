"""Describe a run: its index, its splits, the needs of its loaders, and warnings."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import asdict

from megablend.caches.base import DOCUMENTS
from megablend.config import Config
from megablend.errors import ConfigError
from megablend.index.read.document_table import table_bytes
from megablend.index.read.joined_snapshot import JoinedSnapshot
from megablend.index.read.snapshot import Snapshot
from megablend.inspect.describe_split import describe_split
from megablend.inspect.description import (
    BadDocuments,
    IndexDescription,
    IndexedSource,
    RunDescription,
    SplitDescription,
)
from megablend.inspect.what_if import Foreseen
from megablend.operations.check import check_store
from megablend.operations.skip import describe_skips
from megablend.operations.source_specs import has_text
from megablend.operations.token_documents import warn_of_documents
from megablend.operations.warn import (
    find_warnings,
    warn_of_amplification,
    warn_of_run,
    warn_of_steps,
)
from megablend.prefetch.estimate_transfer import estimate_transfer
from megablend.prefetch.memory_need import Loaders, find_memory_need
from megablend.prefetch.read_amplification import read_amplification
from megablend.run.commit import compile_others
from megablend.run.compile import Compiled
from megablend.run.fitting_steps import fitting_lanes, fitting_unit, unfit_lanes, unfit_step
from megablend.run.run import Run
from megablend.run.skips import skips_of
from megablend.storage.base import Storage
from megablend.storage.transfer import Transfer

SIMULATED_SAMPLES = 1 << 16
"""The number of samples for which read amplification is estimated. This is several shuffle windows,
and the estimate takes a few tenths of a second."""


def describe_planned(
    config: Config,
    planned: Foreseen,
    loaders: Loaders | None,
    *,
    num_nodes: int | None,
    mirror_size: int | None,
) -> RunDescription:
    """Describe a run as it is committed, or as `build` would commit it.

    Args:
        num_nodes: number of nodes with mirrors whose transfers are estimated; None for no estimate.
        mirror_size: size of each mirror in bytes. If it is None, the size in the config applies;
            without that, there is no limit.

    Raises: see `describe`.
    """
    compiled = planned.compiled
    run = compiled.run
    splits = _describe_splits(compiled, loaders)
    warnings = [warning for _, of_split in splits.values() for warning in of_split]
    warnings += warn_of_documents(config, run.store.snapshot)
    warnings += warn_of_run(compiled)
    described = RunDescription(
        cache=config.cache,
        run=config.run,
        order=config.order,
        sequence_length=config.sequence_length,
        committed=planned.committed,
        note=planned.note,
        plan=run.ledger.digest,
        stages=tuple(run.ledger.ends),
        skips=describe_skips(run),
        lanes=config.lanes,
        index=describe_index(run.store.snapshot),
        splits={split: described for split, (described, _) in splits.items()},
        problems=check_store(config, run.store, withdrawn=config.withdrawn).problems,
        warnings=tuple(warnings),
        transfer=_estimate_transfer(run, loaders),
        bad_documents=_list_bad(config, run.store.storage),
    )
    if loaders is None:
        return described
    described = _with_estimates(described, config, run, loaders)
    if num_nodes is None:
        return described
    # Imported only if there are mirrors
    from megablend.prefetch.estimate_mirror import estimate_mirror

    estimate = estimate_mirror(run, loaders, num_nodes=num_nodes, size=mirror_size)
    return dataclasses.replace(described, mirror=estimate)


def _list_bad(config: Config, storage: Storage) -> tuple[BadDocuments, ...] | None:
    """Return the documents of text that the last build left out; None if there are none."""
    if not has_text(config):
        return None
    from megablend.text.source import list_bad  # imported only if it is needed

    documents = tuple(
        BadDocuments(source=name, **asdict(bad))
        for name, source in config.all_sources.items()
        if source.text is not None
        for bad in list_bad(config, name, storage)
    )
    return documents or None


def _describe_splits(
    train: Compiled, loaders: Loaders | None
) -> dict[str, tuple[SplitDescription, list[str]]]:
    """Describe the splits of a run that have sources.

    Returns: the description of each split and the warnings about it, by the name of the split.
    """

    def describe(split: Compiled) -> tuple[SplitDescription, list[str]]:
        steps = None
        warnings = find_warnings(split)
        if loaders is not None:
            steps = split.run.num_samples // loaders.step_samples
            warnings = warnings + warn_of_steps(split.run, loaders.step_samples)
        return describe_split(split, steps), warnings

    splits = {"train": describe(train)}
    for split, other in compile_others(train):
        if isinstance(other, Compiled):
            splits[split] = describe(other)
        else:
            unplanned = SplitDescription(
                samples=0,
                tokens=0,
                blended=False,
                first_repeated_source=None,
                sources=(),
                problem=str(other),
                steps=None if loaders is None else 0,
            )
            splits[split] = unplanned, []
    return splits


def _with_estimates(
    described: RunDescription, config: Config, run: Run, loaders: Loaders
) -> RunDescription:
    """Add estimates to a description: what the loaders read, the memory they need, and warnings
    about both."""
    sizes = asdict(loaders)
    skips = skips_of(run)
    amplification = read_amplification(run, **sizes, stop=min(run.num_samples, SIMULATED_SAMPLES))
    warnings = [*described.warnings, *warn_of_amplification(config, amplification)]
    problem_of_lanes = unfit_lanes(config.lanes, **sizes)
    if problem_of_lanes is not None:
        warnings.append(problem_of_lanes)
    problem_of_steps = unfit_step(run, skips, 0, loaders.step_samples)
    if problem_of_steps is not None:
        warnings.append(
            f"micro batch {loaders.micro_batch_size} x {loaders.data_parallel_size} ranks: {problem_of_steps}"
        )
    # The last samples, which do not fill a step
    rest = skips.count_trained(run.num_samples) % loaders.step_samples
    if rest:
        warnings.append(
            f"train: the last {rest:,} samples do not fill a step of {loaders.step_samples:,}; loaders drop them, except "
            "with drop_last=False"
        )
    return dataclasses.replace(
        described,
        warnings=tuple(warnings),
        read_amplification=amplification,
        fitting_lanes=fitting_lanes(config.lanes, **sizes),
        memory_per_rank=find_memory_need(run, skips, loaders),
        memory_limit_per_rank=loaders.num_processes * run.runtime.memory,
        fitting_unit=fitting_unit(run),
    )


def _estimate_transfer(run: Run, loaders: Loaders | None) -> Transfer | None:
    """Estimate what loaders read from object stores.

    If no loaders are given, estimate one loader, or, if its memory is too small, one for each lane.

    Returns: the estimate; None if the memory is too small, or all files are local.
    """
    if loaders is None:
        alone = Loaders(micro_batch_size=1, data_parallel_size=1, num_workers=0)
        lanes = run.ledger.stages[0].blend.lanes
        candidates = [alone, dataclasses.replace(alone, data_parallel_size=lanes)]
    else:
        candidates = [loaders]
    for candidate in candidates:
        with contextlib.suppress(ConfigError):
            return estimate_transfer(run, candidate)
    return None


def describe_index(snapshot: Snapshot) -> IndexDescription:
    """Describe an index of a cache, or several joined indexes, with their sources."""
    # Looking for each table takes a long time if there are many sources
    has_tables = bool(snapshot.store.list_files(DOCUMENTS))
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
    # Files that several of the joined indexes have, unchanged, count once
    numbers = snapshot.list_repeated() if isinstance(snapshot, JoinedSnapshot) else []
    repeated = [snapshot.files.entry(number) for number in numbers]
    return IndexDescription(
        digest=snapshot.digest,
        index_bytes=sum(
            path.stat().st_size for path in snapshot.folder.iterdir() if path.is_file()
        ),
        files=sum(source.files for source in sources) - len(repeated),
        blocks=sum(source.blocks for source in sources) - sum(file.num_blocks for file in repeated),
        rows=sum(source.rows for source in sources) - sum(file.rows for file in repeated),
        tokens=sum(source.tokens for source in sources) - sum(file.tokens for file in repeated),
        sources=sources,
    )
