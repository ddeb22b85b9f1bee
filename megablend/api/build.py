"""build: index what is not indexed yet, then commit the run's order, or lengthen it; build_index: the index alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megablend.api.check import check_store
from megablend.api.known_ranges import refuse_known_outliers
from megablend.api.repair import repair_kept_index
from megablend.api.runs import make_run_storage
from megablend.api.warn import find_warnings
from megablend.blocks.build_document_tables import TablesReport, build_tables
from megablend.config import Config, load_config
from megablend.distributed.base import Communicator
from megablend.distributed.launch import detect
from megablend.fs.build_lock import build_lock
from megablend.index.build import BuildReport, Progress
from megablend.index.build import build_index as index_files
from megablend.index.build_report import report_waiting
from megablend.index.snapshot import open_snapshot
from megablend.index.source_spec import SourceSpec
from megablend.plan.ledger import Ledger
from megablend.plan.ledger_file import load_ledger, save_ledger
from megablend.plan.open_store import open_block_store
from megablend.plan.run import as_promised, check_run, plan_run, precompute_orders
from megablend.prefetch.memory_budget import check_sample
from megablend.storage.base import Storage
from megablend.storage.by_scheme import make_storage
from megablend.system.failures import translating


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildResult:
    """What a build did."""

    index: BuildReport
    documents: TablesReport | None
    """What the tables of documents took, where the order needs them."""
    ledger: Ledger
    """The run's, as it stands now."""
    stages_before: int
    """Stages that the run had before; 0 for a new run."""
    problems: tuple[str, ...]
    """Files of the older index that the run keeps reading which are missing or changed: the run cannot be read to its end."""
    warnings: tuple[str, ...] = ()
    """Numbers of the plan that deserve a second look; see `find_warnings`."""

    @property
    def pinned(self) -> bool:
        """Whether the run keeps an older generation of the index, on which its order was promised."""
        return self.ledger.index != self.index.digest


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltIndex:
    """What building an index alone did."""

    index: BuildReport
    documents: TablesReport | None
    """What the tables of documents took, where the order needs them."""


def build_index(
    config: str | Path | Mapping[str, Any] | Config,
    *,
    cache: str | None = None,
    progress: Callable[[Progress], None] | None = None,
    launch: Communicator | None = None,
    storage: Storage | None = None,
) -> BuiltIndex:
    """Index the config's files and commit no run: `describe` then says what a run of this config would read.

    Arguments, processes and errors are those of `build`.

    Returns: the same on all ranks.
    """
    launch = launch or detect()
    checked, report = _index(config, cache, progress, launch, storage)
    try:
        documents = _tabulate(checked, report.digest, launch, storage) if checked.tabled else None
    except BaseException as error:
        launch.abort(error)
    return BuiltIndex(index=report, documents=documents)


def build(
    config: str | Path | Mapping[str, Any] | Config,
    *,
    cache: str | None = None,
    progress: Callable[[Progress], None] | None = None,
    launch: Communicator | None = None,
    storage: Storage | None = None,
) -> BuildResult:
    """Index the config's files and write the run's ledger. Alone, or on every rank of an MPI job: the ranks share the work.

    Args:
        config: path of a YAML or JSON file, or the same as a dict.
        cache: in place of the config's `cache`.
        progress: called on rank 0 as work goes on.
        launch: the processes that build; found out from the environment where absent.
        storage: where files are found and read, in place of the one that the config asks for; the same on all ranks.

    Returns: the same on all ranks.
    Raises: ConfigError, PlanError, DataError, CacheError, LaunchError. Under MPI an error on one rank ends all ranks, with that
        rank's message and the error's exit code.
    """
    launch = launch or detect()
    checked, report = _index(config, cache, progress, launch, storage)
    built = None
    try:
        with translating(checked.cache):
            ledger = launch.bcast(load_ledger(checked.cache, checked.run) if launch.rank == 0 else None)
            if ledger is not None and _repair(checked, ledger, report, launch, storage, progress):
                checked, report = _index(
                    checked, None, progress, launch, storage
                )  # the config's own is the newest again
            documents = None
            if checked.tabled:
                documents = _tabulate(checked, ledger.index if ledger else report.digest, launch, storage)
            if launch.rank == 0:
                with build_lock(Path(checked.cache), on_wait=report_waiting(progress)):
                    built = _commit_run(checked, report, documents, storage or make_run_storage(checked))
    except BaseException as error:
        launch.abort(error)
    built = launch.bcast(built)
    assert built is not None
    return built


def _index(
    config: str | Path | Mapping[str, Any] | Config,
    cache: str | None,
    progress: Callable[[Progress], None] | None,
    launch: Communicator,
    storage: Storage | None,
) -> tuple[Config, BuildReport]:
    """The checked config, and what became of its files. Called by all ranks."""
    try:
        with translating("build"):
            checked = load_config(config, cache=cache)
            check_sample(checked)
    except BaseException as error:
        launch.abort(error)
    storage = storage or make_storage(
        objects=checked.storage
    )  # through the page cache: what is indexed is often read soon
    report = index_files(checked.cache, list_specs(checked), launch=launch, storage=storage, progress=progress)
    try:
        with translating(checked.cache):
            if launch.rank == 0:
                refuse_known_outliers(checked, open_snapshot(checked.cache, report.digest), storage)
    except BaseException as error:
        launch.abort(error)
    launch.barrier()  # no rank goes on with what rank 0 refuses
    return checked, report


def list_specs(checked: Config) -> list[SourceSpec]:
    """The sources that a config requests to be indexed, with their extra columns."""
    return [
        SourceSpec(
            name=name,
            patterns=source.path,
            read=checked.read_spec(source),
            extra_columns=source.extra_columns,
            skip_unreadable=checked.on_unreadable == "skip",
            place=source.place,
        )
        for name, source in checked.all_sources.items()
    ]


def _tabulate(config: Config, digest: str, launch: Communicator, storage: Storage | None) -> TablesReport:
    """Make the document tables of the index that the run reads. Called by all ranks."""
    store = open_block_store(config, open_snapshot(config.cache, digest), storage or make_run_storage(config))
    numbers = {entry.name: number for number, entry in enumerate(store.generation.sources)}
    return build_tables(store, [numbers[name] for name in config.tabled], launch=launch)


def _repair(
    config: Config,
    ledger: Ledger,
    report: BuildReport,
    launch: Communicator,
    storage: Storage | None,
    progress: Callable[[Progress], None] | None,
) -> bool:
    return repair_kept_index(
        config, ledger, report.digest, launch=launch, storage=storage or make_storage(), progress=progress
    )


def _commit_run(config: Config, report: BuildReport, documents: TablesReport | None, storage: Storage) -> BuildResult:
    """Begin the run's ledger, or append a stage to it."""
    ledger = load_ledger(config.cache, config.run)
    generation = open_snapshot(config.cache, ledger.index if ledger else report.digest)
    store = open_block_store(config, generation, storage)
    run = plan_run(config, "train", store, keep=True)
    extended = ledger.extend(as_promised(run, ledger).ledger) if ledger else run.ledger
    run = dataclasses.replace(run, ledger=extended)
    check_run(run)
    precompute_orders(config, store)
    if extended != ledger:
        save_ledger(config.cache, extended)
    stages_before = len(ledger.stages) if ledger else 0
    # Of the files of an index that was built now, all has just been looked at.
    problems = check_store(config, store).problems if generation.digest != report.digest else ()
    return BuildResult(
        index=report,
        documents=documents,
        ledger=extended,
        stages_before=stages_before,
        problems=problems,
        warnings=tuple(find_warnings(run)),
    )
