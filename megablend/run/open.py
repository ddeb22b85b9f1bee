"""Open a run from its ledger. No config is needed: a config says where files are and which data
samples have in addition to tokens, but does not decide the order of samples."""

from __future__ import annotations

from functools import partial

from megablend.config.runtime import Runtime
from megablend.errors import CacheError, ConfigError
from megablend.index.read.snapshot import open_snapshot
from megablend.run.companion import Companion
from megablend.run.ledger import Ledger
from megablend.run.open_store import join_stores
from megablend.run.plan_stages import plan_stages
from megablend.run.run import Run
from megablend.run.split_data import find_sources
from megablend.storage.base import Storage


def open_ledger(
    ledger: Ledger,
    split: str,
    runtime: Runtime,
    storage: Storage,
    companion: Companion | None,
) -> Run:
    """Open a split of a run over the snapshots that its ledger names.

    Args:
        ledger: the ledger of train.
        companion: the ledger's companion; without it, only train is known, and its plan is
            computed.

    Raises: ConfigError if the split is not known; CacheError if a snapshot cannot be opened, or
        lacks a source of the ledger; PlanError if a snapshot lacks an extra column.
    """
    known = {"train": ledger} | dict(companion.others if companion else {})
    if split not in known:
        raise ConfigError(
            f"split {split}: the cache has no {split} split of run {ledger.run!r}; if the run's config has one, pass the "
            "config instead of the cache"
        )
    snapshots = list(map(partial(open_snapshot, runtime.cache), ledger.indices))
    names = set[str]()
    for snapshot in snapshots:
        names.update(snapshot.sources.names)
    # Whether the index has the sources by split, each with a list of its own
    is_listed = ledger.blend.sources[0].name not in names
    for source in ledger.blend.sources:
        if (f"train/{source.name}" if is_listed else source.name) not in names:
            raise CacheError(
                f"{snapshots[-1].folder}: lacks source {source.name!r} of run {ledger.run!r}; restore the cache from a backup"
            )
    eods = dict[str, int | None]()
    for owner, recorded in known.items():
        for source in recorded.blend.sources:
            eods[f"{owner}/{source.name}" if is_listed else source.name] = source.append_eod
    store = join_stores(ledger.run, snapshots, eods, runtime, storage)
    split_ledger = known[split]
    # The ledger of valid or test may have been recorded before some of train's sources were added
    sources = split_ledger.blend.sources if is_listed else ledger.blend.sources
    data = find_sources(
        split,
        sources,
        store,
        is_listed=is_listed,
        seed=split_ledger.blend.seed,
        shares=split_ledger.blend.fractions,
    )
    if split != "train":
        data = data.of_snapshot(ledger.indices.index(split_ledger.index))
    if companion is not None and split == "train":
        plan = companion.plan
        starts = companion.starts
    else:
        plan = plan_stages(split_ledger.stages, data.tokens_by_index, data.blocks)
        starts = (0,)
    return Run(
        split=split,
        ledger=split_ledger,
        store=store,
        data=data,
        plan=plan,
        runtime=runtime,
        starts=starts,
    )
