"""List the differences between two ledgers, in the terms of configs: their indices, the blends of
their stages, and where stages end."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megablend.config.model import OLD_KEYS
from megablend.operations.results import Record
from megablend.run.ledger import Ledger
from megablend.run.ledger_format import blend_record
from megablend.run.links import Link
from megablend.run.stage import Blend
from megablend.run.state import State

_TERMS = OLD_KEYS | {"plan": "plan_version"}
"""The keys that have one name in ledgers and another one in configs: the config's name, by the
ledger's name."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Difference(Record):
    """A setting, or another property, in which two runs differ."""

    what: str
    """The name of the setting or property."""
    a: Any
    """The value in the first run; None if the run does not have the setting."""
    b: Any
    """The value in the second run; None if the run does not have the setting."""

    def as_change(self) -> dict[str, Any]:
        """Return the difference as a change of one run, with the keys `what`, `before` and
        `after`."""
        return {"what": self.what, "before": self.a, "after": self.b}


def describe_blend(blend: Blend) -> dict[str, Any]:
    """Return a blend as a JSON-serializable dict that has the same keys as a config."""
    described = {_TERMS.get(key, key): value for key, value in blend_record(blend).items()}
    return described | ({"order": blend.order} if "order" in described else {})


def list_differences(a: Ledger | State, b: Ledger | State) -> list[Difference]:
    """Return the differences between two ledgers. A state has only the indices and the chain of
    stages, so only these are compared."""
    compared = [Difference(what="index", a=", ".join(a.indices), b=", ".join(b.indices))]
    if isinstance(a, Ledger) and isinstance(b, Ledger):
        for start, blend_a, blend_b in _pair_blends(a, b):
            from_sample = f" from sample {start:,} on" if start else ""
            compared += [
                replace(each, what=each.what + from_sample)
                for each in compare_blends(blend_a, blend_b)
            ]
        compared.append(Difference(what="stage ends", a=list(a.ends), b=list(b.ends)))
    else:
        ends_a = [[link.stop, link.digest] for link in links_of(a)]
        ends_b = [[link.stop, link.digest] for link in links_of(b)]
        compared.append(Difference(what="stages", a=ends_a, b=ends_b))
    return [each for each in compared if each.a != each.b]


def compare_blends(a: Blend, b: Blend) -> list[Difference]:
    """Return each setting of two blends with both values, whether they differ or not."""
    settings_a = describe_blend(a)
    settings_b = describe_blend(b)
    sources = _compare_sources(settings_a.pop("sources"), settings_b.pop("sources"))
    return [*_compare(settings_a, settings_b), *sources]


def _compare(a: dict[str, Any], b: dict[str, Any], of: str = "") -> list[Difference]:
    """Return each key of two dicts with both values.

    Args:
        of: text that is appended to the names of the keys.
    """
    return [
        Difference(what=key + of, a=a.get(key), b=b.get(key)) for key in sorted(a.keys() | b.keys())
    ]


def _compare_sources(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> list[Difference]:
    """Return each setting of the sources of two blends with both values, and the sources that only
    one of the blends has. If both have the same sources, the order of the sources is compared,
    too."""
    by_name_a = {source["name"]: source for source in a}
    by_name_b = {source["name"]: source for source in b}
    names = list(dict.fromkeys([*by_name_a, *by_name_b]))
    compared = []
    for name in names:
        source_a = by_name_a.get(name)
        source_b = by_name_b.get(name)
        if source_a is None or source_b is None:
            compared.append(
                Difference(
                    what=f"source {name!r}",
                    a=source_a and "present",
                    b=source_b and "present",
                )
            )
        else:
            compared += _compare(source_a, source_b, f" of source {name!r}")
    if len(by_name_a) == len(names) == len(by_name_b):
        compared.append(
            Difference(what="sequence of sources", a=list(by_name_a), b=list(by_name_b))
        )
    return compared


def links_of(which: Ledger | State) -> tuple[Link, ...]:
    """Return the chain of stages of a ledger or a state."""
    return which.links if isinstance(which, Ledger) else which.stages


def _pair_blends(a: Ledger, b: Ledger) -> list[tuple[int, Blend, Blend]]:
    """Return the samples at which the blend of either ledger changes, up to the end of the shorter
    one. Each comes with the blends of both ledgers from that sample on."""
    stop = min(a.num_samples, b.num_samples)
    changes = list[tuple[int, Blend, Blend]]()
    for start in sorted({*a.starts, *b.starts}):
        if start >= stop:
            break
        blend_a = a.stage_at(start).blend
        blend_b = b.stage_at(start).blend
        if not changes or changes[-1][1:] != (blend_a, blend_b):
            changes.append((start, blend_a, blend_b))
    return changes
