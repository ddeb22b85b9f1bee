"""Ranges of a run's samples that training skips, for instance after a loss spike.

Samplers apply them, not the plan: sample numbers, digests and lengths do not change, and a state is still one sample number.
They are stored as a record of the cache (`runs/skips/<run>.json` in a folder), each with the digest of the plan that it was made
for; it has no effect on other plans.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from megablend.caches.base import SKIPS, CacheStore, Record
from megablend.caches.find import CacheLike, find_store
from megablend.errors import CacheError
from megablend.fs.atomic_write import reading
from megablend.plan.ledger import Ledger
from megablend.system.limited_json import parse_json

VERSION = 1
_RESTORE = "restore it from a backup, or remove it to skip none"


@dataclass(frozen=True, slots=True)
class Skips:
    """Ranges [start, stop) of samples that are not trained on, in ascending order; no two touch or overlap."""

    ranges: tuple[tuple[int, int], ...] = ()

    def add(self, start: int, stop: int) -> Skips:
        """These ranges and another one; ranges that touch or overlap are merged."""
        merged: list[tuple[int, int]] = []
        for first, last in sorted([*self.ranges, (start, stop)]):
            if merged and first <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(last, merged[-1][1])
            else:
                merged.append((first, last))
        return Skips(tuple(merged))

    def next_sample(self, position: int) -> int:
        """The first sample from `position` on that is not skipped."""
        if not self.ranges:  # called for each batch
            return position
        return next((stop for start, stop in self.ranges if start <= position < stop), position)

    def position(self, trained: int) -> int:
        """The sample number that follows after `trained` samples were trained on."""
        for start, stop in self.ranges:
            if trained >= start:
                trained += stop - start
        return trained

    def count_trained(self, position: int) -> int:
        """How many samples before `position` are not skipped: the inverse of `position()`."""
        return position - sum(min(stop, position) - min(start, position) for start, stop in self.ranges)

    def containing(self, position: int) -> tuple[int, int] | None:
        """The range with start < position < stop, or None."""
        return next((each for each in self.ranges if each[0] < position < each[1]), None)

    def cutting(self, start: int, stop: int) -> tuple[int, int] | None:
        """The first range that begins inside samples [start, stop), after `start`; or None."""
        if not self.ranges:
            return None
        return next((each for each in self.ranges if start < each[0] < stop), None)


def load_skips(cache: CacheLike, ledger: Ledger) -> Skips:
    """The skips made for a ledger's plan or for one that it extends. Raises CacheError where the file is damaged."""
    skips = Skips()
    for start, stop, plan in _read(find_store(cache), ledger.run)[0]:
        if any(plan == link.digest and stop <= link.stop for link in ledger.links):
            skips = skips.add(start, stop)
    return skips


def save_skip(cache: CacheLike, ledger: Ledger, start: int, stop: int) -> None:
    """Add a range to the skips of a run. Raises CacheError."""
    plan = next(link.digest for link in ledger.links if stop <= link.stop)
    store = find_store(cache)
    skips, record = _read(store, ledger.run)
    _write(store, ledger.run, [*skips, (start, stop, plan)], record)


def copy_skips(cache: CacheLike, ledger: Ledger, new: str) -> None:
    """Give another run name the skips of a run's plan, in place of what an earlier run of that name left. Raises CacheError."""
    store = find_store(cache)
    skips = [each for each in _read(store, ledger.run)[0] if each[2] in ledger.digests]
    _write_or_remove(store, new, skips, store.read_record(SKIPS, new))


def forget_skips(cache: CacheLike, run: str) -> None:
    """Remove the skips of a run that is removed. Raises CacheError."""
    store = find_store(cache)
    if run in store.list_records(SKIPS):
        store.remove_record(SKIPS, run)


def remove_skips(cache: CacheLike, ledger: Ledger) -> None:
    """Remove all skipped ranges of a run's plan. Raises CacheError."""
    store = find_store(cache)
    skips, record = _read(store, ledger.run)
    _write_or_remove(store, ledger.run, [each for each in skips if each[2] not in ledger.digests], record)


def _read(store: CacheStore, run: str) -> tuple[list[tuple[int, int, str]], Record | None]:
    """The ranges, each with the plan that it was made for, and the record that they were read from."""
    place = store.describe_record(SKIPS, run)
    try:
        with reading(place):
            found = store.read_record(SKIPS, run)
        if found is None:
            return [], None
        record = parse_json(found.data)
    except ValueError as error:
        raise CacheError(f"{place}: cannot read the run's skipped samples: {error}; {_RESTORE}") from None
    if not isinstance(record, dict) or record.get("version") != VERSION:
        raise CacheError(
            f"{place}: not a list of skipped samples of version {VERSION}; use the version of megablend that wrote it"
        )
    try:
        skips = [(int(start), int(stop), str(plan)) for start, stop, plan in record["skips"]]
    except (KeyError, OverflowError, TypeError, ValueError):
        skips = [(1, 0, "")]
    if any(not 0 <= start < stop < 1 << 63 for start, stop, _ in skips):
        raise CacheError(f"{place}: damaged list of skipped samples; {_RESTORE}")
    return skips, found


def _write(store: CacheStore, run: str, skips: Sequence[tuple[int, int, str]], after: Record | None) -> None:
    store.write_record(SKIPS, run, json.dumps({"version": VERSION, "skips": list(skips)}, indent=1), after)


def _write_or_remove(store: CacheStore, run: str, skips: Sequence[tuple[int, int, str]], after: Record | None) -> None:
    """Write the ranges; without any, the record is removed."""
    if skips:
        _write(store, run, skips, after)
    elif after is not None:
        store.remove_record(SKIPS, run)
