"""From a ledger to a run. No config is needed: it says where files are and what samples have
besides tokens, not their order."""

from __future__ import annotations

from collections.abc import Mapping

from megablend.config.runtime import Runtime
from megablend.errors import CacheError, ConfigError
from megablend.index.read.snapshot import open_snapshot
from megablend.run.companion import Companion, load_companion
from megablend.run.ledger import Ledger
from megablend.run.open_store import join_stores
from megablend.run.plan_stages import plan_stages
from megablend.run.run import Run
from megablend.run.split_data import find_sources
from megablend.storage.base import Storage


def find_companion(runtime: Runtime, ledger: Ledger, request: str | None) -> Companion | None:
    """The companion of a ledger and a config's request,
    if there is one on this node or in the cache."""
    if request is None:
        return None
    runtime.cache.fetch_files("splits", [ledger.index])
    return load_companion(runtime.cache.folder, ledger, request)


def open_ledger(
    ledger: Ledger,
    split: str,
    runtime: Runtime,
    storage: Storage,
    companion: Companion | None,
    eods: Mapping[str, int | None] | None = None,
) -> Run:
    """Open a split of a run over the snapshots that its ledger names.

    Args:
        ledger: of train.
        companion: of the ledger; without it, only train is known, and its plan is computed.
        eods: by a source's name in the index, the token that follows each document; by default
            those of the known splits.

    Raises: ConfigError if the split is not known; CacheError if a snapshot cannot be opened,
        or lacks a source of the ledger; PlanError if one lacks an extra column.
    """
    known = {"train": ledger} | dict(companion.others if companion else {})
    if split not in known:
        raise ConfigError(
            f"split {split}: run {ledger.run!r} was built without it, or by a release that recorded only train; pass "
            "the run's own config, or build the run again"
        )
    snapshots = [open_snapshot(runtime.cache, index) for index in ledger.indices]
    names = {name for snapshot in snapshots for name in snapshot.sources.names}
    is_listed = any(source.name not in names for source in ledger.blend.sources)
    for source in ledger.blend.sources if is_listed else ():
        if f"train/{source.name}" not in names:
            raise CacheError(
                f"{snapshots[-1].folder}: lacks source {source.name!r} of run {ledger.run!r}; restore the cache from a backup"
            )
    if eods is None:
        eods = {
            f"{owner}/{source.name}" if is_listed else source.name: source.append_eod
            for owner, each in known.items()
            for source in each.blend.sources
        }
    store = join_stores(ledger.run, snapshots, eods, runtime, storage)
    own = known[split]
    # It may have been recorded before some came
    sources = own.blend.sources if is_listed else ledger.blend.sources
    data = find_sources(
        split,
        sources,
        store,
        is_listed=is_listed,
        seed=own.blend.seed,
        shares=own.blend.fractions,
    )
    if split != "train":
        data = data.of_snapshot(ledger.indices.index(own.index))
    is_stored = companion is not None and split == "train"
    return Run(
        split=split,
        ledger=own,
        store=store,
        data=data,
        plan=companion.plan
        if companion and is_stored
        else plan_stages(own.stages, data.tokens_by_index, data.blocks),
        runtime=runtime,
        starts=companion.starts if companion and is_stored else (0,),
    )
