"""check: check that all data files of a run exist and are as they were indexed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megablend.config import Config
from megablend.config.numbers import whole_number
from megablend.errors import (
    MISSING_REMEDY,
    CacheError,
    ConfigError,
    DataError,
    MissingFileError,
    PlanError,
    StateError,
)
from megablend.index.blocks.block_store import BlockStore
from megablend.index.build.build import Progress
from megablend.index.read.snapshot import Snapshot
from megablend.index.verify.check_files import FileChecker, check_each, check_files, files_of
from megablend.operations.results import Record
from megablend.operations.runs import open_run
from megablend.operations.session import ConfigLike, Session
from megablend.operations.source_specs import has_text
from megablend.operations.token_documents import warn_of_documents
from megablend.operations.unindexed import open_newest
from megablend.operations.warn import warn_of_epochs
from megablend.run.fitting_steps import unfit_step
from megablend.run.open_store import open_stores
from megablend.run.run import Run
from megablend.run.run_files import list_files
from megablend.run.skips import load_skips, skips_of
from megablend.run.state import State
from megablend.storage.base import Storage


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CheckResult(Record):
    """The result of checking data files."""

    index: str
    """Digest of the index that the files were compared with."""
    files: int
    """Number of files that were checked."""
    problems: tuple[str, ...]
    """A line for each file that is missing or differs from what was indexed."""
    older_problems: tuple[str, ...] = ()
    """A line for each missing or changed file that is only in earlier snapshots of the run, with
    the samples that read the file."""
    warnings: tuple[str, ...] = ()
    """A line for each property of the run that works, but is probably not intended."""
    uncommitted: str | None = None
    """The reason why loaders refuse the config, which was edited since the run was committed. The
    files are compared with what the run reads, not with the config. None if loaders accept the
    config, or there is no run."""
    unfit_steps: str | None = None
    """The reason why steps of the given size are incompatible with the run; None if they are
    compatible, or no size was given."""

    @property
    def has_problems(self) -> bool:
        """Whether something prevents training with this run and this config, these files and these
        steps."""
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
    """Check, in parallel, whether every file that a run may read exists with the size and times
    that the build recorded.

    If a file has been moved, copied or touched since then, 64 KiB of it are compared, and a warning
    is returned. (`verify(data=True)` compares all blocks of a file if the index has checksums.) If
    the run does not exist, the files of the newest index are checked, provided that they are the
    files that the config's paths match.

    Args:
        config: path of a YAML or JSON file, or the same as a dict.
        cache: cache folder, instead of the config's `cache`.
        state: a state from `state_dict()`. Files that are only in earlier snapshots are then
            checked only if samples from the state's position on read them, and their problems are
            in `problems`. Without a state, their problems are in `older_problems`.
        micro_batch_size, data_parallel_size: the step size of loaders. If given, the steps after
            the state's position (or after the start) are also checked: no step may span a change of
            length or masks, or skipped samples.
        progress: called as files are checked.
        storage: the storage that finds and reads files, instead of the config's storage.

    Raises: ConfigError, PlanError if config and index disagree; CacheError if no index has the
        config's files, the cache is damaged, or there is no run whose steps could be checked;
        StateError if `state` is not a valid state.
    """
    session = Session(config, cache=cache, storage=storage)
    checked_config = session.config
    ledger = session.ledger
    if ledger is not None:
        load_skips(session.cache, ledger)  # raises an error if their record is damaged
    digests = ledger.indices if ledger else (open_newest(session).digest,)
    parsed = None if state is None else State.from_dict(state)
    position = None if parsed is None else parsed.consumed_samples
    run, uncommitted = (None, None) if ledger is None else _open(session, parsed)
    if ledger is None and micro_batch_size is not None:
        # Raises an error unless the state names a plan: there are no steps to check
        run = open_run(checked_config, "train", parsed, storage=session.storage)
    store = open_stores(checked_config, digests, session.storage)
    withdrawn = checked_config.withdrawn if uncommitted is None else ()
    result = check_store(checked_config, store, withdrawn=withdrawn, progress=progress)
    result = replace(result, uncommitted=uncommitted)
    if micro_batch_size is not None and run is not None:
        step = whole_number("micro_batch_size", micro_batch_size, least=1)
        step *= whole_number("data_parallel_size", data_parallel_size, least=1)
        result = replace(result, unfit_steps=unfit_step(run, skips_of(run), position or 0, step))
    if run is None or len(digests) == 1:
        return result
    return _check_older(session, run, result, position, progress)


def _open(session: Session, state: State | None) -> tuple[Run, str | None]:
    """Open the run as loaders do. If loaders would refuse the config, open the run as it was
    committed.

    Returns: the run, and the reason why loaders refuse the config; None if they accept it, with or
        without the state.
    """
    try:
        return open_run(session.config, "train", storage=session.storage), None
    except (PlanError, CacheError) as error:
        reason = f"the config differs from the one that run {session.run!r} was built with, so loaders refuse it: {error}"
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
    """Complete a result with the problems of files that are only in older snapshots of the run, and
    with warnings about epochs that are not read to their end."""
    # For each file, by number: the first sample from which on the run no longer reads it
    stops = {
        file.number: file.stop
        for file in list_files(run)
        if file.stop is not None and file.is_needed(position or 0)
    }
    checker = FileChecker(run.store.snapshot, run.store.roots, session.storage)
    errors = check_each(checker, list(stops), progress=progress)
    warnings = (*result.warnings, *warn_of_epochs(run), *checker.warnings)
    result = replace(result, warnings=warnings)
    older = tuple(
        f"{error}; only samples before {stops[number]:,} need this file"
        for number, error in zip(stops, errors, strict=True)
        if error
    )
    files = result.files + len(stops)
    if position is None:
        return replace(result, files=files, older_problems=older)
    needed = (f"{line}, and this state is at an earlier sample: restore the file" for line in older)
    return replace(result, files=files, problems=(*result.problems, *needed))


def check_store(
    config: Config,
    store: BlockStore,
    *,
    withdrawn: Collection[str],
    progress: Callable[[Progress], None] | None = None,
) -> CheckResult:
    """Check the files of an opened index, or of the last index if a run reads several.

    Args:
        withdrawn: names of sources whose files are left out.

    Raises: CacheError.
    """
    names = [name for name in config.all_sources if name not in withdrawn]
    numbers = files_of(store.snapshot, names)
    checker = FileChecker(store.snapshot, store.roots, store.storage)
    errors = check_files(checker, numbers, progress=progress)
    return CheckResult(
        index=store.snapshot.digest,
        files=len(numbers),
        problems=tuple(str(error) + _remedy_of(error) for error in errors),
        warnings=(
            *warn_of_documents(config, store.snapshot),
            *_warn_of_tokenizer(config, store.snapshot),
            *checker.warnings,
        ),
    )


def _warn_of_tokenizer(config: Config, snapshot: Snapshot) -> Iterator[str]:
    """Warn if sources of text were not tokenised by the config's tokenizer, or if that tokenizer
    cannot be read. Loaders read the existing tokens, but `build` refuses the config."""
    if not has_text(config) or config.tokenizer is None:
        return
    from megablend.text.token_names import read_tokenizer_digest
    from megablend.text.tokenizer import load_tokenizer

    files = snapshot.file_names()
    configured = config.all_sources
    for entry in snapshot.sources:
        source = configured.get(entry.name)
        if source is None or source.text is None or not entry.files:
            continue
        digest = read_tokenizer_digest(files[entry.files[0]])
        try:
            tokenizer = load_tokenizer(config.tokenizer)
        except ConfigError as error:
            yield str(error)
            return
        if digest != tokenizer.digest:
            yield (
                f"source {entry.name!r} was tokenised with another tokenizer (digest {digest}) than {tokenizer.path} (digest "
                f"{tokenizer.digest}); restore the earlier tokenizer, or give the run another name (`run:`)"
            )


def _remedy_of(error: DataError) -> str:
    """Return the remedy to append to the error of a missing file; other errors have their own."""
    return f"; {MISSING_REMEDY}" if isinstance(error, MissingFileError) else ""
