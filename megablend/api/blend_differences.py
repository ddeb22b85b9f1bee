"""What a blend consists of, in the terms of configs, and in which settings two blends differ."""

from __future__ import annotations

from typing import Any, NamedTuple

from megablend.config.model import OLD_KEYS
from megablend.plan.ledger_format import blend_record
from megablend.plan.stage import Blend

_TERMS = OLD_KEYS | {"plan": "plan_version"}
"""What is called otherwise in ledgers."""


class Difference(NamedTuple):
    """One thing in which two runs differ; None stands for what one of them does not have."""

    what: str
    a: Any
    b: Any


def describe_blend(blend: Blend) -> dict[str, Any]:
    """A blend as a JSON-able dict, with the keys and values of configs."""
    described = {_TERMS.get(key, key): value for key, value in blend_record(blend).items()}
    return described | ({"order": blend.order} if "order" in described else {})


def list_blend_differences(a: Blend, b: Blend) -> list[Difference]:
    """The settings of two blends, and whether they differ: of each its name, and its values in both."""
    blends = describe_blend(a), describe_blend(b)
    keys = sorted((blends[0].keys() | blends[1].keys()) - {"sources"})
    found = [Difference(key, blends[0].get(key), blends[1].get(key)) for key in keys]
    return [*found, *_differences_of_sources(blends[0]["sources"], blends[1]["sources"])]


def _differences_of_sources(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> list[Difference]:
    by_name = [{source["name"]: source for source in listed} for listed in (a, b)]
    names = list(dict.fromkeys([*by_name[0], *by_name[1]]))
    found = []
    for name in names:
        x, y = (listed.get(name) for listed in by_name)
        if x is None or y is None:
            found.append(Difference(f"source {name!r}", *("present" if each else None for each in (x, y))))
        else:
            keys = sorted(x.keys() | y.keys())
            found += [Difference(f"{key} of source {name!r}", x.get(key), y.get(key)) for key in keys]
    if len(by_name[0]) == len(names) == len(by_name[1]):
        found.append(Difference("sequence of sources", list(by_name[0]), list(by_name[1])))
    return found
