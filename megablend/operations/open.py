"""open: open the dataset of a run that was built, optionally at the state of a checkpoint. Nothing
is indexed, and no array of the run's length is created."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megablend.config import Config, load_config
from megablend.config.numbers import whole_number
from megablend.errors import ConfigError
from megablend.index.blocks.block_store import BlockStore
from megablend.operations.load_kernels import PLANNING, list_kernels, load_in_background
from megablend.operations.runs import check_split, is_on_ledger, newest_snapshot, open_run
from megablend.operations.session import ConfigLike, Session
from megablend.reader import Dataset
from megablend.run.run import Run
from megablend.run.skips import skips_of
from megablend.run.state import State
from megablend.storage.base import Storage
from megablend.system.failures import translating


@translating("open")
def open_dataset(
    config: ConfigLike | None = None,
    split: str = "train",
    *,
    run: str | None = None,
    stage: int | None = None,
    state: Mapping[str, Any] | None = None,
    consumed_samples: int | None = None,
    cache: str | None = None,
    transform: Callable[[dict[str, Any]], Any] | None = None,
    storage: Storage | None = None,
) -> Dataset:
    """Open one split of a run that `build` has built.

    Args:
        config: path of a YAML or JSON file, or the same as a dict. Without a config, the run is
            opened as it was committed: with the files at their indexed paths, and without masks and
            extra columns.
        split: "train", "valid" or "test".
        run: name of the run, if no config is given.
        stage: for valid and test, the number of a stage of the config, counted from 0. The split
            then has the settings of that stage; by default, it has those of the top level.
        state: a state from `state_dict()`. The index snapshots and the stages that it names are
            opened, and the dataset resumes at its position.
        consumed_samples: the position at which to resume, given instead of a state. It applies to
            the run as it is in the cache now. Only for train, since the order of valid and test is
            not committed.
        cache: cache folder, instead of the config's `cache`, or its URL.
        transform: a function that is applied to each sample's dict as the last step. Its return
            value replaces the sample, and is collated in the same way as by torch. It must be
            picklable if a loader's workers are spawned.
        storage: the storage that reads files, instead of the config's; for example a WrapperStorage
            around the config's storage.

    Raises: ConfigError, PlanError if config and run disagree; CacheError if the run was not
        built; StateError if the state is not of this run.
    """
    if state is not None and consumed_samples is not None:
        raise ConfigError(
            "found both state and consumed_samples; pass only the state, which contains consumed_samples"
        )
    if split != "train" and consumed_samples:
        raise ConfigError(
            f"found consumed_samples={consumed_samples} for {split}, whose order the cache does not record; pass the saved "
            "state, from state_dict(), as state="
        )
    parsed = None if state is None else State.from_dict(state)
    if config is None:
        opened = _open_without_config(cache, run, split, stage, parsed, storage)
    else:
        if run is not None:
            raise ConfigError(
                f"found both a config and run={run!r}; leave out run=, since the config names the run"
            )
        checked = load_config(config, cache=cache)
        if stage is not None:
            stage = _check_stage(checked, split, stage)
        load_in_background(PLANNING)
        opened = open_run(checked, split, parsed, stage=stage, storage=storage)
    load_in_background(list_kernels(opened))
    dataset = Dataset(
        opened,
        consumed_samples=consumed_samples or 0,
        transform=transform,
        skips=skips_of(opened),
    )
    if state is not None:
        dataset.load_state_dict(state)
    return dataset


def _open_without_config(
    cache: str | None,
    run: str | None,
    split: str,
    stage: int | None,
    state: State | None,
    storage: Storage | None,
) -> Run:
    """Open a run by its ledger. Raises: ConfigError if the cache or the run's name is missing, or a
    `stage` is given, which requires a config."""
    if cache is None or run is None:
        raise ConfigError(
            "found no config, expected the path of a YAML or JSON file, a dict with its keys, or both `cache` and "
            "`run`"
        )
    if stage is not None:
        raise ConfigError(
            f"found stage {stage} without a config, which lists the stages; pass the run's config"
        )
    check_split(split)
    session = Session(cache, run=run, storage=storage)
    if state is not None and split == "train":
        ledger = session.require_ledger()
        if not is_on_ledger(ledger, state):
            state.check(split=split, indices=ledger.indices, stages=ledger.links)
    return session.open_by_ledger(split)


def _check_stage(config: Config, split: str, stage: int) -> int:
    """Check the number of a stage, and return it. Raises: ConfigError if the config has no such
    stage, or the split is train, which always includes all stages."""
    if split == "train":
        raise ConfigError(
            f"found stage={stage} for train, which has all stages; pass `stage` for valid and test only"
        )
    stage = whole_number("stage", stage, least=0)
    if stage >= len(config.stages):
        raise ConfigError(
            f"found stage {stage}; the config lists {len(config.stages)} stages, counted from 0"
        )
    return stage


@translating("open_index")
def open_index(
    cache: str | Path, digest: str | None = None, *, storage: Storage | None = None
) -> BlockStore:
    """Open the blocks of an index, for loaders of your own:
    `open_index(cache).read_blocks(block_ids)`.

    Args:
        cache: a cache that `build` filled: its folder, or its URL in an object store.
        digest: digest of the index snapshot; by default the newest one.
        storage: the storage that reads files, instead of the default storage.

    Raises: CacheError if there is no such index, or it is damaged.
    """
    session = Session(cache, storage=storage)
    return BlockStore(newest_snapshot(session.cache, digest), storage=session.storage)
