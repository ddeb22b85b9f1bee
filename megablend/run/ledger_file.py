"""Ledgers of runs: records of the cache (`runs/<name>.json` in a folder), written only by `build`
and replaced atomically."""

from __future__ import annotations

from megablend.caches.base import RUNS, CacheStore, OvertakenError, Record
from megablend.caches.find import CacheLike, find_store
from megablend.errors import CacheError
from megablend.run.ledger import Ledger
from megablend.run.ledger_format import REMEDY, dump_ledger, open_seal, parse_ledger, seal_ledger
from megablend.system.failures import cause_of, remedy_of
from megablend.system.limited_json import parse_json


def load_ledger(cache: CacheLike, run: str) -> Ledger | None:
    """The run's ledger, or None where the run was never built.

    Raises: CacheError where the file cannot be read or is damaged, or where it or its plan has a
        newer version.
    """
    store = find_store(cache)
    record = _read(store, run)
    return None if record is None else _parse(store, run, record)


def count_skips(cache: CacheLike, run: str) -> int:
    """How many ranges the run's ledger says that it skips; 0 if there is no ledger, or it does not
    say. Raises: CacheError."""
    store = find_store(cache)
    record = _read(store, run)
    return 0 if record is None else _open(store, run, record)[1] or 0


def save_ledger(
    cache: CacheLike, ledger: Ledger, *, replaces: Ledger | None = None, skips: int | None = None
) -> None:
    """Replace the run's ledger atomically.

    Args:
        replaces: the ledger that was loaded before; None for a run that had none.
        skips: how many ranges the run skips; as the ledger says that is replaced if None.

    Raises: CacheError where it cannot be written; OvertakenError where another process has replaced
        it since, in a cache that cannot be locked.
    """
    store = find_store(cache)
    record = _read(store, ledger.run)
    if (
        record is not None
        and record.number >= 0
        and _parse(store, ledger.run, record) not in (replaces, ledger)
    ):
        raise OvertakenError(
            f"{store.describe_record(RUNS, ledger.run)}: another process changed run "
            f"{ledger.run!r} in the meantime; repeat the command"
        )
    if skips is None:
        skips = 0 if record is None else _open(store, ledger.run, record)[1] or 0
    store.write_record(
        RUNS,
        ledger.run,
        seal_ledger(dump_ledger(ledger.run, ledger.stages, ledger.request), skips),
        record,
    )


def run_names(cache: CacheLike) -> list[str]:
    """The names of all runs, sorted."""
    return find_store(cache).list_records(RUNS)


def list_runs(cache: CacheLike) -> list[Ledger]:
    """The ledgers of all runs, sorted by name. Raises CacheError as `load_ledger` does."""
    return [ledger for name in run_names(cache) if (ledger := load_ledger(cache, name)) is not None]


def _read(store: CacheStore, run: str) -> Record | None:
    try:
        return store.read_record(RUNS, run)
    except OSError as error:
        raise CacheError(
            f"{store.describe_record(RUNS, run)}: cannot read the run's ledger ({cause_of(error)}): "
            f"{remedy_of(error.errno)}"
        ) from error
    except ValueError as error:
        raise _unreadable(store, run, error) from None


def _parse(store: CacheStore, run: str, record: Record) -> Ledger:
    ledger = _parse_text(store, run, record)
    if ledger.run != run:  # it would be written, and its skips looked for, under the other name
        raise CacheError(
            f"{store.describe_record(RUNS, run)}: found the ledger of run {ledger.run!r}, expected "
            f"that of {run!r}; put it back where it was, and rename runs with `megablend runs "
            "rename`"
        )
    return ledger


def _open(store: CacheStore, run: str, record: Record) -> tuple[str, int | None]:
    """The ledger's text, and how many ranges the run skips. Raises: CacheError if it does not match
    its checksum."""
    try:
        return open_seal(record.data)
    except ValueError as error:
        raise CacheError(f"{store.describe_record(RUNS, run)}: {error}") from None


def _parse_text(store: CacheStore, run: str, record: Record) -> Ledger:
    text, skips = _open(store, run, record)
    try:
        parsed = parse_json(text)
    except ValueError as error:
        raise _unreadable(store, run, error) from None
    try:
        name, stages, digests, request = parse_ledger(parsed, is_sealed=skips is not None)
    except ValueError as error:
        raise CacheError(f"{store.describe_record(RUNS, run)}: {error}") from None
    return Ledger(run=name, stages=stages, request=request, stored_digests=digests)


def _unreadable(store: CacheStore, run: str, error: ValueError) -> CacheError:
    return CacheError(
        f"{store.describe_record(RUNS, run)}: cannot read the run's ledger: {error}; {REMEDY}"
    )
