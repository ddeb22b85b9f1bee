"""Plan a run on the existing index as `build` would, without committing anything."""

from __future__ import annotations

from dataclasses import dataclass

from megablend.errors import PlanError
from megablend.index.blocks.block_store import BlockStore
from megablend.index.read.snapshot import Snapshot, open_snapshot
from megablend.operations.runs import compile_committed
from megablend.operations.session import Session
from megablend.operations.unindexed import INDEX_REMEDY, find_unindexed
from megablend.prefetch.memory_budget import check_sample
from megablend.run.check_totals import check_limits
from megablend.run.compile import Compiled, compile_split
from megablend.run.ledger import Ledger
from megablend.run.open_store import open_block_store, open_stores


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """The train split of a run, as `build` would commit it or has already committed it."""

    compiled: Compiled
    committed: bool
    """Whether the run's ledger has committed exactly this run."""
    note: str | None
    """The difference between the run and what is committed, and what to do; None if they agree."""


def foresee_run(session: Session) -> Foreseen | str:
    """Plan the train split that the config requests. If the run has a ledger, the plan continues
    it. Nothing is committed.

    Returns: the run; or, if no index has what the config requests, the reason and the remedy as
        text.
    Raises: PlanError, ConfigError if the config cannot be planned; DataError if its files cannot be
        found; CacheError if the cache is damaged.
    """
    config = session.config
    check_sample(config)
    ledger = session.ledger
    if not session.snapshots:
        return (
            f"{config.cache} holds no index, so the numbers of tokens are not known: {INDEX_REMEDY}"
        )
    refusal: PlanError | None = None
    # What a run has committed is not compared with the files: it reads them as they were indexed
    reads_committed_only = ledger is not None and config.num_snapshots <= len(ledger.indices)
    if ledger is not None and reads_committed_only:
        try:
            return _plan_by_ledger(session, ledger)
        except PlanError as error:
            refusal = error
    newest = open_snapshot(config.cache_store, session.snapshots[-1])
    problem = _compare_files(session, newest)
    if problem is not None:
        return f"{problem}, so the numbers of tokens are not known: {INDEX_REMEDY}"
    if ledger is not None and not reads_committed_only:
        try:
            return _plan_by_ledger(session, ledger)
        except PlanError as error:
            refusal = error
    return _plan_anew(session, newest, refusal)


def _compare_files(session: Session, newest: Snapshot) -> str | None:
    """Return what differs between the newest index and the files; None if they agree."""
    is_kept = session.ledger is not None and newest.digest in session.ledger.indices
    problem = find_unindexed(session.config, newest, session.run_storage, is_kept=is_kept)
    return None if problem is None else problem.text


def _plan_by_ledger(session: Session, ledger: Ledger) -> Foreseen:
    """Plan the committed run, or its extension if the config requests more samples. Raises:
    PlanError if the ledger refuses the config."""
    config = session.config
    newest = session.snapshots[-1]
    compiled = compile_committed(config, "train", ledger, session.run_storage, newest)
    committed = ledger.until(compiled.num_samples)
    compiled = compiled.continue_ledger(committed)
    check_limits(compiled)
    if compiled.ledger == committed:
        return Foreseen(compiled=compiled, committed=True, note=None)
    note = (
        f"run {config.run!r} was built for {ledger.num_samples:,} samples; the figures are for "
        f"{compiled.num_samples:,}, to which `megablend build CONFIG` would extend the run"
    )
    return Foreseen(compiled=compiled, committed=False, note=note)


def _plan_anew(session: Session, newest: Snapshot, refusal: PlanError | None) -> Foreseen:
    """Plan what the config requests, regardless of what the run has committed.

    Args:
        refusal: the error with which the run's ledger refuses the config; None without a ledger.

    Raises: PlanError, which is `refusal` if there is one.
    """
    config = session.config
    note = f"run {config.run!r} is not committed; `megablend build CONFIG` commits it"
    if refusal is not None:
        note = f"the config does not fit run {config.run!r} as it was built, so `megablend build CONFIG` refuses it: {refusal}"
    try:
        compiled = compile_split(config, "train", _open_requested(session, newest))
        check_limits(compiled)
    except PlanError:
        if refusal is None:
            raise
        # Without the ledger a stage does not begin where an amendment cut the one before it
        raise refusal from None
    return Foreseen(compiled=compiled, committed=False, note=note)


def _open_requested(session: Session, newest: Snapshot) -> BlockStore:
    """Open the blocks that a config's stages read: the blocks of the newest index, or, if a stage
    has new data, those of the run's indexes, followed by the newest index.

    Raises: see `open_stores`.
    """
    config = session.config
    ledger = session.ledger
    num_snapshots = config.num_snapshots
    if ledger is None or num_snapshots == 1:
        return open_block_store(config, newest, session.run_storage)
    digests = dict.fromkeys([*ledger.indices, newest.digest])
    return open_stores(config, list(digests)[:num_snapshots], session.run_storage)
