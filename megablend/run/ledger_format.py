"""How ledgers are written as JSON, and the digests of runs. Names and values here are persisted:
they never change.

The digest of a run is a hash chain with one link per stage, so the digests of earlier stages do not
change when stages are appended.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

from megablend.blend.schedule import schedule_record
from megablend.order.registry import OLD_NAMES, current_name
from megablend.run.ledger_changes import (
    NEWEST_VERSION,
    changes_record,
    dump_changes,
    parse_changes,
    parse_cycles,
)
from megablend.run.stage import Blend, SourceShare, Stage
from megablend.system.limited_json import missing_field

REMEDY = (
    "restore it from a backup, or reset the run (`megablend runs reset CONFIG`) and build again"
)
VERSION = 1
PLAN_VERSION = 2
"""Version of the plan that new runs get; stored in their blend as `plan`. Runs of release 0.1.0
store none and have version 1, in which a lane's run of consecutive ordinals does not end at a
source's epoch end, so that the next epoch begins early."""
LANES = "lanes"
"""The interleaving of blends that do not name one."""
_PERSISTED_ORDERS = {new: old for old, new in OLD_NAMES.items()}
_BLEND = {
    "split": str,
    "sequence_length": int,
    "add_extra_token_to_sequence": bool,
    "sources": list,
}
_BLENDED = {"seed": int, "order": str, "lanes": int, "cycle": int}
_OPTIONAL = {"plan": int, "interleaving": str}
_SEAL = re.compile(r',\s*"skips": ([0-9]{1,9}),\s*"checksum": "([0-9a-f]{32})"\s*}\s*$')
_SEAL_CHARACTERS = 200
"""More than a seal has: a ledger may have millions of characters."""
_SHARE = re.compile(r"[0-9]+(/[1-9][0-9]*)?")


def digest_of(value: object) -> str:
    """The BLAKE2b digest of canonical JSON: 16 bytes in hex."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def chain_digests(stages: Sequence[Stage]) -> tuple[str, ...]:
    """The digest of a run after each of its stages: of a stage that was cut, what it would have
    been at its end."""
    link = ""
    chain = list[str]()
    before = None
    for stage in stages:
        begin = ([] if stage.drain is None else [stage.drain]) + (
            ["whole_epochs"] if stage.whole_epochs else []
        )
        if before is None:
            link = digest_of([VERSION, stage.index, blend_record(stage.blend), *begin])
        elif before.cut is not None:
            link = digest_of([link, before.cut, stage.index, blend_record(stage.blend), *begin])
        elif (stage.index, stage.blend) != (before.index, before.blend) or begin:
            link = digest_of([link, stage.index, blend_record(stage.blend), *begin])
        link = digest_of([link, stage.end])
        chain.append(link)
        before = stage
    return tuple(chain)


def blend_record(blend: Blend) -> dict[str, Any]:
    """A blend as a JSON-serializable dict."""
    record: dict[str, Any] = {
        "split": blend.split,
        "sequence_length": blend.sequence_length,
        "add_extra_token_to_sequence": blend.add_extra_token_to_sequence,
        "sources": [_source_record(source) for source in blend.sources],
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


def ledger_record(run: str, stages: Sequence[Stage], request: str | None = None) -> dict[str, Any]:
    """A ledger as a JSON-serializable dict; of version 1 where all stages have the same shares, as
    release 0.1.0 reads it.

    Args:
        request: see `Ledger.request`; earlier releases ignore it.

    Raises: ValueError where stages have different sources.
    """
    record = _stages_record(run, stages)
    return record if request is None else record | {"request": request}


def _stages_record(run: str, stages: Sequence[Stage]) -> dict[str, Any]:
    first = stages[0]
    has_changes = any(
        (stage.index, stage.blend, stage.cut) != (first.index, first.blend, None)
        for stage in stages
    )
    if has_changes or first.blend.schedule is not None:
        return changes_record(run, stages, chain_digests(stages))
    return {
        "version": VERSION,
        "run": run,
        "index": first.index,
        "ends": [stage.end for stage in stages],
        "digests": list(chain_digests(stages)),
        "blend": blend_record(first.blend),
    }


def dump_ledger(run: str, stages: Sequence[Stage], request: str | None = None) -> str:
    """The text of a ledger's file. Raises: as `ledger_record`."""
    record = ledger_record(run, stages, request)
    return json.dumps(record, indent=1) if record["version"] == VERSION else dump_changes(record)


def seal_ledger(text: str, skips: int) -> str:
    """The text of a ledger with what is stored outside of its chain: how many ranges the run skips,
    and a checksum of it all."""
    body = text.rstrip().removesuffix("}").rstrip()
    return f'{body},\n"skips": {skips},\n"checksum": "{_checksum(body, skips)}"}}\n'


def open_seal(text: str) -> tuple[str, int | None]:
    """A ledger's text as `dump_ledger` made it, and how many ranges the run skips; None in ledgers
    of before, which do not say.

    Raises: ValueError if the text does not match its checksum.
    """
    end = text[-_SEAL_CHARACTERS:]
    if '"skips":' not in end and '"checksum":' not in end:
        return text, None
    sealed = _SEAL.search(text, max(0, len(text) - _SEAL_CHARACTERS))
    if sealed is None:  # its words are damaged, which would leave all of it unchecked
        raise ValueError(f"the ledger's checksum is damaged; {REMEDY}")
    body = text[: sealed.start()]
    skips = int(sealed[1])
    if _checksum(body, skips) != sealed[2]:
        raise ValueError(
            f"the ledger does not match its checksum: it was edited or damaged; {REMEDY}"
        )
    return body + ("\n}" if body.startswith("{\n") else "}\n"), skips


def _checksum(body: str, skips: int) -> str:
    return hashlib.blake2b(f"{skips}\n{body}".encode(), digest_size=16).hexdigest()


class ParsedLedger(NamedTuple):
    """What a ledger's record says."""

    run: str
    stages: tuple[Stage, ...]
    digests: tuple[str, ...]
    """The plan's digest after each stage."""
    request: str | None


def parse_ledger(record: object, *, is_sealed: bool = False) -> ParsedLedger:
    """Parse a ledger's record.

    Args:
        is_sealed: its text matched a checksum, so that its digests need not be computed again.

    Raises: ValueError where the record is damaged or has a newer version.
    """
    if not isinstance(record, dict) or record.get("version") not in range(
        VERSION, NEWEST_VERSION + 1
    ):
        version = record.get("version") if isinstance(record, dict) else record
        is_newer = isinstance(version, int) and version > NEWEST_VERSION
        remedy = "use the version of megablend that wrote it" if is_newer else REMEDY
        raise ValueError(
            f"found ledger version {version!r}, expected {VERSION} to {NEWEST_VERSION}; {remedy}"
        )
    _check_plan_version(record)
    try:
        run, stages, digests = _parse_stages(record)
        intact = (
            len(stages) > 0
            and stages[0].stop > 0
            and all(a.stop < b.stop for a, b in pairwise(stages))
        )
        intact = intact and all(stage.stop <= stage.end for stage in stages)
        chain = tuple(map(str, digests)) if is_sealed else chain_digests(stages)
        intact = intact and list(chain) == digests and len(chain) == len(stages)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError):
        intact = False
    if not intact:
        raise ValueError(
            f"the ledger does not match its own digest: it was edited or damaged; {REMEDY}"
        )
    request = record.get("request")
    return ParsedLedger(run, stages, chain, request if isinstance(request, str) else None)


def _parse_stages(record: dict[str, Any]) -> tuple[str, tuple[Stage, ...], list[str]]:
    """The run's name, its stages, and the digests stored with them."""
    if record["version"] != VERSION:
        return parse_changes(record)
    run = record["run"]
    index = record["index"]
    blend = parse_blend(record["blend"])
    if not isinstance(run, str) or not isinstance(index, str):
        raise ValueError("a name is not a string")
    return (
        run,
        tuple(Stage(end=_whole(end), index=index, blend=blend) for end in record["ends"]),
        record["digests"],
    )


def _source_record(source: SourceShare) -> dict[str, Any]:
    record: dict[str, Any] = {"name": source.name, "append_eod": source.append_eod}
    return (
        record
        if source.share is None
        else record | {"share": str(source.share), "cycles": source.cycles}
    )


def _check_plan_version(record: dict[str, Any]) -> None:
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


def parse_blend(record: object, *, may_be_unblended: bool = False) -> Blend:
    """The inverse of `blend_record`; of train, which is always blended. Raises: ValueError,
    TypeError where it is not one."""
    if not isinstance(record, dict) or missing_field(record, _BLEND) is not None:
        raise ValueError("a key is missing or has another type")
    if may_be_unblended and "seed" not in record:
        sources = [
            SourceShare(name=source["name"], append_eod=source["append_eod"])
            for source in record["sources"]
        ]
        return Blend(
            **{name: record[name] for name in _BLEND if name != "sources"}, sources=tuple(sources)
        )
    if missing_field(record, _BLENDED) is not None:
        raise ValueError("a key is missing or has another type")
    if not record["sources"]:
        raise ValueError("no sources")
    given = {key: value for key, value in record.items() if key in _OPTIONAL}
    if (
        missing_field(given, {key: kind for key, kind in _OPTIONAL.items() if key in given})
        is not None
    ):
        raise ValueError("a key has another type")
    return Blend(
        split=record["split"],
        sequence_length=record["sequence_length"],
        add_extra_token_to_sequence=record["add_extra_token_to_sequence"],
        sources=tuple(map(_parse_source, record["sources"])),
        interleaving=given.get("interleaving", LANES),
        order=current_name(record["order"]),
        plan_version=given.get("plan", 1),
        seed=record["seed"],
        lanes=record["lanes"],
        shuffle_window=record["cycle"],
    )


def _parse_source(record: object) -> SourceShare:
    if (
        not isinstance(record, dict)
        or missing_field(record, {"name": str, "share": str, "cycles": int}) is not None
    ):
        raise ValueError("a key is missing or has another type")
    # Fraction would accept 1e999999999 and expand its digits
    if _SHARE.fullmatch(record["share"]) is None:
        raise ValueError("not a share")
    append_eod = None if record["append_eod"] is None else _whole(record["append_eod"])
    return SourceShare(
        name=record["name"],
        append_eod=append_eod,
        share=Fraction(record["share"]),
        cycles=parse_cycles(record["cycles"]),
    )


def _whole(value: object) -> int:
    if type(value) is not int:
        raise ValueError("not an integer")
    return value
