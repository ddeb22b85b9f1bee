"""A run's ledger: which index and blend it stands on, and its stages. What was promised never changes.

The ledger is `runs/<name>.json` in the cache, written by `build` alone and replaced atomically. Its digest is a chain, one link a
stage, so that the digest of a run's past stays what it was when stages are appended.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from megablend.errors import CacheError, PlanError
from megablend.fs.atomic_write import flush_folder, list_committed, reading, replace_file, translate_os_errors
from megablend.system.failures import cause_of, remedy_of
from megablend.system.limited_json import missing_field, parse_json

_REMEDY = "restore it from a backup, or reset the run (`megablend runs reset CONFIG`) and build again"
VERSION = 1
PLAN_VERSION = 2
"""Of the plan that new runs get; it is part of their blend, as `plan`. Runs of release 0.1.0 have none: theirs is version 1, in
which the runs of neighbours that lanes walk do not end with a source's epoch, so that the next one begins early."""


def digest_of(value: object) -> str:
    """blake2b of canonical JSON, 16 bytes in hex."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What a run has promised."""

    run: str
    index: str
    """Digest of the generation of the index that the run reads."""
    blend: dict[str, Any]
    """All that decides the order besides the index and the stages; see `plan_run`."""
    ends: tuple[int, ...]
    """Sample number at which each stage ends; rising."""

    @property
    def digests(self) -> tuple[str, ...]:
        """The plan's digest after each stage."""
        link, chain = digest_of([VERSION, self.index, self.blend]), []
        for end in self.ends:
            link = digest_of([link, end])
            chain.append(link)
        return tuple(chain)

    @property
    def digest(self) -> str:
        """The plan's digest."""
        return self.digests[-1]

    @property
    def plan_version(self) -> int:
        """Of the plan; of an unblended split, which has no lanes, 1."""
        version: int = self.blend.get("plan", 1)
        return version

    def in_version(self, version: int) -> Ledger:
        """The ledger with another version of the plan; as it is, where the split is not blended."""
        if "lanes" not in self.blend:
            return self
        blend = {key: value for key, value in self.blend.items() if key != "plan"}
        return dataclasses.replace(self, blend=blend if version == 1 else blend | {"plan": version})

    def with_cycles_of(self, promised: Ledger) -> Ledger:
        """The ledger with the cycles that another has for the same sources: they are promised, however they are chosen now."""
        cycles = {source["name"]: source["cycles"] for source in promised.blend["sources"]}
        sources = [
            source | {"cycles": cycles.get(source["name"], source["cycles"])} for source in self.blend["sources"]
        ]
        return dataclasses.replace(self, blend=self.blend | {"sources": sources})

    def until(self, num_samples: int) -> Ledger:
        """The ledger as it was when it promised so many samples; as it is, where it never promised just these."""
        ends = self.ends[: self.ends.index(num_samples) + 1] if num_samples in self.ends else self.ends
        return dataclasses.replace(self, ends=ends)

    def extended(self, blend: dict[str, Any], num_samples: int) -> Ledger:
        """The ledger with a stage appended where more samples are asked for.

        Raises: PlanError where the blend is another, or fewer samples are asked for.
        """
        remedy = (
            f"give the new one another name (`run:`), put back what run {self.run!r} was built with, or let the next build plan "
            "it again (`megablend runs reset CONFIG`)"
        )
        if reason := difference(self.blend, blend):
            asked = dataclasses.replace(self, blend=blend).digest
            raise PlanError(
                f"run {self.run!r} is under way and its order is promised: {reason} (plan {self.digest} would become {asked}); "
                f"{remedy}"
            )
        if num_samples < self.ends[-1]:
            raise PlanError(
                f"run {self.run!r} is under way: it was promised {self.ends[-1]:,} samples, now {num_samples:,} are asked for; "
                f"a run can only be lengthened: {remedy}"
            )
        ends = self.ends if num_samples == self.ends[-1] else (*self.ends, num_samples)
        return Ledger(run=self.run, index=self.index, blend=self.blend, ends=ends)


def difference(old: dict[str, Any], new: dict[str, Any]) -> str | None:
    """The first thing in which two blends differ, in words; None where they are the same."""
    if old == new:
        return None
    for key in old.keys() | new.keys():
        if key != "sources" and old.get(key) != new.get(key):
            return f"{key} was {old.get(key)}, is {new.get(key)}"
    before, after = ({source["name"]: source for source in blend["sources"]} for blend in (old, new))
    for name in before.keys() - after.keys():
        return f"source {name!r} is gone"
    for name in after.keys() - before.keys():
        return f"source {name!r} is new"
    for name, source in before.items():
        for key, value in source.items():
            if after[name].get(key) != value:
                return f"{key} of source {name!r} was {value}, is {after[name].get(key)}"
    return "the sources are in another order"


def _fits(ledger: Ledger) -> bool:
    """Whether a ledger holds what its digest does not vouch for: fields of the right type, stages that rise."""
    strings, ends = (ledger.run, ledger.index), ledger.ends
    if not all(isinstance(text, str) for text in strings) or missing_field(ledger.blend, {"sources": list}) is not None:
        return False
    names = [missing_field(source, {"name": str}) for source in ledger.blend["sources"]]
    return names.count(None) == len(names) > 0 and ends[0] > 0 and all(a < b for a, b in pairwise(ends))


def ledger_path(cache: str, run: str) -> Path:
    """Where a run's ledger is."""
    return Path(cache) / "runs" / f"{run}.json"


def load_ledger(cache: str, run: str) -> Ledger | None:
    """The run's ledger, or None where the run was never built.

    Raises: CacheError where the file is damaged, or it or its plan is of a newer version.
    """
    path = ledger_path(cache, run)
    try:
        record = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CacheError(
            f"{path}: cannot read the run's ledger ({cause_of(error)}): {remedy_of(error.errno)}"
        ) from error
    except ValueError as error:
        raise CacheError(f"{path}: cannot read the run's ledger: {error}; {_REMEDY}") from None
    if not isinstance(record, dict) or record.get("version") != VERSION:
        found = record.get("version") if isinstance(record, dict) else record
        raise CacheError(f"{path}: found ledger version {found!r}, expected {VERSION}; use the megablend that wrote it")
    try:
        ledger = Ledger(
            run=record["run"], index=record["index"], blend=record["blend"], ends=tuple(int(e) for e in record["ends"])
        )
        whole = ledger.digests == tuple(record["digests"])
        whole = whole and _fits(ledger)
    except (KeyError, TypeError, ValueError, IndexError):
        whole = False
    if not whole:
        raise CacheError(f"{path}: the ledger does not match its own digest: it was edited or damaged; {_REMEDY}")
    if ledger.plan_version not in range(1, PLAN_VERSION + 1):
        raise CacheError(
            f"{path}: found plan version {ledger.plan_version!r}, expected {PLAN_VERSION} or an earlier one; use the megablend "
            "that wrote it"
        )
    return ledger


def save_ledger(cache: str, ledger: Ledger) -> None:
    """Replace the run's ledger atomically. Raises CacheError where it cannot be written."""
    record = {
        "version": VERSION,
        "run": ledger.run,
        "index": ledger.index,
        "ends": ledger.ends,
        "digests": ledger.digests,
        "blend": ledger.blend,
    }
    path = ledger_path(cache, ledger.run)
    with translate_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(record, indent=1).encode())
    flush_folder(path.parent)  # a promise outlives a power cut


def run_names(cache: str) -> list[str]:
    """Names of all runs, sorted."""
    folder = Path(cache) / "runs"
    with reading(folder):
        return [name.removesuffix(".json") for name in list_committed(folder) if name.endswith(".json")]


def list_runs(cache: str) -> list[Ledger]:
    """All runs' ledgers, by name. Raises CacheError as `load_ledger` does."""
    return [ledger for name in run_names(cache) if (ledger := load_ledger(cache, name)) is not None]
