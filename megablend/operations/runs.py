"""Open the run of a config, optionally at the state of a checkpoint. This module does not import
torch."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

from megablend.caches.base import SNAPSHOTS, CacheStore
from megablend.config import SPLITS, Config
from megablend.config.runtime import Runtime
from megablend.errors import CacheError, ConfigError, PlanError, StateError
from megablend.index.blocks.block_store import BlockStore
from megablend.index.blocks.growing_splits import find_split_ranges
from megablend.index.read.snapshot import Snapshot, open_snapshot
from megablend.index.tables.list_snapshots import list_snapshots
from megablend.prefetch.memory_budget import check_sample
from megablend.run.check_totals import check_limits
from megablend.run.commit import compile_others, keep_companion
from megablend.run.companion import load_companion
from megablend.run.compile import Compiled, compile_split
from megablend.run.ledger import Ledger
from megablend.run.ledger_file import read_ledger
from megablend.run.ledger_format import PLAN_VERSION
from megablend.run.links import find_parting
from megablend.run.open import open_ledger
from megablend.run.open_store import open_stores
from megablend.run.run import Run
from megablend.run.state import State
from megablend.storage.base import Storage
from megablend.storage.by_scheme import make_storage


def open_run(
    config: Config,
    split: str,
    state: State | None = None,
    *,
    stage: int | None = None,
    storage: Storage | None = None,
) -> Run:
    """Open the run of a config. Raises: see `megablend.open`.

    If the ledger has a companion (a file with the results of compiling) for this config, the run is
    opened from it. The config is compiled only if there is none, or if the state belongs to a plan
    other than the ledger's.

    Args:
        stage: for valid and test: the number of the config's stage whose settings are used.
        storage: the storage that reads files, instead of the config's storage.
    """
    check_split(split)
    check_sample(config)
    storage = (
        storage.for_reading()
        if storage
        else make_storage(direct=config.direct_io, objects=config.storage)
    )
    _, ledger = read_ledger(config.cache_store, config.run)
    if state is None and ledger is None:
        raise CacheError(
            f"{config.cache_store}: contains no run {config.run!r}; run `megablend build CONFIG` first"
        )
    # Whether the ledger decides the order; otherwise, the state does
    by_ledger = state is None or (
        split == "train" and ledger is not None and is_on_ledger(ledger, state)
    )
    if state is not None:
        needed: Sequence[str] = state.indices
        if by_ledger and ledger is not None:
            needed = [index for index in needed if index in ledger.indices]
        _check_indices(config, needed)
    if stage is not None:
        config = config.stage_configs[stage]
    elif ledger is not None and (by_ledger or split != "train"):
        run = _open_companion(config, split, ledger, storage)
        if run is not None and (by_ledger or state is None or _begins_with(run.ledger, state)):
            return run
    if state is not None and not by_ledger:
        return _compile_for_state(config, split, state, ledger, storage)
    assert ledger is not None
    if split == "train":
        return _compile_train(config, ledger, storage)
    compiled = compile_committed(config, split, ledger, storage)
    check_limits(compiled)
    return compiled.run


def _open_companion(config: Config, split: str, ledger: Ledger, storage: Storage) -> Run | None:
    """Open a split as it was committed, if the ledger has a companion for this config; return None
    if the config must be compiled."""
    runtime = Runtime.of(config)
    companion = load_companion(runtime.cache, ledger, config.request_digest)
    if companion is None or (split != "train" and split not in companion.others):
        return None
    return open_ledger(ledger, split, runtime, storage, companion)


def _compile_train(config: Config, ledger: Ledger, storage: Storage) -> Run:
    """Compile the train split of a config, and check that the result matches the ledger. A
    companion is stored for the next time, if possible."""
    compiled = compile_committed(config, "train", ledger, storage).follow_ledger(ledger)
    check_limits(compiled)
    if compiled.ledger == ledger:
        # It cannot be written if the cache belongs to another user, or is full
        with contextlib.suppress(CacheError):
            keep_companion(compiled, compile_others(compiled))
    return compiled.run


def _compile_for_state(
    config: Config, split: str, state: State, ledger: Ledger | None, storage: Storage
) -> Run:
    """Compile the plan of a state. No ledger has this plan. Raises: StateError if the config has
    stages that read further snapshots."""
    if split == "train" and config.num_snapshots > len(state.indices):
        raise StateError(
            f"the state was saved before the run read all new data of this config, and the ledger of run {config.run!r} does "
            "not continue it; open it with the config of that time, or, if the run was reset, restore its ledger from "
            "`runs/reset/` in the cache"
        )
    links = state.stages if split == "train" else ()
    compiled = compile_split(
        config, split, _open_for_state(config, split, state, ledger, storage), links=links
    )
    if split == "train":
        compiled = dataclasses.replace(compiled, ledger=compiled.ledger.of_state(state))
    versions = (compiled.ledger.in_version(version) for version in range(PLAN_VERSION, 0, -1))
    # If no version fits, the state is refused later
    fitting = next(
        (version for version in versions if _begins_with(version, state)), compiled.ledger
    )
    compiled = dataclasses.replace(compiled, ledger=fitting)
    check_limits(compiled)
    return compiled.run


def check_split(split: str) -> None:
    """Check the name of a split. Raises: ConfigError if there is no such split."""
    if split not in SPLITS:
        raise ConfigError(f"found split {split!r}, expected one of {', '.join(SPLITS)}")


def _check_indices(config: Config, needed: Sequence[str]) -> None:
    """Check that the cache has the snapshots that a state needs. Raises: StateError if one is
    missing."""
    store = config.cache_store
    missing = [index for index in needed if not store.has_folder(SNAPSHOTS, index)]
    if missing:
        present = list_snapshots(store)
        raise StateError(
            f"the state was saved with index {missing[0]}, which is not in {config.cache} (found "
            f"{', '.join(present) or 'none'}); open the state with the cache in which its run was built, "
            "or build the same data again (`megablend build CONFIG`)"
        )


def is_on_ledger(ledger: Ledger, state: State) -> bool:
    """Return whether a state continues on the ledger's plan. If it does not, the state has a plan
    of its own, which is compiled from the config.

    Raises: StateError if the ledger's plan was amended, or got another index, before the state's
        position.
    """
    parting = find_parting(ledger.links, state.stages)
    if parting.by_cut or (
        parting.sample and not parting.is_end and state.reads_other(ledger.indices)
    ):
        state.check(split="train", indices=ledger.indices, stages=ledger.links)
    # A ledger that ends before the state's new data does not have its stages yet
    has_stages = not parting.is_end or len(ledger.indices) >= len(state.indices)
    return has_stages and _begins_with(ledger, state)


def _open_for_state(
    config: Config, split: str, state: State, ledger: Ledger | None, storage: Storage
) -> BlockStore:
    """Open the blocks of the snapshots that a state names. A state of valid or test names only one
    snapshot; its number in the run is known from the config."""
    if split != "train" and ledger is not None and state.index in ledger.indices:
        return open_stores(config, ledger.indices, storage)
    if split != "train" and config.snapshot:
        raise StateError(
            f"the state of {split} was saved with index {state.index}, which run {config.run!r} in {config.cache} does not "
            "read; open the state with the cache in which its run was built"
        )
    return open_stores(config, state.indices, storage)


def compile_committed(
    config: Config,
    split: str,
    ledger: Ledger,
    storage: Storage,
    newest: str | None = None,
    *,
    replaced: Sequence[str] = (),
    keep: bool = False,
    batch: int | None = None,
) -> Compiled:
    """Compile a config on the snapshots of its run's ledger, keeping the settings that the ledger
    has fixed. The result is not compared with the ledger.

    Args:
        newest: the snapshot that a stage with `new_data` reads, if it is not committed yet.
        replaced: the snapshots of committed stages that are not in `ledger` because these stages
            are planned again.
        keep: store the computed split ranges in the cache.
        batch: see `compile_split`.

    Raises: PlanError; CacheError.
    """
    store = open_stores(config, list_indices(config, ledger, newest, replaced), storage)
    if keep:
        find_split_ranges(store.stores, config.shares, keep=True)
    return compile_split(config, split, store, committed=ledger, batch=batch)


def list_indices(
    config: Config, ledger: Ledger, newest: str | None, replaced: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the snapshots that a run reads, in order: first the snapshots of its ledger, then one
    for each further stage of the config that has `new_data`. The last such stage reads `newest`.

    Args:
        replaced: snapshots of committed stages that are not in `ledger`; the further stages, except
            the last one, continue to read them.

    Raises: PlanError if the run reads `newest` already.
    """
    added = config.num_snapshots - len(ledger.indices)
    if newest is None or not 0 < added <= len(replaced) + 1:
        return ledger.indices
    earlier = (*ledger.indices, *replaced[: added - 1])
    if newest == earlier[-1]:
        snapshots = [stage.snapshot for stage in config.stage_configs_ignoring_sources]
        number = snapshots.index(len(earlier))  # the stage that would read the newest index
        names = config.stages[number].withdraw
        if names:
            raise PlanError(
                f"stages[{number}]: withdraw: the newest index, {newest}, still has "
                f"{', '.join(map(repr, names))}; build an index without these sources (`megablend "
                "index CONFIG`), and try again"
            )
        raise PlanError(
            f"stages[{number}]: new_data: the run already reads the newest index, {newest}; index the new files "
            "(`megablend index CONFIG`), or leave out new_data"
        )
    return (*earlier, newest)


def newest_snapshot(cache: CacheStore, digest: str | None = None) -> Snapshot:
    """Open the index snapshot with the given digest, by default the newest one. Raises: CacheError
    if it does not exist."""
    digests = list_snapshots(cache)
    if not digests:
        raise CacheError(f"{cache}: holds no index; run `megablend build CONFIG` first")
    return open_snapshot(cache, digest or digests[-1])


def _begins_with(ledger: Ledger, state: State) -> bool:
    """Return whether the ledger and the state's plan have the same samples before the state's
    position."""
    parting = find_parting(ledger.links, state.stages)
    return (
        parting.agrees_before(state.consumed_samples)
        and state.consumed_samples <= ledger.num_samples
    )
