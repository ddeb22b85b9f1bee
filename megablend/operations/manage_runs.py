"""List, show, rename, reset and remove the runs of a cache. After such a change, checkpoint states
can still be opened, with the plan that they were saved with.

A run is stored as its ledger, `runs/<name>.json`. Changes are made while the cache is locked, one
record at a time. So after a crash, a run is either unchanged or completely changed. Only a rename
may leave a run under both names; repeating the command completes the rename.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megablend.caches.base import RUNS, CacheStore
from megablend.caches.find import find_existing, is_remote
from megablend.config.model import MAX_RUN_NAME, RUN_NAME
from megablend.errors import CacheError, ConfigError
from megablend.index.tables.list_snapshots import list_snapshots
from megablend.operations.results import Record
from megablend.operations.session import ConfigLike, Session
from megablend.run.compare_blends import compare_blends, describe_blend
from megablend.run.ledger import Ledger
from megablend.run.ledger_file import (
    load_ledger,
    overtaken,
    read_ledger,
    run_names,
    save_ledger,
)
from megablend.run.skips import copy_skips, forget_skips, load_skips, mark_moved
from megablend.storage.location import find_scheme
from megablend.system.atomic_write import translate_os_errors


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunSummary(Record):
    """A summary of what a run is committed to."""

    run: str
    """Name of the run."""
    index: str
    """Digest of the index that the run's last stage reads."""
    index_exists: bool
    """Whether the cache has all indexes that the run reads."""
    plan: str
    """Digest of the run's plan."""
    stages: tuple[int, ...]
    """Sample numbers at which the stages end."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StageCommitment(Record):
    """A stage of a run: samples [start, stop)."""

    start: int
    stop: int
    end: int
    """The sample at which the stage was planned to end; more than `stop` if an amendment cut it."""
    index: str
    """Digest of the index that the stage reads."""
    plan: str
    """Digest of the run's plan at the stage's end."""
    changes: tuple[dict[str, Any], ...]
    """The settings that differ from the previous stage, each as a dict with `what`, `before` and
    `after`. Empty for the first stage."""
    drain: int | None = None
    """Number of samples at the start of the stage that still continue the previous stage; None if
    the ledger does not record it."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunCommitment(RunSummary):
    """The settings and stages that a run is committed to."""

    blend: dict[str, Any]
    """The settings that determine the order of the last stage, with the key names of configs."""
    chain: tuple[StageCommitment, ...]
    """All stages."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DamagedRun(Record):
    """A run whose ledger cannot be read."""

    run: str
    problem: str
    """The error with which reading the ledger failed."""


def list_runs(what: ConfigLike) -> list[RunSummary | DamagedRun]:
    """List the runs of a cache, sorted by name; a run whose ledger cannot be read is a DamagedRun.

    Args:
        what: a cache (its folder or URL), or a config.

    Raises: ConfigError if `what` does not exist, or the config cannot be read; CacheError if the
        folder is not a cache.
    """
    return list_runs_of(_cache_of(what))


def list_runs_of(cache: CacheStore) -> list[RunSummary | DamagedRun]:
    """List the runs of an open cache; see `list_runs`."""
    listed = [_load_listed(cache, name) for name in run_names(cache)]
    # Afterwards, since builds commit an index before the run that reads it
    indices = set(list_snapshots(cache))
    return [
        RunSummary(**_summarize(run, indices)) if isinstance(run, Ledger) else run
        for run in listed
        if run is not None
    ]


def show_run(what: ConfigLike, run: str) -> RunCommitment:
    """Show what a run is committed to. Raises: ConfigError; CacheError if there is no such run, or
    its ledger is damaged."""
    cache = _cache_of(what)
    ledger = _load(cache, run)
    return RunCommitment(
        **_summarize(ledger, set(list_snapshots(cache))),
        blend=describe_blend(ledger.blend),
        chain=tuple(_list_chain(ledger)),
    )


def rename_run(what: ConfigLike, run: str, new: str) -> None:
    """Rename a run. Its plan and its states stay valid. Configs must be edited to use the new name
    (`run:`).

    Raises: ConfigError if a run with the new name exists, or it is not a valid name; CacheError if
        there is no such run, or the cache is in use or cannot be written.
    """
    cache = _cache_of(what)
    check_run_name(new)
    if run == new:
        raise ConfigError(
            f"{cache}: the new name of run {run!r} is the same as the old one; choose a different name"
        )
    with _changing(cache, run) as store:
        record, ledger = read_ledger(store, run)
        if ledger is None:
            raise overtaken(store, run)
        renamed = dataclasses.replace(ledger, run=new)
        # Where the file system ignores case, a name that is not listed may have a ledger
        present = load_ledger(cache, new)
        # If a rename was interrupted, both names may have this ledger already, with its skips
        if present is not None and (
            present != renamed or load_skips(store, renamed) != load_skips(store, ledger)
        ):
            raise ConfigError(
                f"{cache}: a run {new!r} already exists; remove it first, or choose another name"
            )
        if present is None:
            # Skips are written before the ledger, so that a run of the new name always has them
            skips = copy_skips(store, ledger, new)
            try:
                save_ledger(cache, renamed, skips=skips)
            except BaseException:
                # A later run of this name and plan would have them
                if new not in run_names(cache):
                    forget_skips(store, new)
                raise
        mark_moved(store, run)
        # Not what another process has made of the run in a cache without locks
        store.remove_record(RUNS, run, record)
        forget_skips(store, run)


def reset_run(what: ConfigLike, run: str) -> Path | str:
    """Reset a run by moving its ledger aside. The next build plans the run again, on the newest
    index, from the config of that time.

    States of the run are accepted if the new plan equals the old one, and refused otherwise.
    `megablend.open` with `state=` can still open the old plan, until `gc` removes the old index,
    which no run needs any more. Of a run that was amended, or reads new data, states may need the
    old ledger.

    Returns: the path or URL of the ledger that was moved aside. To restore the run, move this
        ledger back to `runs/<name>.json`.
    Raises: CacheError if there is no such run, or the cache is in use or cannot be written.
    """
    with _changing(_cache_of(what), run) as store:
        with contextlib.suppress(CacheError):  # damaged skips are an error when the run is opened
            mark_moved(store, run, moved=False)
        aside = store.set_aside_record(RUNS, run)
    return aside if find_scheme(aside) else Path(aside)


def remove_run(what: ConfigLike, run: str) -> None:
    """Remove a run permanently, together with the ledgers that were moved aside when it was reset.
    This also works if the run's ledger is damaged. The index is kept until `gc` removes it.

    Raises: CacheError if there is no such run, or the cache is in use or cannot be written.
    """
    with _changing(_cache_of(what), run) as store:
        # First, so that no later run of this name and plan finds them if this process is killed
        forget_skips(store, run)
        store.remove_record(RUNS, run)


def check_run_name(run: str) -> None:
    """Check the name of a run. Raises: ConfigError if it is not a valid name."""
    if not isinstance(run, str) or len(run) > MAX_RUN_NAME or not re.fullmatch(RUN_NAME, run):
        raise ConfigError(
            f"found run {run!r}, expected a name of at most {MAX_RUN_NAME} letters, digits, '.', '_' and '-', that begins with a "
            "letter or digit"
        )


@contextlib.contextmanager
def _changing(store: CacheStore, run: str) -> Iterator[CacheStore]:
    """Lock the cache of a run, so that no build or other command changes it. Raises: CacheError if
    there is no such run."""
    _check_exists(store, run)
    with translate_os_errors(store.folder), store.hold():
        _check_exists(store, run)  # another process may have removed it since
        yield store


def _cache_of(what: ConfigLike) -> CacheStore:
    """Return the cache for `what`, which is a cache or a config that names one. Only a cache that
    is given directly must exist. Raises: ConfigError, CacheError."""
    if isinstance(what, str | Path) and not is_remote(what) and not Path(what).exists():
        raise ConfigError(
            f"{what}: no such file or folder; expected a config, or a cache filled by `megablend "
            "build CONFIG`"
        )
    session = Session(what)
    return find_existing(session.cache) if session.is_cache else session.cache


def _load(cache: CacheStore, run: str) -> Ledger:
    """Load the ledger of a run. Raises: CacheError if the run does not exist."""
    _check_exists(cache, run)
    ledger = load_ledger(cache, run)
    if ledger is None:
        raise CacheError(
            f"{cache}: run {run!r} was just removed by another process; choose another run"
        )
    return ledger


def _check_exists(cache: CacheStore, run: str) -> None:
    """Check that a cache has a run. Raises: CacheError if the run does not exist; ConfigError if
    `run` is not a valid name."""
    check_run_name(run)
    names = run_names(cache)
    if run not in names:
        raise CacheError(
            f"{cache}: contains no run {run!r}; its runs: {', '.join(map(repr, names)) or 'none'}"
        )


def _load_listed(cache: CacheStore, run: str) -> Ledger | DamagedRun | None:
    """Load the ledger of a listed run. Return None if the run has been removed."""
    try:
        return load_ledger(cache, run)
    except CacheError as error:
        return DamagedRun(run=run, problem=str(error))


def _summarize(ledger: Ledger, indices: set[str]) -> dict[str, Any]:
    """Return the fields of a RunSummary. `indices`: digests of the indexes that the cache has."""
    return {
        "run": ledger.run,
        "index": ledger.index,
        "index_exists": indices.issuperset(ledger.indices),
        "plan": ledger.digest,
        "stages": ledger.ends,
    }


def _list_chain(ledger: Ledger) -> Iterator[StageCommitment]:
    """Yield the stages of a ledger, in order."""
    before = ledger.stages[0]
    for stage, start, digest in zip(ledger.stages, ledger.starts, ledger.digests, strict=True):
        rows = [
            ("index", before.index, stage.index),
            *compare_blends(before.blend, stage.blend),
        ]
        yield StageCommitment(
            start=start,
            stop=stage.stop,
            end=stage.end,
            index=stage.index,
            plan=digest,
            changes=tuple({"what": what, "before": a, "after": b} for what, a, b in rows if a != b),
            drain=stage.drain,
        )
        before = stage
