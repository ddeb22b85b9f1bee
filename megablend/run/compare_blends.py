"""Compare the blends of stages, in the terms of configs."""

from __future__ import annotations

from typing import Any

from megablend.config.model import OLD_KEYS
from megablend.run.ledger_format import LANES, blend_record
from megablend.run.stage import Blend

Row = tuple[str, Any, Any]
"""The name of a setting, and its values in two blends; None if a blend does not have the
setting."""
_PRESENT = "present"
"""The value of a source that a blend has."""
_SEQUENCE = "sequence of sources"
_TERMS = OLD_KEYS | {"plan": "plan_version"}
"""The keys that have one name in ledgers and another one in configs: the config's name, by the
ledger's name."""
_DEFAULTS: dict[str, Any] = {"interleaving": LANES, "plan_version": 1}
"""The values of settings that ledgers leave out."""


def describe_blend(blend: Blend) -> dict[str, Any]:
    """Return a blend as a JSON-serializable dict that has the same keys as a config."""
    described = {_TERMS.get(key, key): value for key, value in blend_record(blend).items()}
    return described | ({"order": blend.order} if "order" in described else {})


def compare_blends(a: Blend, b: Blend) -> list[Row]:
    """Return each setting of two blends with both values, whether they differ or not. Settings of
    all sources come first."""
    settings_a = _DEFAULTS | describe_blend(a)
    settings_b = _DEFAULTS | describe_blend(b)
    sources = _compare_sources(settings_a.pop("sources"), settings_b.pop("sources"))
    return [*_compare(settings_a, settings_b), *sources]


def find_change(before: Blend, after: Blend) -> str | None:
    """Return the first difference between two blends, in words; None if they are the same."""
    if before == after:
        return None
    # The last row is for a field that no record of a blend has
    rows = [*compare_blends(before, after), ("blend", before, after)]
    changed = [row for row in rows if row[1] != row[2]]
    # A source that is removed or added changes the shares of the others
    what, old, new = next((row for row in changed if _PRESENT in row), changed[0])
    if what == _SEQUENCE:
        return "the sources are in another order"
    if what == "schedule":
        old = before.schedule
        new = after.schedule
    if old == _PRESENT:
        return f"{what} was removed"
    return f"{what} was added" if new == _PRESENT else f"{what} was {old} and is now {new}"


def _compare(a: dict[str, Any], b: dict[str, Any], of: str = "") -> list[Row]:
    """Return each key of two dicts, with its value in each.

    Args:
        of: text that is appended to the names of the keys.
    """
    return [(key + of, a.get(key), b.get(key)) for key in sorted(a.keys() | b.keys())]


def _compare_sources(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> list[Row]:
    """Return each setting of the sources of two blends with both values, and the sources that only
    one of the blends has. If both have the same sources, the order of the sources is compared,
    too."""
    by_name_a = {source["name"]: source for source in a}
    by_name_b = {source["name"]: source for source in b}
    names = list(dict.fromkeys([*by_name_a, *by_name_b]))
    compared = list[Row]()
    for name in names:
        source_a = by_name_a.get(name)
        source_b = by_name_b.get(name)
        if source_a is None or source_b is None:
            compared.append((f"source {name!r}", source_a and _PRESENT, source_b and _PRESENT))
        else:
            compared += _compare(source_a, source_b, f" of source {name!r}")
    if len(by_name_a) == len(names) == len(by_name_b):
        compared.append((_SEQUENCE, list(by_name_a), list(by_name_b)))
    return compared
