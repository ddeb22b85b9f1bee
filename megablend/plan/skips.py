"""Ranges of a run's samples that training skips, such as after a loss spike.

They belong to the samplers, not to the plan: numbers of samples, digests and lengths stay what they are, and a state is one
sample number. They are `runs/skips/<run>.json` in the cache; each names the plan for which it was made, and is of no effect in
another.
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
    """Ranges [start, stop) of samples that are not trained on; ascending, and not next to each other."""

    ranges: tuple[tuple[int, int], ...] = ()

    def add(self, start: int, stop: int) -> Skips:
        """These and another range, joined where they touch."""
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
        """The sample number that comes after so many samples were trained on."""
        for start, stop in self.ranges:
            if trained >= start:
                trained += stop - start
        return trained

    def count_trained(self, position: int) -> int:
        """How many of the samples before a sample number are not skipped: the inverse of `position`."""
        return position - sum(min(stop, position) - min(start, position) for start, stop in self.ranges)

    def containing(self, position: int) -> tuple[int, int] | None:
        """The range that a position is inside of: behind its start, and before its end."""
        return next((each for each in self.ranges if each[0] < position < each[1]), None)

    def cutting(self, start: int, stop: int) -> tuple[int, int] | None:
        """The first range that begins inside of samples [start, stop)."""
        return next((each for each in self.ranges if start < each[0] < stop), None)


def skips_path(cache: str | Path, run: str) -> Path:
    """Where a run's skips are."""
    return Path(cache) / "runs" / "skips" / f"{run}.json"


def load_skips(cache: str | Path, ledger: Ledger) -> Skips:
    """The skips that were made for a ledger's plan, or the one that it continues. Raises CacheError where the file is damaged."""
    skips = Skips()
    for start, stop, plan in _read(skips_path(cache, ledger.run)):
        if plan in ledger.digests:
            skips = skips.add(start, stop)
    return skips


def save_skip(cache: str | Path, ledger: Ledger, start: int, stop: int) -> None:
    """Add a range to those of a run. Raises CacheError."""
    path = skips_path(cache, ledger.run)
    plan = next(digest for end, digest in ledger.links if stop <= end)
    _write(path, [*_read(path), (start, stop, plan)])


def rename_skips(cache: str | Path, run: str, new: str) -> None:
    """Move a run's skips along with it. Raises CacheError."""
    if (skips := _read(skips_path(cache, run))) and not skips_path(cache, new).exists():
        _write(skips_path(cache, new), skips)
    forget_skips(cache, run)


def forget_skips(cache: str | Path, run: str) -> None:
    """Remove a run's skips with it. Raises CacheError."""
    path = skips_path(cache, run)
    with translate_os_errors(path):
        path.unlink(missing_ok=True)


def remove_skips(cache: str | Path, ledger: Ledger) -> None:
    """Remove all ranges of a run's plan. Raises CacheError."""
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
        raise CacheError(f"{path}: not skipped samples of version {VERSION}; use the megablend that wrote it")
    try:
        found = [(int(start), int(stop), str(plan)) for start, stop, plan in record["skips"]]
    except (KeyError, TypeError, ValueError):
        found = [(1, 0, "")]
    if any(not 0 <= start < stop for start, stop, _ in found):
        raise CacheError(
            f"{path}: damaged list of skipped samples; restore it from a backup, or remove it to skip none"
        )
    return found


def _write(path: Path, skips: Sequence[tuple[int, int, str]]) -> None:
    with translate_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps({"version": VERSION, "skips": list(skips)}, indent=1).encode())
    flush_folder(path.parent)
