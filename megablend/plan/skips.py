"""Ranges of a run's samples that training skips, for instance after a loss spike.

Samplers apply them, not the plan: sample numbers, digests and lengths do not change, and a state is still one sample number.
They are stored in `runs/skips/<run>.json` in the cache, each with the digest of the plan that it was made for; it has no effect
on other plans.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megablend.errors import CacheError
from megablend.fs.atomic_write import flush_folder, reading, replace_file, translate_os_errors
from megablend.plan.ledger import Ledger
from megablend.system.limited_json import parse_json

VERSION = 1


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
        return next((each for each in self.ranges if start < each[0] < stop), None)


def skips_path(cache: str | Path, run: str) -> Path:
    """The path of a run's skipped ranges."""
    return Path(cache) / "runs" / "skips" / f"{run}.json"


def load_skips(cache: str | Path, ledger: Ledger) -> Skips:
    """The skips made for a ledger's plan or for one that it extends. Raises CacheError where the file is damaged."""
    skips = Skips()
    for start, stop, plan in _read(skips_path(cache, ledger.run)):
        if any(plan == link.digest and stop <= link.stop for link in ledger.links):
            skips = skips.add(start, stop)
    return skips


def save_skip(cache: str | Path, ledger: Ledger, start: int, stop: int) -> None:
    """Add a range to the skips of a run. Raises CacheError."""
    path = skips_path(cache, ledger.run)
    plan = next(link.digest for link in ledger.links if stop <= link.stop)
    _write(path, [*_read(path), (start, stop, plan)])


def rename_skips(cache: str | Path, run: str, new: str) -> None:
    """Move a run's skips to the run's new name. Raises CacheError."""
    if (skips := _read(skips_path(cache, run))) and not skips_path(cache, new).exists():
        _write(skips_path(cache, new), skips)
    forget_skips(cache, run)


def forget_skips(cache: str | Path, run: str) -> None:
    """Remove the skips of a run that is removed. Raises CacheError."""
    path = skips_path(cache, run)
    with translate_os_errors(path):
        if path.exists():
            path.unlink()


def remove_skips(cache: str | Path, ledger: Ledger) -> None:
    """Remove all skipped ranges of a run's plan. Raises CacheError."""
    path = skips_path(cache, ledger.run)
    _write(path, [each for each in _read(path) if each[2] not in ledger.digests])


def _read(path: Path) -> list[tuple[int, int, str]]:
    try:
        with reading(path, apart_from=(FileNotFoundError,)):
            record = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise CacheError(f"{path}: cannot read the run's skipped samples: {error}; restore it from a backup") from None
    if not isinstance(record, dict) or record.get("version") != VERSION:
        raise CacheError(
            f"{path}: not a list of skipped samples of version {VERSION}; use the version of megablend that wrote it"
        )
    try:
        skips = [(int(start), int(stop), str(plan)) for start, stop, plan in record["skips"]]
    except (KeyError, TypeError, ValueError):
        skips = [(1, 0, "")]
    if any(not 0 <= start < stop for start, stop, _ in skips):
        raise CacheError(
            f"{path}: damaged list of skipped samples; restore it from a backup, or remove it to skip none"
        )
    return skips


def _write(path: Path, skips: Sequence[tuple[int, int, str]]) -> None:
    with translate_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps({"version": VERSION, "skips": list(skips)}, indent=1).encode())
    flush_folder(path.parent)
