"""Load and save ledgers. A ledger is a record of the cache (`runs/<name>.json` in a folder), which
is replaced atomically. This module parses the text of records; `ledger_format` makes it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from types import NoneType
from typing import Any

from megablend.blend.allocate import MAX_CYCLES_PER_RUN
from megablend.blend.schedule import parse_schedule
from megablend.caches.base import RUNS, CacheStore, OvertakenError, Record
from megablend.caches.find import CacheLike, find_store
from megablend.errors import CacheError
from megablend.order.registry import current_name
from megablend.run.ledger import Ledger
from megablend.run.ledger_format import (
    LANES,
    NEWEST_VERSION,
    PLAN_VERSION,
    REMEDY,
    VERSION,
    dump_ledger,
    open_seal,
    seal_ledger,
)
from megablend.run.stage import SETTINGS, Blend, SourceShare, Stage
from megablend.system.failures import cache_remedy_of, cause_of
from megablend.system.limited_json import fits, is_count, parse_json

_SHARE = re.compile(r"[0-9]+(/[1-9][0-9]*)?")


def _is_share(value: object) -> bool:
    """Return whether a value is a valid share: Fraction alone would accept 1e999999999 and expand
    its digits."""
    return isinstance(value, str) and _SHARE.fullmatch(value) is not None


def _is_cycles(value: object) -> bool:
    return is_count(value) and value in range(1, MAX_CYCLES_PER_RUN + 1)


_SOURCE = {"name": str, "append_eod": (is_count, NoneType)}
_ONE_PASS = {
    "split": str,
    "sequence_length": int,
    "add_extra_token_to_sequence": bool,
    "sources": [_SOURCE],
}
"""Keys of a blend whose split is one pass over its sources, with their types."""
_BLENDED = {
    **_ONE_PASS,
    "sources": [_SOURCE | {"share": _is_share, "cycles": _is_cycles}],
    "interleaving": str,
    "order": str,
    "plan": int,
    "seed": int,
    "lanes": int,
    "cycle": int,
}
"""Keys of a blend whose sources have shares, with their types."""
_KEYS = {"plan_version": "plan", "shuffle_window": "cycle"}
"""The names that fields of `Blend` have in records, if they differ."""
_SAME_BLEND = {"run": str, "index": str, "ends": [is_count], "digests": list, "blend": dict}
"""Keys of a ledger whose stages have the same index and blend."""
_CHANGES = {"run": str, "sources": list, "stages": [dict]}
"""Keys of a ledger whose stages list what they change."""
_STAGE = SETTINGS | {
    "end": is_count,
    "digest": str,
    "index": str,
    "num_sources": is_count,
    "cut": (is_count, NoneType),
    "drain": (is_count, NoneType),
    "whole_epochs": bool,
    "of": is_count,
    "shares": [[is_count]],
}
"""Keys of a stage that lists its changes, together with what it keeps of the previous one."""
_DEFAULTS: dict[str, Any] = {
    "cut": None,
    "drain": None,
    "whole_epochs": False,
    "of": 1,
    "shares": [],
}
"""Values of the keys that a stage does not take over from the previous one."""
_UNREADABLE = "cannot read the run's ledger: {}; " + REMEDY


def load_ledger(cache: CacheLike, run: str) -> Ledger | None:
    """Return the run's ledger, or None if the run was never built.

    Raises: CacheError if the file cannot be read or is damaged, or if it or its plan has a
        newer version.
    """
    return read_ledger(find_store(cache), run)[1]


def count_skips(store: CacheStore, run: str) -> int:
    """Return the number of ranges that the run skips according to its ledger; 0 if there is no
    ledger, or it does not record the number. Raises: see `load_ledger`."""
    ledger = load_ledger(store, run)
    return 0 if ledger is None else ledger.skips or 0


def save_ledger(
    cache: CacheLike, ledger: Ledger, *, replaces: Ledger | None = None, skips: int | None = None
) -> None:
    """Replace the run's ledger atomically.

    Args:
        replaces: the ledger that was loaded before; None for a run that had none.
        skips: number of ranges that the run skips, instead of the number in `replaces`; None keeps
            the number that the ledger has now.

    Raises: CacheError if it cannot be written; OvertakenError if another process has replaced or
        removed the ledger, or the number, since `replaces` was loaded.
    """
    store = find_store(cache)
    record, current = read_ledger(store, ledger.run)
    # One that is gone was removed, reset or renamed, and is not brought back
    counts = {version.skips for version in (current, replaces) if version is not None}
    if current not in (replaces, ledger) or (skips is not None and len(counts) > 1):
        raise overtaken(store, ledger.run)
    if skips is None:
        skips = 0 if current is None else current.skips or 0
    store.write_record(
        RUNS,
        ledger.run,
        seal_ledger(dump_ledger(ledger.run, ledger.stages, ledger.request), skips),
        record,
    )


def overtaken(store: CacheStore, run: str) -> OvertakenError:
    """Return the error for a run that another process has changed since its ledger was loaded."""
    return OvertakenError(
        f"{store.describe_record(RUNS, run)}: another process changed run {run!r} in the meantime; "
        "run the command again"
    )


def run_names(store: CacheStore) -> list[str]:
    """Return the names of all runs, sorted."""
    return store.list_records(RUNS)


def list_runs(store: CacheStore) -> list[Ledger]:
    """Return the ledgers of all runs, sorted by name. Raises: see `load_ledger`."""
    return [ledger for name in run_names(store) if (ledger := load_ledger(store, name)) is not None]


def read_ledger(store: CacheStore, run: str) -> tuple[Record | None, Ledger | None]:
    """Return a run's record, and the ledger that it holds; None for both if the run was never
    built. Raises: see `load_ledger`."""
    location = store.describe_record(RUNS, run)
    try:
        record = store.read_record(RUNS, run)
        if record is None:
            return None, None
        text, skips = open_seal(record.data)
        try:
            parsed = parse_json(text)
        except ValueError as error:
            raise ValueError(_UNREADABLE.format(error)) from None
        ledger = parse_ledger(parsed, skips)
    except OSError as error:
        raise CacheError(
            f"{location}: cannot read the run's ledger ({cause_of(error)}): {cache_remedy_of(error.errno, location)}"
        ) from error
    except UnicodeDecodeError as error:
        raise CacheError(f"{location}: {_UNREADABLE.format(error)}") from None
    except ValueError as error:
        raise CacheError(f"{location}: {error}") from None
    if ledger.run != run:  # it would be written, and its skips looked for, under the other name
        remedy = "rename the file back; to rename a run, use `megablend runs rename`"
        if ledger.run.lower() == run.lower():
            remedy += ", with a name that also differs where the file system ignores case"
        raise CacheError(
            f"{location}: found the ledger of run {ledger.run!r}, expected that of {run!r}; {remedy}"
        )
    return record, ledger


def parse_ledger(record: Any, skips: int | None = None) -> Ledger:
    """Parse a ledger's record.

    Args:
        skips: see `Ledger.skips`. If it is known, the text matched its checksum, so the digests
            need not be computed again.

    Raises: ValueError if the record is damaged or has a newer version.
    """
    version = record.get("version") if isinstance(record, dict) else record
    if not isinstance(record, dict) or version not in range(VERSION, NEWEST_VERSION + 1):
        is_newer = isinstance(version, int) and version > NEWEST_VERSION
        remedy = "use the version of megablend that wrote it" if is_newer else REMEDY
        raise ValueError(
            f"found ledger version {version!r}, expected {VERSION} to {NEWEST_VERSION}; {remedy}"
        )
    _check_plan_version(record)
    try:
        stages = _parse_same(record) if version == VERSION else _parse_changes(record)
        digests = (
            record["digests"]
            if version == VERSION
            else [stage["digest"] for stage in record["stages"]]
        )
        request = record.get("request")
        ledger = Ledger(
            run=record["run"],
            stages=tuple(stages),
            request=request if isinstance(request, str) else None,
            skips=skips,
            stored_digests=None if skips is None else tuple(map(str, digests)),
        )
        is_intact = list(ledger.digests) == digests and len(digests) == len(stages) > 0
        start = 0
        for stage in stages:
            is_intact = is_intact and start < stage.stop <= stage.end
            start = stage.stop
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError):
        is_intact = False
    if not is_intact:
        raise ValueError(
            f"the ledger does not match its own digest: it was edited or damaged; {REMEDY}"
        )
    return ledger


def _check_plan_version(record: Mapping[str, Any]) -> None:
    """Refuse a ledger whose plan has a version that this release does not know. Raises:
    ValueError."""
    if record["version"] == VERSION:
        blend = record.get("blend")
        key = "plan"
        default = 1
    else:
        stages = record.get("stages")
        blend = stages[0] if isinstance(stages, list) and stages else None
        key = "plan_version"
        default = None
    version = blend.get(key, default) if isinstance(blend, dict) else 1
    if type(version) is not int or not 1 <= version <= PLAN_VERSION:
        raise ValueError(
            f"found plan version {version!r}, expected {PLAN_VERSION} or an earlier one; use the version of megablend that "
            "wrote it"
        )


def _check(record: object, shape: object) -> None:
    """Check that a record has the keys and types of a shape (see `fits`). Raises: ValueError."""
    if not fits(record, shape):
        raise ValueError("a key is missing or has the wrong type")


def _parse_same(record: Mapping[str, Any]) -> list[Stage]:
    """Return the stages of a ledger of VERSION, which lists its index and blend once. Raises: see
    `_parse_changes`."""
    _check(record, _SAME_BLEND)
    blend = parse_blend(record["blend"])
    return [Stage(end=end, index=record["index"], blend=blend) for end in record["ends"]]


def _parse_changes(record: Mapping[str, Any]) -> list[Stage]:
    """Return the stages of a ledger in which each stage lists only its changes from the stage
    before.
    Raises: KeyError, TypeError, ValueError if it is damaged."""
    _check(record, _CHANGES)
    entries = [{"name": name, "append_eod": eod} for name, eod in record["sources"]]
    _check(entries, [_SOURCE])
    listed = tuple(SourceShare(**entry) for entry in entries)
    blend = Blend(split="", sequence_length=0, add_extra_token_to_sequence=True, sources=listed)
    index = ""
    stages = list[Stage]()
    for changes in record["stages"]:
        kept = {name: getattr(blend, name) for name in SETTINGS}
        kept |= {"index": index, "num_sources": len(blend.sources)}
        stage_entry = kept | _DEFAULTS | changes
        _check(stage_entry, _STAGE)
        index = stage_entry["index"]
        count = stage_entry["num_sources"]
        sources = [*blend.sources[:count], *listed[len(blend.sources) : count]]
        for number, numerator, cycles in stage_entry["shares"]:
            _check(cycles, _is_cycles)
            share = Fraction(numerator, stage_entry["of"])
            sources[number] = sources[number].with_share(share, cycles)
        schedule = parse_schedule(stage_entry["schedule"]) if "schedule" in stage_entry else None
        if any(source.share is None for source in sources) or (
            schedule is not None and len(schedule.start) != len(sources)
        ):
            raise ValueError("the shares or the schedule of a stage do not match its sources")
        settings = {name: stage_entry[name] for name in SETTINGS}
        blend = Blend(sources=tuple(sources), schedule=schedule, **settings)
        stages.append(
            Stage(
                end=stage_entry["end"],
                index=index,
                blend=blend,
                cut=stage_entry["cut"],
                drain=stage_entry["drain"],
                whole_epochs=stage_entry["whole_epochs"],
            )
        )
    return stages


def parse_blend(record: Mapping[str, Any], *, may_be_unblended: bool = False) -> Blend:
    """Parse the result of `blend_record`.

    Args:
        may_be_unblended: whether the split may be unblended; train is always blended.

    Raises: ValueError, TypeError if the record does not describe a blend.
    """
    is_blended = not may_be_unblended or "seed" in record
    if is_blended:
        record = {"plan": 1, "interleaving": LANES, **record}
    keys = _BLENDED if is_blended else _ONE_PASS
    _check(record, keys)
    if not record["sources"]:
        raise ValueError("no sources")
    settings = dict[str, Any]()
    for name in SETTINGS:
        key = _KEYS.get(name, name)
        if key in keys:  # others were not checked
            settings[name] = record[key]
    if is_blended:
        settings["order"] = current_name(record["order"])
    sources = list[SourceShare]()
    for entry in record["sources"]:
        source = SourceShare(name=entry["name"], append_eod=entry["append_eod"])
        if is_blended:
            source = source.with_share(Fraction(entry["share"]), entry["cycles"])
        sources.append(source)
    return Blend(sources=tuple(sources), **settings)
