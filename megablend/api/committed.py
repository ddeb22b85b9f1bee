"""Open a committed run from its ledger alone, so that it can be inspected after its config was edited or lost."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from megablend.api.runs import ConfigLike, is_cache, make_run_storage, open_run, resolve_cache, resolve_run
from megablend.caches.find import CacheLike, find_store
from megablend.config import Config, load_config
from megablend.config.storage_settings import load_storage_settings
from megablend.errors import CacheError, ConfigError, PlanError
from megablend.index.snapshot import Snapshot, open_snapshot
from megablend.index.source_entry import SourceEntry
from megablend.plan.ledger import Ledger
from megablend.plan.ledger_file import load_ledger
from megablend.plan.run import Run
from megablend.plan.stage import SourceShare, Stage
from megablend.storage.base import Storage
from megablend.storage.by_scheme import make_storage
from megablend.storage.location import escape_wildcards, join


def open_committed(
    what: ConfigLike,
    run: str | None = None,
    split: str = "train",
    *,
    cache: str | None = None,
    storage: Storage | None = None,
) -> Run:
    """Open a split of a run as it was committed.

    A config that still requests its run's order is used as it is. Otherwise, for train, the ledger decides: the config then
    only names the run and its cache.

    Args:
        what: a config, or the folder of a cache, which needs `run`.
        run: the run's name, in place of the config's.
        cache: in place of the config's.
        storage: where files are read, in place of the one that the config asks for.

    Raises: ConfigError, PlanError where the split is not one of the run's; CacheError where the run was not built, or its index
        is gone.
    """
    config = None if is_cache(what) else load_config(what, cache=cache)
    if config is not None and run in (None, config.run):
        try:
            return open_run(config, split, storage=storage)
        except (PlanError, CacheError):
            if split != "train":
                raise
    elif split != "train":
        raise ConfigError(f"split {split}: only train is in a run's ledger; give the run's own config for {split}")
    folder, name = (
        (config.cache_store, run or config.run) if config is not None else (resolve_cache(what), resolve_run(what, run))
    )
    ledger = load_ledger(folder, name)
    if ledger is None:
        raise CacheError(
            f"{folder}: run {name!r} was not built there; run `megablend build CONFIG` first, or choose one of the runs that "
            f"`megablend runs list {shlex.quote(folder.location)}` lists"
        )
    if storage is None:  # with the queries of a config's URLs, and its settings, which no ledger has
        storage = make_storage(objects=load_storage_settings()) if config is None else make_run_storage(config)
    return open_ledger(folder, ledger, storage=storage)


def open_ledger(cache: CacheLike, ledger: Ledger, *, storage: Storage | None = None) -> Run:
    """Open the train split of a ledger, over the index that it names. Raises CacheError, PlanError."""
    snapshots = [open_snapshot(cache, index) for index in ledger.indices]
    return open_run(make_config(cache, ledger, snapshots), "train", storage=storage, ledger=ledger)


def make_config(cache: CacheLike, ledger: Ledger, snapshots: Sequence[Snapshot]) -> Config:
    """Make a config that requests exactly what a ledger commits to, from the files of its indexes."""
    blend = ledger.stages[0].blend
    entries = {entry.name: entry for snapshot in snapshots for entry in snapshot.sources}
    by_split = any(source.name not in entries for source in blend.sources)
    prefix = "train/" if by_split else ""
    first_shares = blend.shares if blend.schedule is None else blend.schedule.start
    listed, all_sources = [], ledger.blend.sources
    first_shares = (*first_shares, *[Fraction(0)] * (len(all_sources) - len(first_shares)))
    for source, share in zip(all_sources, first_shares, strict=True):
        entry = entries.get(prefix + source.name)
        if entry is None:
            raise CacheError(
                f"{snapshots[-1].folder}: lacks source {source.name!r} of run {ledger.run!r}; restore the cache from a backup"
            )
        listed.append(_source(entry, replace(source, share=share)))
    first = ledger.stages[0]
    has_stages = any((each.blend, each.index, each.cut) != (blend, first.index, None) for each in ledger.stages)
    settings: dict[str, Any] = {
        **find_store(cache).config_keys,
        "run": ledger.run,
        **(
            {"stages": _list_stages(ledger, snapshots, prefix)}
            if has_stages or blend.schedule
            else {"samples": ledger.num_samples}
        ),
        "sources": {"train": listed, "valid": []} if by_split else listed,
        "sequence_length": blend.sequence_length,
        "add_extra_token_to_sequence": blend.add_extra_token_to_sequence,
        "seed": blend.seed,
        "order": blend.order,
        "lanes": blend.lanes,
        "shuffle_window": blend.shuffle_window,
        "interleaving": blend.interleaving,
    }
    if not by_split:
        settings["split"] = _shares(blend.split)
    return load_config(settings)


def _list_stages(ledger: Ledger, snapshots: Sequence[Snapshot], prefix: str) -> list[dict[str, Any]]:
    """The stages of a ledger as a config lists them, each with all that it may change."""
    known = {each.digest: {entry.name for entry in each.sources} for each in snapshots}
    found, here = list[dict[str, Any]](), set[str]()
    for before, stage in zip([None, *ledger.stages], ledger.stages, strict=False):
        settings: dict[str, Any] = {
            "samples": stage.end,
            "sequence_length": stage.blend.sequence_length,
            "order": stage.blend.order,
            "lanes": stage.blend.lanes,
            "shuffle_window": stage.blend.shuffle_window,
        }
        if before is not None and before.cut is not None:
            settings["from"] = before.cut
        if stage.drain is not None:
            settings["drain"] = stage.drain
        names, lost = [source.name for source in stage.blend.sources], set[str]()
        if before is not None and before.index != stage.index:
            lost = {name for name in names if prefix + name in here - known[stage.index]}
            settings |= {"new_data": True, "withdraw": sorted(lost)}
        here = (here | known[stage.index]) - {prefix + name for name in lost}
        settings["sources"] = {
            source.name: {"weight": source.share} for source in stage.blend.sources if prefix + source.name in here
        }
        found.append(settings | _schedule(stage))
    return found


def _schedule(stage: Stage) -> dict[str, Any]:
    schedule = stage.blend.schedule
    return {} if schedule is None else {"schedule": schedule.kind, "steps": len(schedule.done)}


def _source(entry: SourceEntry, source: SourceShare) -> dict[str, Any]:
    options = dict(entry.read.options)
    documents = options.pop("documents", None)
    return {
        "documents": {"eod_token": documents} if isinstance(documents, int) else documents,
        "name": source.name,
        "path": join(escape_wildcards(entry.root), "*"),
        "column": entry.column,
        "format": entry.format,
        "format_options": options,
        "append_eod": source.append_eod,
        "weight": source.share,
    }


def _shares(split: str) -> list[Any]:
    """Shares of train, valid and test, from a ledger's text such as `train of 9/10,1/10,0`."""
    return [Fraction(share) for share in split.partition(" of ")[2].split(",")]
