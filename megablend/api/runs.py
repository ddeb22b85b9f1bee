"""From a config, and perhaps a checkpoint's state, to a planned run over an opened index. No torch here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megablend.blocks.block_store import BlockStore
from megablend.caches.base import CacheStore
from megablend.caches.find import CacheLike, find_store, is_remote
from megablend.config import SPLITS, Config, load_config
from megablend.config.storage_settings import load_storage_settings
from megablend.errors import CacheError, ConfigError, PlanError, StateError
from megablend.index.list_snapshots import list_snapshots
from megablend.index.snapshot import Snapshot, open_snapshot
from megablend.plan.committed_run import open_committed
from megablend.plan.ledger import Ledger
from megablend.plan.ledger_file import load_ledger
from megablend.plan.ledger_format import PLAN_VERSION
from megablend.plan.links import agree_until, find_parting
from megablend.plan.open_store import open_stores
from megablend.plan.run import Run, as_promised, check_run, plan_run
from megablend.plan.state import State
from megablend.prefetch.memory_budget import check_sample
from megablend.storage.base import Storage
from megablend.storage.by_scheme import make_storage
from megablend.system.failures import translating

ConfigLike = str | Path | Mapping[str, Any] | Config


def resolve_cache(what: ConfigLike) -> CacheStore:
    """The cache, given directly (object stores then have the settings of MEGABLEND_STORAGE) or by a config.

    Raises: ConfigError for a config that cannot be read.
    """
    if isinstance(what, str | Path) and not Path(what).is_file():
        return find_store(what, load_storage_settings() if is_remote(what) else None)
    return load_config(what).cache_store


def is_cache(what: object) -> bool:
    """Whether a cache is given directly: its folder, or its URL."""
    return is_remote(what) or (isinstance(what, str | Path) and Path(what).is_dir())


def resolve_run(what: ConfigLike, run: str | None) -> str:
    """The run's name, by default the config's. Raises ConfigError where a cache is given without a name."""
    if run is not None:
        return run
    if is_cache(what):
        raise ConfigError(
            f"{what}: found a cache without the name of a run, expected both; `megablend runs list` lists its runs"
        )
    return load_config(what).run


def make_run_storage(config: Config) -> Storage:
    """Make the storage that a run is read from, as its config says."""
    return make_storage(direct=config.direct_io, objects=config.storage)


def open_run(
    config: Config,
    split: str,
    state: State | None = None,
    *,
    storage: Storage | None = None,
    ledger: Ledger | None = None,
) -> Run:
    """Open the run behind a dataset, read from `storage` or, by default, the config's. Raises as `megablend.open` does.

    Args:
        ledger: the run's, if it was read already: another process may replace it at any time.
    """
    if split not in SPLITS:
        raise ConfigError(f"found split {split!r}, expected one of {', '.join(SPLITS)}")
    check_sample(config)
    ledger = ledger or load_ledger(config.cache_store, config.run)
    return _open(config, split, state, ledger, (storage or make_run_storage(config)).for_reading())


def _open(config: Config, split: str, state: State | None, ledger: Ledger | None, storage: Storage) -> Run:
    if state is None:
        if ledger is None:
            raise CacheError(
                f"{config.cache}: run {config.run!r} was not built there; run `megablend build CONFIG` first"
            )
        if split == "train":
            return _open_train(config, ledger, storage)
        return _check(plan_committed(config, split, ledger, storage))
    followed = ledger if ledger is not None and split == "train" and _is_on_ledger(ledger, state) else None
    needed = state.indices if followed is None else [index for index in state.indices if index in followed.indices]
    known = list_snapshots(config.cache_store)
    if missing := [index for index in needed if index not in known]:
        raise StateError(
            f"the state was taken with index {missing[0]}, which {config.cache} does not hold (it has "
            f"{', '.join(known) or 'none'}); open it with the cache that the run was built in, or "
            "build the same data there (`megablend build CONFIG`)"
        )
    if followed is not None:
        return _open_train(config, followed, storage)
    run = plan_run(
        config,
        split,
        _open_for_state(config, split, state, ledger, storage),
        links=state.stages if split == "train" else (),
    )
    if split == "train":
        run = dataclasses.replace(run, ledger=run.ledger.of_state(state))
    return _check(_in_version_of(run, state))


def _open_train(config: Config, ledger: Ledger, storage: Storage) -> Run:
    return open_committed(config, ledger, open_stores(config, list_indices(config, ledger, None), storage))


def _check(run: Run) -> Run:
    check_run(run)
    return run


def _is_on_ledger(ledger: Ledger, state: State) -> bool:
    """Whether a state goes on with the ledger's plan; else with one of its own, from the config.

    Raises: StateError where the ledger's plan was amended, or got another index, before the state's position.
    """
    parting = find_parting(ledger.links, state.stages)
    if parting is not None and parting.sample and (parting.by_cut or state.reads_other(ledger.indices)):
        state.check(split="train", indices=ledger.indices, stages=ledger.links)
    # a ledger that ends before the state's new data does not have its stages yet
    is_whole = parting is not None or len(ledger.indices) >= len(state.indices)
    return is_whole and _begins_with(ledger, state)


def _open_for_state(config: Config, split: str, state: State, ledger: Ledger | None, storage: Storage) -> BlockStore:
    """The blocks of the snapshots that a state names. Of valid and test a state names one, which the config gives its number."""
    if split != "train" and ledger is not None and state.index in ledger.indices:
        return open_stores(config, ledger.indices, storage)
    if split != "train" and config.snapshot:
        raise StateError(
            f"the state is of {split} as a stage with new data has it, from index {state.index}; documents are divided as the "
            f"run grew, and run {config.run!r} in {config.cache} did not read that index: open it with the cache that the run "
            "was built in, or build the run there again as it grew"
        )
    return open_stores(config, state.indices, storage)


def plan_committed(
    config: Config,
    split: str,
    ledger: Ledger,
    storage: Storage,
    newest: str | None = None,
    *,
    replaced: Sequence[str] = (),
    keep: bool = False,
    batch: int | None = None,
) -> Run:
    """Plan what a config requests over the snapshots of its run's ledger, with what the ledger has fixed; not checked.

    Args:
        newest: the snapshot that a stage reads which is not committed yet, and has `new_data`.
        replaced: the snapshots of committed stages after those of the ledger, which are planned again.
        keep: store the computed split ranges in the cache.
        batch: of an amendment; see `request_stages`.

    Raises: PlanError; CacheError.
    """
    store = open_stores(config, list_indices(config, ledger, newest, replaced), storage)
    run = plan_run(config, split, store, keep=keep, links=ledger.links, batch=batch, promised=ledger)
    return as_promised(run, ledger)


def list_indices(config: Config, ledger: Ledger, newest: str | None, replaced: Sequence[str] = ()) -> tuple[str, ...]:
    """The snapshots that a run reads, in order: those of its ledger, and `newest` where a further stage has new data.

    Args:
        replaced: snapshots of stages after those of the ledger, which all such stages but the last one keep.

    Raises: PlanError where the newest is the one that the run reads already.
    """
    added = config.num_snapshots - len(ledger.indices)
    if newest is None or not 0 < added <= len(replaced) + 1:
        return ledger.indices
    known = (*ledger.indices, *replaced[: added - 1])
    if newest == known[-1]:
        number = next(i for i, each in enumerate(config.stage_settings) if each.snapshot == len(known))
        if names := config.stages[number].withdraw:
            raise PlanError(
                f"stages[{number}]: withdraw: the newest index, {newest}, still has {', '.join(map(repr, names))}; make one "
                "without (`megablend index CONFIG`), and try again"
            )
        raise PlanError(
            f"stages[{number}]: new_data: the files are as they were indexed (index {newest}); index them as they are now "
            "(`megablend index CONFIG`), or leave out new_data"
        )
    return (*known, newest)


@translating("open_index")
def open_index(cache: str | Path, digest: str | None = None, *, storage: Storage | None = None) -> BlockStore:
    """Open the blocks of an index, for loaders of your own: `open_index(cache).read_blocks(block_ids)`.

    Args:
        cache: a cache that `build` filled: its folder, or its URL in an object store.
        digest: of the index snapshot; by default the newest.
        storage: where files are read, in place of the default one.

    Raises: CacheError.
    """
    storage = storage or make_storage(objects=load_storage_settings())
    return BlockStore(newest_snapshot(resolve_cache(cache), digest), storage=storage.for_reading())


def newest_snapshot(cache: CacheLike, digest: str | None = None) -> Snapshot:
    """The index snapshot with this digest, or the newest. Raises CacheError where there is none."""
    found = list_snapshots(cache)
    if not found:
        raise CacheError(f"{cache}: holds no index; run `megablend build CONFIG` first")
    return open_snapshot(cache, digest or found[-1])


def _in_version_of(run: Run, state: State) -> Run:
    """The run in the plan version whose digest is the state's; in the newest where none is: then the state is refused."""
    for version in range(PLAN_VERSION, 0, -1):
        ledger = run.ledger.in_version(version)
        if _begins_with(ledger, state):
            return dataclasses.replace(run, ledger=ledger)
    return run


def _begins_with(ledger: Ledger, state: State) -> bool:
    """Whether the ledger's samples are those of the state's plan, as far as the state goes."""
    return agree_until(ledger.links, state.stages, state.consumed_samples) and (
        state.consumed_samples <= ledger.num_samples
    )
