"""Commit a run: plan it on the index that was just built, and start its ledger or extend it."""

from __future__ import annotations

import contextlib
import dataclasses

from megablend.caches.base import OvertakenError
from megablend.config import Config
from megablend.errors import PlanError
from megablend.index.blocks.block_store import BlockStore
from megablend.index.blocks.build_document_tables import TablesReport
from megablend.index.blocks.growing_splits import find_split_ranges
from megablend.index.build.build import BuildReport
from megablend.index.read.document_table import table_key
from megablend.operations.build_results import BuildResult
from megablend.operations.check import check_store
from megablend.operations.runs import list_indices
from megablend.operations.session import Session
from megablend.operations.token_documents import warn_of_documents
from megablend.operations.warn import find_warnings, warn_of_run
from megablend.run.check_totals import check_limits
from megablend.run.commit import compile_others, keep_companion, precompute_orders
from megablend.run.compile import compile_split
from megablend.run.ledger_file import load_ledger, save_ledger
from megablend.run.open_store import open_stores
from megablend.run.skips import forget_moved

_MAX_RETRIES = 5
"""Maximum number of times that a commit is tried again because another build committed first."""


def commit_run(
    session: Session, report: BuildReport, documents: TablesReport | None
) -> BuildResult:
    """Commit the run. In a cache that cannot be locked, the commit is repeated if another build
    committed first."""
    for _ in range(_MAX_RETRIES):
        with contextlib.suppress(OvertakenError):
            return _commit_once(session, report, documents)
    return _commit_once(session, report, documents)


def _commit_once(
    session: Session, report: BuildReport, documents: TablesReport | None
) -> BuildResult:
    """Commit the run: start its ledger, or append a stage to it if more samples are requested."""
    config = session.config
    ledger = load_ledger(session.cache, session.run)  # as it is now, while the cache is held
    digests: tuple[str, ...] = (report.digest,)
    if ledger is not None:
        digests = list_indices(config, ledger, report.digest)
    store = open_stores(config, digests, session.run_storage)
    find_split_ranges(store.stores, config.shares, keep=True)
    compiled = compile_split(config, "train", store, committed=ledger)
    if ledger is not None:
        compiled = compiled.continue_ledger(ledger)
    check_limits(compiled)
    precompute_orders(compiled)
    others = list(compile_others(compiled))
    keep_companion(compiled, others)
    publish_splits(config, store)
    committed = dataclasses.replace(compiled.ledger, request=config.request_digest)
    if ledger is None or (committed, committed.request) != (ledger, ledger.request):
        if ledger is None:
            forget_moved(session.cache, session.run)
        save_ledger(config.cache_store, committed, replaces=ledger)
    stages_before = len(ledger.stages) if ledger else 0
    problems: tuple[str, ...] = ()
    if store.snapshot.digest != report.digest:  # the files of the index just built need no check
        problems = check_store(config, store, withdrawn=config.withdrawn).problems
    return BuildResult(
        index=report,
        documents=documents,
        ledger=committed,
        stages_before=stages_before,
        problems=problems,
        warnings=(
            *warn_of_documents(config, store.snapshot),
            *find_warnings(compiled),
            *warn_of_run(compiled),
            # A run can be trained without these splits, but the user should know before evaluating
            *(
                f"{split}: cannot be opened: {other}"
                for split, other in others
                if isinstance(other, PlanError)
            ),
        ),
    )


def publish_splits(config: Config, store: BlockStore) -> None:
    """Make the stored split ranges of a run available to other nodes: those of its snapshots, and
    those of the document tables by which sources are split."""
    owners = set[str]()
    for of_snapshot in store.stores:
        snapshot = of_snapshot.snapshot
        numbers = snapshot.sources.numbers
        owners.add(snapshot.digest)
        for name in config.sources_needing_lengths:
            if name in numbers:
                owners.add(table_key(snapshot, numbers[name]))
    config.cache_store.publish_files("splits", owners)
