"""What a run would be: planned on the existing index, without committing anything."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megablend.api.build import list_specs
from megablend.api.description import SourceFiles
from megablend.api.runs import make_run_storage, plan_committed
from megablend.blocks.block_store import BlockStore
from megablend.config import Config, Source
from megablend.errors import PlanError
from megablend.index.list_snapshots import list_snapshots
from megablend.index.snapshot import Snapshot, open_snapshot
from megablend.index.sources import list_source
from megablend.plan.ledger import Ledger
from megablend.plan.ledger_file import load_ledger
from megablend.plan.open_store import open_block_store, open_stores
from megablend.plan.run import Run, check_run, plan_run
from megablend.prefetch.memory_budget import check_sample
from megablend.storage.base import Storage
from megablend.storage.by_scheme import make_storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """A run of train as `build` would commit it, or as it is committed already."""

    run: Run
    committed: bool
    """Whether the ledger has committed exactly this."""
    note: str | None
    """How it differs from what is committed, and what to do; None where it does not."""


def foresee_run(config: Config, *, storage: Storage | None = None) -> Foreseen | str:
    """Plan train as the config requests it, by the run's ledger if it has one; commits nothing.

    Returns: the run; or, where no index holds the config's sources, why, and what to do.
    Raises: PlanError, ConfigError where the config cannot be planned; CacheError where the cache is damaged.
    """
    check_sample(config)
    storage = storage or make_run_storage(config)
    ledger = load_ledger(config.cache_store, config.run)
    refusal = None
    if ledger is not None:
        try:
            return _by_ledger(config, ledger, storage)
        except PlanError as error:
            refusal = str(error)
    generations = list_snapshots(config.cache_store)
    if not generations:
        return f"{config.cache} holds no index, so the numbers of tokens are not known: {_index_it()}"
    generation = open_snapshot(config.cache_store, generations[-1])
    there = {entry.name for entry in generation.sources}
    if missing := [name for name in config.all_sources if name not in there]:
        return (
            f"the newest index of {config.cache} lacks {len(missing)} of the config's sources (the first: {missing[0]!r}), so "
            f"their numbers of tokens are not known: {_index_it()}"
        )
    note = f"run {config.run!r} is not committed; `megablend build CONFIG` commits it"
    if refusal is not None:
        note = (
            f"this is not what run {config.run!r} is committed to, and `megablend build CONFIG` refuses it: {refusal}"
        )
    run = plan_run(config, "train", _open_requested(config, ledger, generation, storage))
    check_run(run)
    return Foreseen(run=run, committed=False, note=note)


def _open_requested(config: Config, ledger: Ledger | None, newest: Snapshot, storage: Storage) -> BlockStore:
    """The blocks that a config's stages read: of the newest index, or of the run's where a stage has new data.

    Raises: as `open_stores`.
    """
    count = config.num_snapshots
    if ledger is None or count == 1:
        return open_block_store(config, newest, storage)
    digests = dict.fromkeys([*ledger.indices, newest.digest])
    return open_stores(config, list(digests)[:count], storage)


def list_files(config: Config, *, storage: Storage | None = None) -> tuple[SourceFiles, ...]:
    """What is known of each source without an index.

    Raises: ConfigError where a path matches no file; MissingFileError.
    """
    configured, storage = config.all_sources, storage or make_storage(objects=config.storage)
    listed = []
    for spec in list_specs(config):
        listing, source = list_source(spec, storage), configured[spec.name]
        listed.append(
            SourceFiles(
                name=spec.name,
                format=listing.spec.read.format,
                files=len(listing.files),
                bytes=sum(file.size for file in listing.files),
                share=_share(source),
            )
        )
    return tuple(listed)


def _share(source: Source) -> dict[str, float | str] | None:
    """The share as the config gives it: its unit, and the number or `size`."""
    if source.unit is None:
        return None
    given = getattr(source, source.unit)
    return {source.unit: given if isinstance(given, str) else float(given)}


def _by_ledger(config: Config, ledger: Ledger, storage: Storage) -> Foreseen:
    """The committed run, or what extending it would make of it. Raises PlanError where the ledger refuses the config."""
    newest = list_snapshots(config.cache_store)[-1]
    run = plan_committed(config, "train", ledger, storage, newest)
    committed = ledger.until(run.num_samples)
    extended = committed.extend(run.ledger)
    run = dataclasses.replace(run, ledger=extended)
    check_run(run)
    if extended == committed:
        return Foreseen(run=run, committed=True, note=None)
    note = (
        f"run {config.run!r} is committed to {ledger.num_samples:,} samples; `megablend build CONFIG` lengthens it to "
        f"{run.num_samples:,}, as described here"
    )
    return Foreseen(run=run, committed=False, note=note)


def _index_it() -> str:
    return "`megablend index CONFIG` indexes the files and commits no run"
