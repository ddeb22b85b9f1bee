"""check: do all data files of a run exist, as they were indexed?"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from megablend.config import Config
from megablend.config.numbers import whole_number
from megablend.errors import (
    MISSING_REMEDY,
    CacheError,
    DataError,
    MissingFileError,
    PlanError,
    StateError,
)
from megablend.index.blocks.block_store import BlockStore
from megablend.index.build.build import Progress
from megablend.index.verify.check_files import FileChecker, check_each, check_files, files_of
from megablend.operations.results import Record
from megablend.operations.runs import open_run
from megablend.operations.session import ConfigLike, Session, skips_of
from megablend.operations.token_documents import warn_of_token_documents
from megablend.operations.unindexed import open_newest
from megablend.operations.warn import warn_of_epochs
from megablend.run.fitting_steps import unfit_step
from megablend.run.open_store import open_stores
from megablend.run.run import Run
from megablend.run.run_files import list_files
from megablend.run.skips import load_skips
from megablend.run.state import State
from megablend.storage.base import Storage


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CheckResult(Record):
    """What a check of data files found."""

    OPTIONAL: ClassVar[frozenset[str]] = frozenset(
        {"older_problems", "warnings", "uncommitted", "unfit_steps"}
    )
    index: str
    """Digest of the index that the files were compared with."""
    files: int
    """Number of files that were checked."""
    problems: tuple[str, ...]
    """A line for each file that is missing or differs from what was indexed."""
    older_problems: tuple[str, ...] = ()
    """The same for files that later stages with new data no longer have; each line says which
    samples read them."""
    warnings: tuple[str, ...] = ()
    """What of the run is readable, but hardly meant."""
    uncommitted: str | None = None
    """Why loaders refuse the config: it was edited, and the run is committed to what it was. None
    if they do not, or there is no run; files are compared with what the run reads."""
    unfit_steps: str | None = None
    """Why the steps of the loaders that were asked about do not fit the run; None if they do, or
    were not asked about."""

    @property
    def has_problems(self) -> bool:
        """Whether training cannot go on as it is."""
        return bool(self.problems or self.uncommitted or self.unfit_steps)


def check(
    config: ConfigLike,
    *,
    cache: str | None = None,
    state: Mapping[str, Any] | None = None,
    micro_batch_size: int | None = None,
    data_parallel_size: int = 1,
    progress: Callable[[Progress], None] | None = None,
    storage: Storage | None = None,
) -> CheckResult:
    """Check every file that a run may read, in parallel: does it exist, with the size and times
    that the build saw?

    If a file was moved, copied or touched since, 64 KiB of it are compared; `verify(data=True)`
    compares all of its blocks if the index has checksums of them. Without a run of that name, the
    files of the newest index are checked, if they are those that the config's paths match.

    Args:
        config: path of a YAML or JSON file, or the same as a dict.
        cache: cache folder, in place of the config's `cache`.
        state: a checkpoint's, from `state_dict()`: what is missing of files that only earlier
            samples read is then left out, and of those that later ones read it is a problem.
            Without it such files are in `older_problems`.
        micro_batch_size, data_parallel_size: of loaders, whose steps from the state's position on
            (or the first sample) are compared with changes of length, masks and skipped samples.
        progress: called as files are checked.
        storage: where files are looked up and read, in place of the one that the config asks for.

    Raises: ConfigError, PlanError if config and index disagree; CacheError if no index is of
        its files, or the cache is damaged; StateError if `state` is not a state.
    """
    session = Session(config, cache=cache, storage=storage)
    checked = session.config
    ledger = session.ledger
    if ledger is not None:
        load_skips(session.cache, ledger)  # a damaged record is a problem of the run
    digests = ledger.indices if ledger else (open_newest(session).digest,)
    taken = None if state is None else State.from_dict(state)
    position = None if taken is None else taken.consumed_samples
    run, uncommitted = (None, None) if ledger is None else _open(session, taken)
    store = open_stores(checked, digests, session.storage)
    gone = checked.withdrawn if uncommitted is None else ()
    result = check_store(checked, store, withdrawn=gone, progress=progress)
    result = replace(result, uncommitted=uncommitted)
    if micro_batch_size is not None and run is not None:
        step = whole_number("micro_batch_size", micro_batch_size, least=1)
        step *= whole_number("data_parallel_size", data_parallel_size, least=1)
        result = replace(result, unfit_steps=unfit_step(run, skips_of(run), position or 0, step))
    if run is None or len(digests) == 1:
        return result
    return _check_older(session, run, result, position, progress)


def _open(session: Session, state: State | None) -> tuple[Run, str | None]:
    """The run as loaders open it; if they refuse the config, as it was committed, and why, unless
    the config is that of the state."""
    try:
        return open_run(session.config, "train", storage=session.storage), None
    except (PlanError, CacheError) as error:
        says = f"the config is not what run {session.run!r} is committed to, and loaders refuse it"
        reason = f"{says}: {error}"
    if state is not None:
        with contextlib.suppress(PlanError, CacheError, StateError):
            open_run(session.config, "train", state, storage=session.storage)
            return session.open(), None
    return session.open(), reason


def _check_older(
    session: Session,
    run: Run,
    result: CheckResult,
    position: int | None,
    progress: Callable[[Progress], None] | None,
) -> CheckResult:
    """The result, with what is wrong with files that only older snapshots of the run have, and what
    of epochs it leaves out."""
    result = replace(result, warnings=(*result.warnings, *warn_of_epochs(run)))
    stops = {
        file.number: file.stop
        for file in list_files(run)
        if file.stop is not None and file.is_needed(position or 0)
    }
    checker = FileChecker(run.store.snapshot, run.store.roots, session.storage)
    found = list(zip(stops, check_each(checker, list(stops), progress=progress), strict=True))
    older = tuple(
        f"{error}; only samples before {stops[number]:,} read it"
        for number, error in found
        if error
    )
    files = result.files + len(stops)
    if position is None:
        return replace(result, files=files, older_problems=older)
    needed = (f"{line}, and this state is before that: restore the file" for line in older)
    return replace(result, files=files, problems=(*result.problems, *needed))


def check_store(
    config: Config,
    store: BlockStore,
    *,
    withdrawn: Collection[str],
    progress: Callable[[Progress], None] | None = None,
) -> CheckResult:
    """Check the files of an opened index; of several, those of the last one.

    Args:
        withdrawn: names of sources, whose files are left out.

    Raises: CacheError.
    """
    names = [name for name in config.all_sources if name not in withdrawn]
    numbers = files_of(store.snapshot, names)
    found = check_files(
        FileChecker(store.snapshot, store.roots, store.storage), numbers, progress=progress
    )
    return CheckResult(
        index=store.snapshot.digest,
        files=len(numbers),
        problems=tuple(str(error) + _remedy_of(error) for error in found),
        warnings=tuple(warn_of_token_documents(config, store.snapshot)),
    )


def _remedy_of(error: DataError) -> str:
    """What to do about a missing file, after the problem; other errors say it themselves."""
    return f"; {MISSING_REMEDY}" if isinstance(error, MissingFileError) else ""
