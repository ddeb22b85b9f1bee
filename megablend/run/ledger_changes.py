"""Ledgers whose stages differ, as JSON: the sources' names once, then what each stage changes from
the one before.

A stage takes at most 200 bytes, and 40 bytes for each source whose share changes. Shares are
numerators of a common denominator.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from megablend.blend.allocate import MAX_CYCLES_PER_RUN
from megablend.blend.schedule import parse_schedule, schedule_record
from megablend.run.stage import SETTINGS, Blend, SourceShare, Stage
from megablend.system.limited_json import missing_field

VERSION = 2
DATA_VERSION = 3
"""Of ledgers whose stages read several snapshots of the index, with sources that come later."""
DRAIN_VERSION = 4
"""Of ledgers with a stage whose drain has a length of its own; see `Stage.drain`."""
NEWEST_VERSION = 5
"""Of ledgers with a stage before which epochs that were made shorter are read to their end; see
`Stage.whole_epochs`."""


def changes_record(run: str, stages: Sequence[Stage], digests: Sequence[str]) -> dict[str, Any]:
    """The ledger as a JSON-serializable dict. Raises: ValueError where a stage lacks sources of the
    one before."""
    sources = [[source.name, source.append_eod] for source in stages[-1].blend.sources]
    records = list[dict[str, Any]]()
    before = None
    for stage, digest in zip(stages, digests, strict=True):
        named = [[source.name, source.append_eod] for source in stage.blend.sources]
        if named != sources[: len(named)] or (
            before is not None and len(named) < len(before.blend.sources)
        ):
            raise ValueError(f"run {run!r}: stages have different sources")
        record = _stage_record(stage, before) | {"digest": digest}
        if len(named) != (len(sources) if before is None else len(before.blend.sources)):
            record["num_sources"] = len(named)
        records.append(record)
        before = stage
    version = VERSION if len({stage.index for stage in stages}) == 1 else DATA_VERSION
    if any(stage.drain is not None for stage in stages):
        version = DRAIN_VERSION
    if any(stage.whole_epochs for stage in stages):
        version = NEWEST_VERSION
    return {"version": version, "run": run, "sources": sources, "stages": records}


def dump_changes(record: dict[str, Any]) -> str:
    """The text of the record: a line for each stage."""
    head = {key: value for key, value in record.items() if key != "stages"}
    lines = ",\n".join(json.dumps(stage, separators=(",", ":")) for stage in record["stages"])
    return f'{json.dumps(head, separators=(",", ":"))[:-1]},\n"stages":[\n{lines}\n]}}\n'


def parse_changes(record: dict[str, Any]) -> tuple[str, tuple[Stage, ...], list[str]]:
    """The run's name, its stages, and the digests stored with them. Raises: KeyError, TypeError,
    ValueError where damaged."""
    named = tuple(
        SourceShare(name=_text(name), append_eod=eod and _whole(eod))
        for name, eod in record["sources"]
    )
    stages = list[Stage]()
    digests = list[str]()
    blend = Blend(split="", sequence_length=0, add_extra_token_to_sequence=True, sources=named)
    index = ""
    count = len(named)
    for each in record["stages"]:
        count = _whole(each.get("num_sources", count))
        blend = _parse_blend(
            each,
            replace(blend, sources=(*blend.sources[:count], *named[len(blend.sources) : count])),
        )
        index = _text(each.get("index", index))
        cut, drain = (
            None if each.get(key) is None else _whole(each[key]) for key in ("cut", "drain")
        )
        whole = each.get("whole_epochs", False)
        if type(whole) is not bool:
            raise ValueError("not true or false")
        stages.append(
            Stage(
                end=_whole(each["end"]),
                index=index,
                blend=blend,
                cut=cut,
                drain=drain,
                whole_epochs=whole,
            )
        )
        digests.append(_text(each["digest"]))
    return _text(record["run"]), tuple(stages), digests


def _stage_record(stage: Stage, before: Stage | None) -> dict[str, Any]:
    """What a stage changes."""
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
    changed = [
        (number, source)
        for number, source in enumerate(blend.sources)
        if old is None or number >= len(old.sources) or source != old.sources[number]
    ]
    if changed:
        shares = [source.share or Fraction(0) for _, source in changed]
        record["of"] = math.lcm(*(share.denominator for share in shares))
        record["shares"] = [
            [number, share.numerator * (record["of"] // share.denominator), source.cycles]
            for (number, source), share in zip(changed, shares, strict=True)
        ]
    return record


def _parse_blend(record: dict[str, Any], before: Blend) -> Blend:
    given = {name: record[name] for name in SETTINGS if name in record}
    kinds = {name: type(getattr(before, name)) for name in given}
    if missing_field(given, kinds) is not None:
        raise ValueError("a key has another type")
    sources = list(before.sources)
    for number, numerator, cycles in record.get("shares", ()):
        share = Fraction(_whole(numerator), _whole(record["of"]))
        old = sources[_whole(number)]
        sources[number] = SourceShare(
            name=old.name, append_eod=old.append_eod, share=share, cycles=parse_cycles(cycles)
        )
    if any(source.share is None for source in sources):
        raise ValueError("a source has no share")
    schedule = parse_schedule(record["schedule"]) if "schedule" in record else None
    if schedule is not None and len(schedule.start) != len(sources):
        raise ValueError("a schedule of other sources")
    return replace(before, sources=tuple(sources), schedule=schedule, **given)


def parse_cycles(value: object) -> int:
    """How many cycles share a run of a source's ordinals. Raises: ValueError where no plan has so
    many."""
    if _whole(value) not in range(1, MAX_CYCLES_PER_RUN + 1):
        raise ValueError("not a number of cycles")
    return _whole(value)


def _whole(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("not a whole number")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("not a string")
    return value
