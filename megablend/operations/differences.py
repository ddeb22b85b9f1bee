"""In what two ledgers differ, in the terms of configs: indices, the blends of their stages, where stages end."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from megablend.config.model import OLD_KEYS
from megablend.operations.results import Record
from megablend.run.ledger import Ledger
from megablend.run.ledger_format import blend_record
from megablend.run.links import Link
from megablend.run.stage import Blend
from megablend.run.state import State

_TERMS = OLD_KEYS | {"plan": "plan_version"}
"""What is called otherwise in ledgers."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Difference(Record):
    """One thing in which two runs differ; None stands for what one of them does not have."""

    what: str
    a: Any
    b: Any


def describe_blend(blend: Blend) -> dict[str, Any]:
    """A blend as a JSON-able dict, with the keys and values of configs."""
    described = {_TERMS.get(key, key): value for key, value in blend_record(blend).items()}
    return described | ({"order": blend.order} if "order" in described else {})


def list_differences(a: Ledger | State, b: Ledger | State) -> list[Difference]:
    """The differences between two ledgers; of a state, only index and stages are known."""
    found = [Difference(what="index", a=", ".join(a.indices), b=", ".join(b.indices))]
    if isinstance(a, Ledger) and isinstance(b, Ledger):
        for start, x, y in _pair_blends(a, b):
            of_stage = f" from sample {start:,} on" if start else ""
            found += [
                replace(each, what=each.what + of_stage) for each in list_blend_differences(x, y)
            ]
        found.append(Difference(what="stage ends", a=list(a.ends), b=list(b.ends)))
    else:
        first, second = ([[link.stop, link.digest] for link in links_of(each)] for each in (a, b))
        found.append(Difference(what="stages", a=first, b=second))
    return [each for each in found if each.a != each.b]


def list_blend_differences(a: Blend, b: Blend) -> list[Difference]:
    """The settings of two blends, and whether they differ:
    of each its name, and its values in both."""
    x, y = (describe_blend(each) for each in (a, b))
    sources = _differences_of_sources(x.pop("sources"), y.pop("sources"))
    return [*_compare(x, y), *sources]


def _compare(a: dict[str, Any], b: dict[str, Any], of: str = "") -> list[Difference]:
    return [
        Difference(what=key + of, a=a.get(key), b=b.get(key)) for key in sorted(a.keys() | b.keys())
    ]


def _differences_of_sources(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> list[Difference]:
    before, after = ({source["name"]: source for source in listed} for listed in (a, b))
    names = list(dict.fromkeys([*before, *after]))
    found = []
    for name in names:
        x, y = (listed.get(name) for listed in (before, after))
        if x is None or y is None:
            found.append(Difference(what=f"source {name!r}", a=x and "present", b=y and "present"))
        else:
            found += _compare(x, y, f" of source {name!r}")
    if len(before) == len(names) == len(after):
        found.append(Difference(what="sequence of sources", a=list(before), b=list(after)))
    return found


def links_of(which: Ledger | State) -> tuple[Link, ...]:
    """The chain of stages of a ledger or a state."""
    return which.links if isinstance(which, Ledger) else which.stages


def _pair_blends(a: Ledger, b: Ledger) -> list[tuple[int, Blend, Blend]]:
    """The blends of two ledgers from each sample on where one of them changes."""
    last = min(a.num_samples, b.num_samples)
    pairs = [
        (start, a.stage_at(start).blend, b.stage_at(start).blend)
        for start in sorted({*a.starts, *b.starts})
        if start < last
    ]
    return [
        pair
        for before, pair in pairwise([None, *pairs])
        if pair and (before is None or before[1:] != pair[1:])
    ]
