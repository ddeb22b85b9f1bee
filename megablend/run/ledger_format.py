"""Ledgers as JSON, and the digests of runs. Names and values here are persisted: they never change.

The digest of a run is a hash chain with one link per stage, so the digests of earlier stages do not
change when stages are appended.

A ledger whose stages all have the same index and blend lists these once, as in release 0.1.0.
Others list the sources' names once, then what each stage changes from the previous one: at most 200
bytes, and 40 bytes for each source whose share changes. Shares are then numerators of a common
denominator.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from typing import Any

from megablend.blend.schedule import schedule_record
from megablend.order.registry import OLD_NAMES
from megablend.run.stage import SETTINGS, Blend, SourceShare, Stage
from megablend.system.digest import digest_json, hex_digest

REMEDY = (
    "restore it from a backup, or reset the run (`megablend runs reset CONFIG`) and build again"
)
VERSION = 1
"""Version of ledgers whose stages have the same index and blend."""
CHANGES_VERSION = 2
"""Version of ledgers whose stages have different blends."""
DATA_VERSION = 3
"""Version of ledgers whose stages read several snapshots of the index, with sources that come
later."""
DRAIN_VERSION = 4
"""Version of ledgers with a stage whose drain has a length of its own; see `Stage.drain`."""
NEWEST_VERSION = 5
"""Version of ledgers with a stage that reads epochs whole; see `Stage.whole_epochs`."""
PLAN_VERSION = 2
"""Version of the plan that new runs get; stored in their blend as `plan`. Runs of release 0.1.0
store no version and have version 1. There, a lane's run of consecutive ordinals does not end where
an epoch of the source ends, so the next epoch begins early."""
LANES = "lanes"
"""The interleaving of a blend if its record does not name one."""
_PERSISTED_ORDERS = {new: old for old, new in OLD_NAMES.items()}
"""The names under which orders are stored, for each order that has been renamed."""
_SEAL = re.compile(r',\s*"skips": ([0-9]{1,9}),\s*"checksum": "([0-9a-f]{32})"\s*}\s*$')
_SEAL_CHARACTERS = 200
"""Upper bound on the number of characters of a seal. The seal is searched for only at the end of a
ledger's text, since the text may have millions of characters."""


def chain_digests(stages: Sequence[Stage]) -> tuple[str, ...]:
    """Return the digest of a run after each of its stages; for a stage that was cut, the digest
    that the run would have had at the stage's end."""
    link = ""
    chain = list[str]()
    before = None
    for stage in stages:
        begin = ([] if stage.drain is None else [stage.drain]) + (
            ["whole_epochs"] if stage.whole_epochs else []
        )
        if before is None:
            link = digest_json([VERSION, stage.index, blend_record(stage.blend), *begin])
        elif before.cut is not None:
            link = digest_json([link, before.cut, stage.index, blend_record(stage.blend), *begin])
        elif (stage.index, stage.blend) != (before.index, before.blend) or begin:
            link = digest_json([link, stage.index, blend_record(stage.blend), *begin])
        link = digest_json([link, stage.end])
        chain.append(link)
        before = stage
    return tuple(chain)


def blend_record(blend: Blend) -> dict[str, Any]:
    """Return a blend as a JSON-serializable dict."""
    record: dict[str, Any] = {
        "split": blend.split,
        "sequence_length": blend.sequence_length,
        "add_extra_token_to_sequence": blend.add_extra_token_to_sequence,
        "sources": list(map(_source_record, blend.sources)),
    }
    if not blend.is_blended:
        return record
    if blend.plan_version > 1:
        record["plan"] = blend.plan_version
    record["seed"] = blend.seed
    record["order"] = _PERSISTED_ORDERS.get(blend.order, blend.order)
    record["lanes"] = blend.lanes
    record["cycle"] = blend.shuffle_window
    if blend.interleaving != LANES:
        record["interleaving"] = blend.interleaving
    if blend.schedule is not None:
        record["schedule"] = schedule_record(blend.schedule)
    return record


def _source_record(source: SourceShare) -> dict[str, Any]:
    record: dict[str, Any] = {"name": source.name, "append_eod": source.append_eod}
    return (
        record
        if source.share is None
        else record | {"share": str(source.share), "cycles": source.cycles}
    )


def _list_fixed(source: SourceShare) -> list[object]:
    """Return the fixed settings of a source, which ledgers whose stages differ list once."""
    return [source.name, source.append_eod]


def ledger_record(run: str, stages: Sequence[Stage], request: str | None = None) -> dict[str, Any]:
    """Return a ledger as a JSON-serializable dict. If all stages have the same index and blend, it
    has version 1, which release 0.1.0 can read.

    Args:
        request: see `Ledger.request`; earlier releases ignore it.

    Raises: ValueError if stages have different sources.
    """
    first = stages[0]
    digests = chain_digests(stages)
    has_changes = any(
        (stage.index, stage.blend, stage.cut) != (first.index, first.blend, None)
        for stage in stages
    )
    if has_changes or first.blend.schedule is not None:
        record = _changes_record(run, stages, digests)
    else:
        record = {
            "version": VERSION,
            "run": run,
            "index": first.index,
            "ends": [stage.end for stage in stages],
            "digests": list(digests),
            "blend": blend_record(first.blend),
        }
    return record if request is None else record | {"request": request}


def _changes_record(run: str, stages: Sequence[Stage], digests: Sequence[str]) -> dict[str, Any]:
    """Return a ledger whose stages list what they change, as a JSON-serializable dict.
    Raises: ValueError if a stage lacks or changes sources of the previous one."""
    sources = list(map(_list_fixed, stages[-1].blend.sources))
    records = list[dict[str, Any]]()
    version = CHANGES_VERSION
    before = None
    for stage, digest in zip(stages, digests, strict=True):
        if stage.index != stages[0].index:
            version = max(version, DATA_VERSION)
        if stage.drain is not None:
            version = max(version, DRAIN_VERSION)
        if stage.whole_epochs:
            version = NEWEST_VERSION
        named = list(map(_list_fixed, stage.blend.sources))
        if named != sources[: len(named)] or (
            before is not None and len(named) < len(before.blend.sources)
        ):
            raise ValueError(
                f"run {run!r}: a stage lacks or changes sources of the stage before it; a stage may only add sources "
                "at the end"
            )
        record = _stage_record(stage, before) | {"digest": digest}
        if len(named) != (len(sources) if before is None else len(before.blend.sources)):
            record["num_sources"] = len(named)
        records.append(record)
        before = stage
    return {"version": version, "run": run, "sources": sources, "stages": records}


def _stage_record(stage: Stage, before: Stage | None) -> dict[str, Any]:
    """Return the changes of a stage from the previous one; all of its settings if there is none."""
    record: dict[str, Any] = {"end": stage.end}
    if stage.cut is not None:
        record["cut"] = stage.cut
    if stage.drain is not None:
        record["drain"] = stage.drain
    if stage.whole_epochs:
        record["whole_epochs"] = True
    if before is None or stage.index != before.index:
        record["index"] = stage.index
    blend = stage.blend
    old = None if before is None else before.blend
    record |= {
        name: getattr(blend, name)
        for name in SETTINGS
        if old is None or getattr(blend, name) != getattr(old, name)
    }
    if blend.schedule is not None:
        record["schedule"] = schedule_record(blend.schedule)
    changed = list[tuple[int, SourceShare]]()
    shares = list[Fraction]()
    for number, source in enumerate(blend.sources):
        if old is None or number >= len(old.sources) or source != old.sources[number]:
            changed.append((number, source))
            shares.append(source.share or Fraction(0))
    if changed:
        record["of"] = math.lcm(*(share.denominator for share in shares))
        record["shares"] = [
            [number, share.numerator * (record["of"] // share.denominator), source.cycles]
            for (number, source), share in zip(changed, shares, strict=True)
        ]
    return record


def dump_ledger(run: str, stages: Sequence[Stage], request: str | None = None) -> str:
    """Return the text of a ledger's file. If stages differ, each stage has its own line. Raises:
    see `ledger_record`."""
    record = ledger_record(run, stages, request)
    if record["version"] == VERSION:
        return json.dumps(record, indent=1)
    dump = partial(json.dumps, separators=(",", ":"))
    lines = ",\n".join(map(dump, record.pop("stages")))
    return f'{dump(record)[:-1]},\n"stages":[\n{lines}\n]}}\n'


def seal_ledger(text: str, skips: int) -> str:
    """Append a seal to a ledger's text: the number of ranges that the run skips, which is not part
    of the chain of digests, and a checksum of the whole text."""
    body = text.rstrip().removesuffix("}").rstrip()
    checksum = hex_digest(f"{skips}\n{body}")
    return f'{body},\n"skips": {skips},\n"checksum": "{checksum}"}}\n'


def open_seal(text: str) -> tuple[str, int | None]:
    """Return a ledger's text as `dump_ledger` made it, and the number of ranges that the run skips.
    The number is None for ledgers of earlier releases, which do not record it.

    Raises: ValueError if the text does not match its checksum.
    """
    end = text[-_SEAL_CHARACTERS:]
    if '"skips":' not in end and '"checksum":' not in end:
        return text, None
    sealed = _SEAL.search(text, max(0, len(text) - _SEAL_CHARACTERS))
    if sealed is None:  # the seal itself is damaged; without it, nothing would be checked
        raise ValueError(f"the ledger's checksum is damaged; {REMEDY}")
    body = text[: sealed.start()]
    skips = int(sealed[1])
    if hex_digest(f"{skips}\n{body}") != sealed[2]:
        raise ValueError(
            f"the ledger does not match its checksum: it was edited or damaged; {REMEDY}"
        )
    return body + ("\n}" if body.startswith("{\n") else "}\n"), skips
