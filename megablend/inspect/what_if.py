"""Plan a run on the existing index as `build` would, without committing anything; and list the
files of sources that are not indexed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from time import perf_counter

from megablend.config import Config, Source
from megablend.errors import PlanError
from megablend.index.blocks.block_store import BlockStore
from megablend.index.build.sources import list_sources
from megablend.index.read.snapshot import Snapshot, open_snapshot
from megablend.inspect.description import SourceFiles
from megablend.operations.runs import compile_committed
from megablend.operations.session import Session
from megablend.operations.source_specs import list_specs
from megablend.operations.unindexed import INDEX_REMEDY, find_unindexed
from megablend.prefetch.memory_budget import check_sample
from megablend.run.check_totals import check_limits
from megablend.run.compile import Compiled, compile_split
from megablend.run.ledger import Ledger
from megablend.run.open_store import open_block_store, open_stores
from megablend.storage.base import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """A run of train as `build` would commit it, or as it is committed already."""

    compiled: Compiled
    committed: bool
    """Whether the run's ledger has committed exactly this."""
    note: str | None
    """The difference between the run and what is committed, and what to do; None if they agree."""
    comparison_seconds: float = 0.0
    """Time that comparing the index with the files took; opening the run does not compare them."""


def foresee_run(session: Session, *, compares_files: bool = True) -> Foreseen | str:
    """Plan train as the config requests it, by the run's ledger if it has one. Nothing is
    committed.

    Args:
        compares_files: check that the newest index, if the run is planned on it, has the files as
            they are now.

    Returns: the run; or, if no index has what the config requests, the reason as text, and what to
        do.
    Raises: PlanError, ConfigError if the config cannot be planned; DataError if its files
        cannot be found; CacheError if the cache is damaged.
    """
    config = session.config
    check_sample(config)
    storage = session.run_storage
    ledger = session.ledger
    snapshots = session.snapshots
    if not snapshots:
        return (
            f"{config.cache} holds no index, so the numbers of tokens are not known: {INDEX_REMEDY}"
        )
    # The run by its ledger, or the error with which the ledger refuses the config
    by_ledger: Foreseen | PlanError | None = None
    reads_committed_only = ledger is not None and config.num_snapshots <= len(ledger.indices)
    if ledger is not None and reads_committed_only:
        by_ledger = _plan_by_ledger(config, ledger, storage, snapshots[-1])
        if isinstance(by_ledger, Foreseen):
            return by_ledger
    newest = open_snapshot(config.cache_store, snapshots[-1])
    started = perf_counter()
    if compares_files:
        is_kept = ledger is not None and newest.digest in ledger.indices
        problem = find_unindexed(config, newest, storage, is_kept=is_kept)
        if problem is not None:
            return f"{problem.text}, so the numbers of tokens are not known: {INDEX_REMEDY}"
    seconds = perf_counter() - started
    if ledger is not None and not reads_committed_only:  # a stage reads the newest index
        by_ledger = _plan_by_ledger(config, ledger, storage, newest.digest)
    if isinstance(by_ledger, Foreseen):
        return dataclasses.replace(by_ledger, comparison_seconds=seconds)
    note = f"run {config.run!r} is not committed; `megablend build CONFIG` commits it"
    if by_ledger is not None:
        note = f"this is not what run {config.run!r} is committed to, and `megablend build CONFIG` refuses it: {by_ledger}"
    try:
        compiled = compile_split(config, "train", _open_requested(config, ledger, newest, storage))
        check_limits(compiled)
    except PlanError:
        if by_ledger is None:
            raise
        # Without the ledger a stage does not begin where an amendment cut the one before it
        raise by_ledger from None
    return Foreseen(compiled=compiled, committed=False, note=note, comparison_seconds=seconds)


def _plan_by_ledger(
    config: Config, ledger: Ledger, storage: Storage, newest: str
) -> Foreseen | PlanError:
    """Plan the committed run, or its extension if the config requests more samples. Returns the
    error if the ledger refuses the config."""
    try:
        compiled = compile_committed(config, "train", ledger, storage, newest)
        committed = ledger.until(compiled.num_samples)
        compiled = compiled.continue_ledger(committed)
        check_limits(compiled)
    except PlanError as error:
        return error
    if compiled.ledger == committed:
        return Foreseen(compiled=compiled, committed=True, note=None)
    note = (
        f"run {config.run!r} is committed to {ledger.num_samples:,} samples; the figures are for "
        f"{compiled.num_samples:,}, to which `megablend build CONFIG` would lengthen it"
    )
    return Foreseen(compiled=compiled, committed=False, note=note)


def _open_requested(
    config: Config, ledger: Ledger | None, newest: Snapshot, storage: Storage
) -> BlockStore:
    """Open the blocks that a config's stages read: the blocks of the newest index, or, if a stage
    has new data, those of the run's indexes, followed by the newest index.

    Raises: see `open_stores`.
    """
    num_snapshots = config.num_snapshots
    if ledger is None or num_snapshots == 1:
        return open_block_store(config, newest, storage)
    digests = dict.fromkeys([*ledger.indices, newest.digest])
    return open_stores(config, list(digests)[:num_snapshots], storage)


def list_files(session: Session) -> tuple[SourceFiles, ...]:
    """List the files of each source, which are known without an index.

    Raises: ConfigError if a path matches no file; MissingFileError.
    """
    configured = session.config.all_sources
    listed = []
    for listing in list_sources(list_specs(session.config, session.storage), session.storage):
        source = configured[listing.name]
        listed.append(
            SourceFiles(
                name=source.name,
                format=listing.read.format,
                files=len(listing.files),
                bytes=sum(file.size for file in listing.files),
                share=_share(source),
            )
        )
    return tuple(listed)


def _share(source: Source) -> dict[str, float | str] | None:
    """See `SourceFiles.share`."""
    if source.unit is None:
        return None
    number = getattr(source, source.unit)
    return {source.unit: number if isinstance(number, str) else float(number)}
