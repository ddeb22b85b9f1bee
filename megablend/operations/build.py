"""build: index the files that are not indexed yet, then commit the run, or extend a committed run.
build_index: only index the files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from megablend.caches.find import is_remote
from megablend.config import Config
from megablend.distributed.base import Communicator
from megablend.distributed.launch import detect
from megablend.distributed.same_settings import check_same_settings
from megablend.index.blocks.build_document_tables import TablesReport, build_tables
from megablend.index.build.build import BuildReport, Progress
from megablend.index.build.build import build_index as index_files
from megablend.index.build.build_report import report_waiting
from megablend.index.read.snapshot import open_snapshot
from megablend.operations.build_results import BuildResult, BuiltIndex
from megablend.operations.check_tokens import refuse_known_outliers
from megablend.operations.checksums import make_checksums
from megablend.operations.commit_run import commit_run
from megablend.operations.repair import repair_kept_index
from megablend.operations.session import ConfigLike, Session
from megablend.operations.source_specs import has_text, list_specs
from megablend.operations.token_documents import refuse_token_documents
from megablend.prefetch.memory_budget import check_sample
from megablend.run.ledger import Ledger
from megablend.run.open_store import open_block_store
from megablend.storage.base import Storage
from megablend.system.failures import translating
from megablend.system.log import LOG

_NODE_KEYS = frozenset(
    {
        "local_cache",
        "storage",
        "memory",
        "direct_io",
        "file_checks_per_second",
        "on_bad_sample",
        "warnings",
    }
)
"""Keys of the config whose values may differ between nodes, since they do not change the index or
the run."""


def build_index(
    config: ConfigLike,
    *,
    cache: str | None = None,
    progress: Callable[[Progress], None] | None = None,
    launch: Communicator | None = None,
    storage: Storage | None = None,
    processes: int | None = None,
) -> BuiltIndex:
    """Index the config's files without committing a run. `describe` can then report what a run of
    this config would read.

    The arguments and errors are the same as those of `build`, and all ranks must call this
    function.

    Returns: the same result on all ranks.
    """
    launch = launch or detect()
    try:
        session = Session(config, cache=cache, storage=storage)
        report = _index(session, launch, progress, processes)
        documents = _build_document_tables(session, _find_ledger(session, launch), report, launch)
    except BaseException as error:
        launch.abort(error)
    return BuiltIndex(index=report, documents=documents, ranks=launch.size)


def build(
    config: ConfigLike,
    *,
    cache: str | None = None,
    progress: Callable[[Progress], None] | None = None,
    launch: Communicator | None = None,
    storage: Storage | None = None,
    checksums: bool = False,
    processes: int | None = None,
) -> BuildResult:
    """Index the config's files and write the run's ledger. This is done by one process, or by all
    ranks of an MPI job, which share the work.

    Args:
        config: path of a YAML or JSON file, or the same as a dict.
        cache: cache folder, instead of the config's `cache`.
        progress: called on rank 0 as files are indexed.
        launch: the processes that build; by default detected from the environment.
        storage: the storage that finds and reads files, instead of the config's; the same on all
            ranks.
        checksums: also make checksums of all blocks of the index, which reads all data once. Reads
            from anything but a local disk are then checked against them.
        processes: number of processes that each rank uses to tokenise text; by default the number
            of its cores.

    Returns: the same result on all ranks.
    Raises: ConfigError, also if the ranks' configs differ; PlanError, DataError, CacheError,
        LaunchError. Under MPI an error on one rank terminates all ranks, with that rank's message
        and the error's exit code.
    """
    launch = launch or detect()
    built = None
    try:
        session = Session(config, cache=cache, storage=storage)
        report = _index(session, launch, progress, processes)
        with translating(session.config.cache):
            ledger = _find_ledger(session, launch)
            if ledger is not None and _repair(session, ledger, report, launch, progress):
                # Repairs also make indexes: make the one of this config the newest again
                report = _index(session, launch, progress, processes)
            documents = _build_document_tables(session, ledger, report, launch)
            check_same_settings(launch, {"--checksums": checksums})  # all ranks make them, or none
            if checksums:
                digest = ledger.index if ledger else report.digest
                make_checksums(
                    session.config,
                    digest,
                    launch=launch,
                    storage=session.run_storage,
                    progress=progress,
                )
            if launch.rank == 0:
                with session.cache.hold(on_wait=report_waiting(progress)):
                    built = commit_run(session, report, documents)
        built = launch.bcast(built)
    except BaseException as error:
        launch.abort(error)
    assert built is not None
    return dataclasses.replace(built, ranks=launch.size)


def _index(
    session: Session,
    launch: Communicator,
    progress: Callable[[Progress], None] | None,
    processes: int | None,
) -> BuildReport:
    """Check the config, tokenise its text, and index its files. Called by all ranks."""
    with translating("build"):
        checked_config = session.config
        check_sample(checked_config)
        _check_same_config(launch, checked_config)
        specs = list_specs(checked_config)
        if has_text(checked_config):
            # Imported only if it is needed
            from megablend.text.tokenise import check_kept, tokenise

            known = _list_token_files(session) if launch.rank == 0 else None
            specs = tokenise(
                checked_config,
                specs,
                launch=launch,
                storage=session.storage,
                known=known,
                processes=processes,
                progress=progress,
            )
    report = index_files(
        session.cache,
        specs,
        launch=launch,
        storage=session.storage,
        progress=progress,
    )
    with translating(checked_config.cache):
        if launch.rank == 0:
            indexed = open_snapshot(session.cache, report.digest)
            # What an earlier index names, no command removes
            if has_text(checked_config) and report.created:
                check_kept(checked_config, specs)
            refuse_token_documents(checked_config, indexed, session.ledger)
            refuse_known_outliers(checked_config, indexed, session.storage)
    if launch.rank == 0:
        _log_report(checked_config.cache, report)
    launch.barrier()  # no rank continues with what rank 0 refuses
    return report


def _check_same_config(launch: Communicator, config: Config) -> None:
    """Check that the configs of all ranks request the same index and run. Collective.

    Raises: ConfigError on all ranks, which names the keys that differ and the ranks.
    """
    # Nodes may have different paths to the same folder; a file in the folder shows if it is the
    # same
    skipped = _NODE_KEYS if is_remote(config.cache) else _NODE_KEYS | {"cache"}
    if launch.size > 1:
        check_same_settings(launch, config.model_dump(exclude=set(skipped)))


def _list_token_files(session: Session) -> dict[str, list[str]]:
    """Return the names of the token files that the committed run reads, for each text source."""
    names = dict[str, list[str]]()
    configured = session.config.all_sources
    for digest in session.ledger.indices if session.ledger else ():
        snapshot = open_snapshot(session.cache, digest)
        files = snapshot.file_names()
        for entry in snapshot.sources:
            source = configured.get(entry.name)
            if source is not None and source.text is not None:
                names.setdefault(entry.name, []).extend(files[i] for i in entry.files)
    return names


def _log_report(cache: str, report: BuildReport) -> None:
    """Log changed files, notes, and the number of indexed files."""
    for path in report.changed:
        LOG.info("%s: %s has changed, indexed again", cache, path)
    for note in report.notes:
        LOG.info("%s: %s", cache, note)
    if report.read:
        LOG.info(
            "%s: indexed %d files in %.1f s, %d reused",
            cache,
            report.read,
            report.seconds,
            report.reused,
        )


def _find_ledger(session: Session, launch: Communicator) -> Ledger | None:
    """Return the run's ledger, which rank 0 reads; None if the run has no ledger. Called by all
    ranks."""
    return launch.bcast(session.ledger if launch.rank == 0 else None)


def _repair(
    session: Session,
    ledger: Ledger,
    report: BuildReport,
    launch: Communicator,
    progress: Callable[[Progress], None] | None,
) -> bool:
    """Repair the snapshots that a run keeps. Called by all ranks.

    Returns: whether one of them was damaged.
    """
    was_damaged = [
        repair_kept_index(
            session.config,
            dataclasses.replace(ledger, stages=(stage,)),
            report.digest,
            launch=launch,
            storage=session.storage,
            progress=progress,
        )
        for stage in {stage.index: stage for stage in ledger.stages}.values()
    ]
    return any(was_damaged)


def _build_document_tables(
    session: Session, ledger: Ledger | None, report: BuildReport, launch: Communicator
) -> TablesReport | None:
    """Make the document tables that the run needs, and those of the newest snapshot. Called by all
    ranks.

    Returns: the report on the newest snapshot; None if the run's orders need no tables.
    """
    config = session.config
    if not config.sources_needing_lengths:
        return None
    for digest, number in _list_tabled(config, ledger, report).items():
        snapshot = open_snapshot(config.cache_store, digest)
        if not all(entry.documents for entry in snapshot.sources):
            continue  # planning refuses this snapshot, which is an older one
        store = open_block_store(config, snapshot, session.run_storage, number=number)
        numbers = store.snapshot.sources.numbers
        tables = build_tables(
            store,
            # Sources that are withdrawn may be missing
            [numbers[name] for name in config.sources_needing_lengths if name in numbers],
            launch=launch,
        )
    return tables  # those of the newest snapshot, which is the last one


def _list_tabled(config: Config, ledger: Ledger | None, report: BuildReport) -> dict[str, int]:
    """Return the snapshots that need document tables, as a dict from digest to the snapshot's
    number in the run. These are the snapshots whose documents the run shuffles and, as the last
    entry, the newest snapshot."""
    committed = ledger.indices if ledger is not None else ()
    numbers = {digest: number for number, digest in enumerate(committed)}
    shuffled = {
        digest: number
        for digest, number in numbers.items()
        if digest != report.digest and config.needs_lengths_of_snapshot(number)
    }
    return shuffled | {report.digest: numbers.get(report.digest, len(numbers))}
