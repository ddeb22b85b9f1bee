"""The runs of a cache: list, show, rename, reset, remove. Checkpoint states still open the plan
they were saved with.

A run is its ledger, `runs/<name>.json`. Changes are made while the cache is held, one record at a
time: after a crash a run is either unchanged or changed; a rename may leave both names, and the
same command completes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from megablend.caches.base import RUNS, CacheStore
from megablend.caches.find import find_existing, is_remote
from megablend.config.model import MAX_RUN_NAME, RUN_NAME
from megablend.errors import CacheError, ConfigError
from megablend.index.tables.list_snapshots import list_snapshots
from megablend.operations.differences import Difference, describe_blend, list_blend_differences
from megablend.operations.results import Record
from megablend.operations.session import ConfigLike, Session
from megablend.run.ledger import Ledger
from megablend.run.ledger_file import load_ledger, run_names, save_ledger
from megablend.run.skips import copy_skips, forget_skips
from megablend.storage.location import find_scheme
from megablend.system.atomic_write import translate_os_errors


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunSummary(Record):
    """What a run is committed to, in short."""

    run: str
    """Its name."""
    index: str
    """Digest of the index that it reads."""
    index_exists: bool
    """Whether the cache has that index."""
    plan: str
    """Digest of its plan."""
    stages: tuple[int, ...]
    """Sample numbers at which its stages end."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StageCommitment(Record):
    """A stage of a run."""

    OPTIONAL: ClassVar[frozenset[str]] = frozenset({"drain"})
    start: int
    stop: int
    """Its samples, [start, stop)."""
    end: int
    """Where it would have ended; more than `stop` where an amendment cut it."""
    index: str
    """Digest of the index that it reads."""
    plan: str
    """Digest of the run's plan at its end."""
    changes: tuple[dict[str, Any], ...]
    """what, before, after: the settings that differ from the stage before it; none in the first
    one."""
    drain: int | None = None
    """Samples at its start that continue the stage before; None where the ledger does not say."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunCommitment(RunSummary):
    """What a run is committed to."""

    blend: dict[str, Any]
    """All that decides the order of its last stage, in the terms of configs."""
    chain: tuple[StageCommitment, ...]
    """All of its stages."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DamagedRun(Record):
    """A run whose ledger cannot be read."""

    run: str
    problem: str


def list_runs(what: ConfigLike) -> list[RunSummary | DamagedRun]:
    """The runs of a cache, by name; those whose ledger cannot be read as DamagedRun.

    Args:
        what: a cache (its folder or URL), or a config.

    Raises: ConfigError if there is neither, or the config cannot be read; CacheError for a
        folder that is no cache.
    """
    return list_runs_of(_cache_of(what))


def list_runs_of(cache: CacheStore) -> list[RunSummary | DamagedRun]:
    """The same for a cache that is open."""
    indices = set(list_snapshots(cache))
    return [listed for name in run_names(cache) if (listed := _listed(cache, name, indices))]


def show_run(what: ConfigLike, run: str) -> RunCommitment:
    """A run as `list_runs` lists it, with its `blend`. Raises: CacheError, ConfigError."""
    cache = _cache_of(what)
    ledger = _load(cache, run)
    summary = _summarize(ledger, set(list_snapshots(cache)))
    return RunCommitment(
        run=summary.run,
        index=summary.index,
        index_exists=summary.index_exists,
        plan=summary.plan,
        stages=summary.stages,
        blend=describe_blend(ledger.blend),
        chain=tuple(_list_chain(ledger)),
    )


def _list_chain(ledger: Ledger) -> Iterator[StageCommitment]:
    before = ledger.stages[0]
    for stage, start, digest in zip(ledger.stages, ledger.starts, ledger.digests, strict=True):
        differences = [
            Difference(what="index", a=before.index, b=stage.index),
            *list_blend_differences(before.blend, stage.blend),
        ]
        yield StageCommitment(
            start=start,
            stop=stage.stop,
            end=stage.end,
            index=stage.index,
            plan=digest,
            changes=tuple(
                {"what": each.what, "before": each.a, "after": each.b}
                for each in differences
                if each.a != each.b
            ),
            drain=stage.drain,
        )
        before = stage


def rename_run(what: ConfigLike, run: str, new: str) -> None:
    """Rename a run. Its plan and its states stay valid; set the new name in configs (`run:`).

    Raises: ConfigError if there is a run of the new name, or it cannot be a name; CacheError
        if there is no such run, or the cache is in use or cannot be written.
    """
    cache = _cache_of(what)
    check_run_name(new)
    if run == new:
        raise ConfigError(f"{cache}: run {run!r} has this name already; give it another one")
    with _changing(cache, run) as store:
        ledger = _load(cache, run)
        there = new in run_names(cache)
        renamed = dataclasses.replace(ledger, run=new)
        # The same one: a rename that was interrupted
        if there and load_ledger(cache, new) != renamed:
            raise ConfigError(
                f"{cache}: there is a run {new!r} already; remove it first, or choose another name"
            )
        if not there:
            # Before the ledger, so that a run of the new name never lacks them
            skips = copy_skips(store, ledger, new)
            save_ledger(cache, renamed, skips=skips)
        forget_skips(store, run)
        store.remove_record(RUNS, run)


def reset_run(what: ConfigLike, run: str) -> Path | str:
    """Move a run's ledger aside: the next build plans the run again, on the newest index, from its
    config as it is then.

    States of the run are accepted if the new plan equals the old one, and refused
    otherwise; opened with `state=`, they find their own plan, until `gc` removes the old
    index, which no run needs any more.

    Returns: where the ledger now is: a Path, or a URL. Moved back to `runs/<name>.json`, it
        restores the run.
    Raises: CacheError if there is no such run, or the cache is in use or cannot be written.
    """
    with _changing(_cache_of(what), run) as store:
        aside = store.set_aside_record(RUNS, run)
    return aside if find_scheme(aside) else Path(aside)


def remove_run(what: ConfigLike, run: str) -> None:
    """Remove a run permanently, with the ledgers that were moved aside when it was reset.
    Its index is kept until `gc` removes it.

    A damaged ledger is removed, too.

    Raises: CacheError if there is no such run, or the cache is in use or cannot be written.
    """
    with _changing(_cache_of(what), run) as store:
        store.remove_record(RUNS, run)
        forget_skips(store, run)


@contextlib.contextmanager
def _changing(store: CacheStore, run: str) -> Iterator[CacheStore]:
    """The cache, while no build runs."""
    _check_exists(store, run)
    with translate_os_errors(store.folder), store.hold():
        _check_exists(store, run)  # another process may have been faster
        yield store


def _cache_of(what: ConfigLike) -> CacheStore:
    """A cache, which need not be there if a config names it. Raises: ConfigError, CacheError."""
    if isinstance(what, str | Path) and not is_remote(what) and not Path(what).exists():
        raise ConfigError(
            f"{what}: no such file or folder; expected a config, or a cache filled by `megablend "
            "build CONFIG`"
        )
    session = Session(what)
    return find_existing(session.cache) if session.is_cache else session.cache


def _load(cache: CacheStore, run: str) -> Ledger:
    _check_exists(cache, run)
    ledger = load_ledger(cache, run)
    if ledger is None:
        raise CacheError(f"{cache}: run {run!r} was removed by another process just now")
    return ledger


def _check_exists(cache: CacheStore, run: str) -> None:
    check_run_name(run)
    if run not in (names := run_names(cache)):
        raise CacheError(
            f"{cache}: found no run {run!r}; the cache has {', '.join(map(repr, names)) or 'none'}"
        )


def check_run_name(run: str) -> None:
    """Raises: ConfigError for what cannot be the name of a run."""
    if not isinstance(run, str) or len(run) > MAX_RUN_NAME or not re.fullmatch(RUN_NAME, run):
        raise ConfigError(
            f"found run {run!r}, expected a name of at most {MAX_RUN_NAME} letters, digits, '.', '_' and '-', that begins with a "
            "letter or digit"
        )


def _listed(cache: CacheStore, run: str, indices: set[str]) -> RunSummary | DamagedRun | None:
    """A run, or what is wrong with its ledger; None if it was removed meanwhile."""
    try:
        ledger = load_ledger(cache, run)
    except CacheError as error:
        return DamagedRun(run=run, problem=str(error))
    return None if ledger is None else _summarize(ledger, indices)


def _summarize(ledger: Ledger, indices: set[str]) -> RunSummary:
    return RunSummary(
        run=ledger.run,
        index=ledger.index,
        index_exists=indices.issuperset(ledger.indices),
        plan=ledger.digest,
        stages=tuple(ledger.ends),
    )
