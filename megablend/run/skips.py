"""Ranges of a run's samples that training skips, for instance after a loss spike.

The ranges are applied by samplers, not by the plan: sample numbers, digests and lengths do not
change, and a state is still one sample number. The ranges are stored as a record of the cache
(`runs/skips/<run>.json` in a folder), each with the digest of the plan that it was made for; a
range has no effect on other plans.

The record has a checksum, and the run's ledger states the number of ranges, so that a lost range is
noticed. A new range is first added to the record and then counted; ranges are removed in the
opposite order. After a crash in between, more ranges are skipped than are counted, never fewer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megablend.caches.base import SKIPS, CacheStore, OvertakenError, Record
from megablend.errors import CacheError
from megablend.run.ledger import Ledger
from megablend.run.ledger_file import count_skips, load_ledger, overtaken, save_ledger
from megablend.run.run import Run
from megablend.system.atomic_write import reading
from megablend.system.digest import digest_json
from megablend.system.limited_json import parse_json

VERSION = 1
"""Version of the record."""
_RESTORE = "restore it from a backup, or clear the run's skips (`megablend skip CONFIG --clear`)"
_Entry = tuple[int, int, str]
"""A range [start, stop), and the digest of the plan that it was made for."""


@dataclass(frozen=True, slots=True)
class Skips:
    """Samples that are not trained on."""

    ranges: tuple[tuple[int, int], ...] = ()
    """Ranges [start, stop), ascending; no two touch or overlap."""

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int]]) -> Skips:
        """Return the skips of ranges [start, stop) in any order. Ranges that touch or overlap are
        merged."""
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(ranges):
            if merged and start <= merged[-1][1]:
                before_start, before_stop = merged.pop()
                merged.append((before_start, max(stop, before_stop)))
            else:
                merged.append((start, stop))
        return cls(tuple(merged))

    def add(self, start: int, stop: int) -> Skips:
        """Return a copy that also skips the range [start, stop)."""
        return Skips.of([*self.ranges, (start, stop)])

    def next_sample(self, position: int) -> int:
        """Return the first sample at or after `position` that is not skipped."""
        for start, stop in self.ranges:
            if start <= position < stop:
                return stop
        return position

    def position(self, trained: int) -> int:
        """Return the sample that comes next after `trained` samples were trained on."""
        for start, stop in self.ranges:
            if trained >= start:
                trained += stop - start
        return trained

    def count_trained(self, position: int) -> int:
        """Count the samples before `position` that are not skipped: the inverse of `position()`."""
        num_skipped = sum(min(stop, position) - min(start, position) for start, stop in self.ranges)
        return position - num_skipped

    def containing(self, position: int) -> tuple[int, int] | None:
        """Return the skipped range [start, stop) that contains `position` but does not start there.
        If there is none, return None: a run can continue at `position`."""
        for start, stop in self.ranges:
            if start < position < stop:
                return start, stop
        return None


def load_skips(cache: CacheStore, ledger: Ledger) -> Skips:
    """Load the skips that were made for a ledger's plan, or for an earlier plan that it extends.

    Raises: CacheError if the record is damaged, or has fewer ranges than the run's ledger says;
        OvertakenError if the skips are gone because another process removed or renamed the run.
    """
    counted = count_skips(cache, ledger.run) if ledger.skips is None else ledger.skips
    entries = _read(cache, ledger.run)[0]
    if len(entries) < counted:
        # Another process may have removed them just now, perhaps together with the run
        present = load_ledger(cache, ledger.run)
        if present is None:
            raise overtaken(cache, ledger.run)
        counted = present.skips or 0
    if len(entries) < counted:
        raise CacheError(
            f"{cache.describe_record(SKIPS, ledger.run)}: found {len(entries)} ranges of skipped samples, expected "
            f"{counted}, the number in the run's ledger; {_RESTORE}"
        )
    stops = {link.digest: link.stop for link in ledger.links} if entries else {}
    return Skips.of((start, stop) for start, stop, plan in entries if stop <= stops.get(plan, 0))


def skips_of(run: Run) -> Skips:
    """Return the samples that loaders of a run skip. Raises: see `load_skips`."""
    return load_skips(run.runtime.cache, run.ledger) if run.split == "train" else Skips()


def lacks_checksum(cache: CacheStore, run: str) -> bool:
    """Return whether a run's record of skipped samples was written by a release without checksums.
    Raises: CacheError if the record is damaged."""
    record = _read(cache, run)[1]
    return record is not None and "checksum" not in parse_json(record.data)


def save_skip(cache: CacheStore, ledger: Ledger, start: int, stop: int) -> None:
    """Add a range to the skips of a run. Raises: CacheError; OvertakenError if `ledger` is no
    longer the run's ledger."""
    present = _load_same(cache, ledger)  # before a range is stored that nobody counts
    plan = next(link.digest for link in ledger.links if stop <= link.stop)
    entries, record = _read(cache, ledger.run)
    # A repeated command, or each rank of a job, may have stored the same range already
    if (start, stop, plan) not in entries:
        entries = [*entries, (start, stop, plan)]
    _write(cache, ledger.run, entries, record)
    try:
        save_ledger(cache, ledger, replaces=present, skips=len(entries))
    except OvertakenError:
        # In a cache without locks, another process may have counted this range with its own
        stored = _read(cache, ledger.run)[0]
        if (start, stop, plan) not in stored or len(stored) != _load_same(cache, ledger).skips:
            raise


def copy_skips(cache: CacheStore, ledger: Ledger, new: str) -> int:
    """Copy the skips of a run's plan to the run named `new`; they replace those of an earlier run
    of that name.

    Returns: the number of ranges. Raises: CacheError; OvertakenError if another process has removed
        skips since `ledger` was loaded.
    """
    load_skips(cache, ledger)  # raises an error if some of them are lost
    stored = _read(cache, ledger.run)[0]
    if len(stored) < (ledger.skips or 0):  # not lost: the ledger changed since it was loaded
        raise overtaken(cache, ledger.run)
    entries = [entry for entry in stored if entry[2] in ledger.digests]
    record = cache.read_record(SKIPS, new)
    if entries:
        _write(cache, new, entries, record)
    elif record is not None:
        cache.remove_record(SKIPS, new)
    return len(entries)


def mark_moved(cache: CacheStore, run: str, *, moved: bool = True) -> None:
    """Mark the skips of a run that is being renamed, just before its ledger is removed: if they
    outlive it, `forget_moved` removes them. A run that is reset keeps its skips (`moved=False`),
    even if a rename of it was begun before. Raises: CacheError if the record is damaged."""
    entries, record = _read(cache, run)
    if record is not None and _is_moved(record) != moved:
        _write(cache, run, entries, record, moved=moved)


def forget_moved(cache: CacheStore, run: str) -> None:
    """Remove the skips that a killed rename has left behind, before another run gets this name.
    Raises: CacheError if the record is damaged."""
    record = _read(cache, run)[1]
    if record is not None and _is_moved(record):
        cache.remove_record(SKIPS, run, record)


def _is_moved(record: Record) -> bool:
    return bool(parse_json(record.data).get("moved"))


def forget_skips(cache: CacheStore, run: str) -> None:
    """Remove the skips of a run that is being removed, for all its plans. Raises: CacheError if
    they cannot be removed."""
    if run in cache.list_records(SKIPS):
        cache.remove_record(SKIPS, run)


def remove_skips(cache: CacheStore, ledger: Ledger) -> None:
    """Remove all skipped ranges of a run's plan, even if their record is damaged. Raises: see
    `save_skip`."""
    present = _load_same(cache, ledger)
    try:
        entries, record = _read(cache, ledger.run)
    except CacheError:
        entries = []
        record = None
    kept = [entry for entry in entries if entry[2] not in ledger.digests]
    save_ledger(cache, ledger, replaces=present, skips=len(kept))
    if kept:
        _write(cache, ledger.run, kept, record)
    elif record is not None:
        cache.remove_record(SKIPS, ledger.run, record)
    else:
        forget_skips(cache, ledger.run)


def _load_same(cache: CacheStore, ledger: Ledger) -> Ledger:
    """Load a run's current ledger. Raises: OvertakenError if it differs from `ledger`."""
    present = load_ledger(cache, ledger.run)
    if present != ledger:
        raise overtaken(cache, ledger.run)
    return present


def _read(cache: CacheStore, run: str) -> tuple[list[_Entry], Record | None]:
    """Read the ranges of a run, each with the plan that it was made for, and the record that
    contains them. Return an empty list and None if there is no record. Raises: CacheError if the
    record is damaged."""
    location = cache.describe_record(SKIPS, run)
    try:
        with reading(location):
            stored = cache.read_record(SKIPS, run)
        if stored is None:
            return [], None
        record = parse_json(stored.data)
    except ValueError as error:
        raise CacheError(
            f"{location}: cannot read the run's skipped samples: {error}; {_RESTORE}"
        ) from None
    if not isinstance(record, dict) or record.get("version") != VERSION:
        raise CacheError(
            f"{location}: not a list of skipped samples in format version {VERSION}; use the version of megablend that wrote it, "
            f"or {_RESTORE}"
        )
    damaged = CacheError(f"{location}: damaged list of skipped samples; {_RESTORE}")
    try:
        entries = [(int(start), int(stop), str(plan)) for start, stop, plan in record["skips"]]
    except (KeyError, OverflowError, TypeError, ValueError):
        raise damaged from None
    checksum = _checksum(run, entries)
    are_ranges = all(0 <= start < stop < 1 << 63 for start, stop, _ in entries)
    if not are_ranges or record.get("checksum", checksum) != checksum:
        raise damaged
    # Ledgers count ranges only since records have checksums
    if "checksum" not in record and count_skips(cache, run):
        raise CacheError(
            f"{location}: list of skipped samples without a checksum: it is damaged, or an earlier release has written "
            f"it since; {_RESTORE} and skip them again with this release"
        )
    return entries, stored


def _write(
    cache: CacheStore,
    run: str,
    entries: Sequence[_Entry],
    replaced: Record | None,
    *,
    moved: bool = False,
) -> None:
    """Write the ranges of a run instead of the record `replaced`, if any. Raises: see
    `CacheStore.write_record`.

    Args:
        moved: see `mark_moved`.
    """
    record = {"version": VERSION, "skips": list(entries), "checksum": _checksum(run, entries)}
    if moved:
        record["moved"] = True
    cache.write_record(SKIPS, run, json.dumps(record, indent=1), replaced)


def _checksum(run: str, entries: Sequence[_Entry]) -> str:
    return digest_json([run, [list(entry) for entry in entries]])
