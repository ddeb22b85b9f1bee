"""The ledger: stages append, the past is locked, and a damaged file is never taken for whole."""

import json
from pathlib import Path
from typing import Any

import pytest

from megablend.errors import CacheError, PlanError
from megablend.plan.ledger import Ledger, list_runs, load_ledger, save_ledger

BLEND: dict[str, Any] = {
    "seed": 1,
    "lanes": 8,
    "sources": [{"name": "a", "share": "1/2"}, {"name": "b", "share": "1/2"}],
}


def ledger(*ends: int) -> Ledger:
    return Ledger(run="demo", index="f" * 32, blend=BLEND, ends=ends)


def test_appending_keeps_the_digests_of_the_past() -> None:
    longer = ledger(100).extended(BLEND, 250)
    assert longer.ends == (100, 250)
    assert longer.digests[0] == ledger(100).digest
    assert longer.digest != ledger(250).digest
    assert ledger(100).extended(BLEND, 100) == ledger(100)


def test_another_index_or_blend_is_another_digest() -> None:
    other = Ledger(run="demo", index="e" * 32, blend=BLEND, ends=(100,))
    assert len({ledger(100).digest, other.digest, ledger(101).digest}) == 3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": 2}, "seed was 1, is 2"),
        ({"sources": BLEND["sources"][:1]}, "source 'b' is gone"),
        ({"sources": [*BLEND["sources"], {"name": "c"}]}, "source 'c' is new"),
        ({"sources": [{"name": "a", "share": "2/3"}, BLEND["sources"][1]]}, "share of source 'a' was 1/2, is 2/3"),
        ({"sources": BLEND["sources"][::-1]}, "the sources are in another order"),
    ],
)
def test_another_blend_is_refused_with_the_reason(change: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        ledger(100).extended(BLEND | change, 200)


def test_shortening_is_refused() -> None:
    with pytest.raises(PlanError, match="promised 100 samples, now 99 are asked for; a run can only be lengthened"):
        ledger(100).extended(BLEND, 99)


def test_saved_and_loaded(tmp_path: Path) -> None:
    assert load_ledger(str(tmp_path), "demo") is None
    save_ledger(str(tmp_path), ledger(100, 200))
    assert load_ledger(str(tmp_path), "demo") == ledger(100, 200)
    assert list_runs(str(tmp_path)) == [ledger(100, 200)]


def test_the_version_of_the_plan_is_part_of_the_blend(tmp_path: Path) -> None:
    first = ledger(100)
    second = first.in_version(2)
    assert (first.plan_version, second.plan_version) == (1, 2)
    assert second.digest != first.digest
    assert second.in_version(1) == first
    unblended = Ledger(run="demo", index="f" * 32, blend={"sources": []}, ends=(100,))
    assert unblended.in_version(2) == unblended
    save_ledger(str(tmp_path), second)
    assert load_ledger(str(tmp_path), "demo") == second


@pytest.mark.parametrize("version", [3, 0, "2", None])
def test_a_newer_version_of_the_plan_is_refused(tmp_path: Path, version: Any) -> None:
    save_ledger(str(tmp_path), Ledger(run="demo", index="f" * 32, blend=BLEND | {"plan": version}, ends=(100,)))
    with pytest.raises(
        CacheError, match=f"found plan version {version!r}, expected 2 or an earlier one; use the megabl"
    ):
        load_ledger(str(tmp_path), "demo")


def test_cycles_are_those_of_the_ledger() -> None:
    names = ("a", "b", "c")
    promised, chosen = (
        Ledger(
            run="demo",
            index="f" * 32,
            blend={"sources": [{"name": name, "cycles": cycles} for name in listed]},
            ends=(100,),
        )
        for cycles, listed in ((7, names[:2]), (9, names))
    )
    assert [source["cycles"] for source in chosen.with_cycles_of(promised).blend["sources"]] == [7, 7, 9]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda text: text[:-20], "cannot read the run's ledger"),
        (lambda text: text.replace("200", "300"), "does not match its own digest"),
        (lambda text: text.replace('"1/2"', '"1/3"'), "does not match its own digest"),
        (lambda text: json.dumps(json.loads(text) | {"version": 9}), "found ledger version 9, expected 1"),
        (lambda text: "[]", "found ledger version"),
        (lambda text: json.dumps({"version": 1}), "does not match its own digest"),
    ],
)
def test_damaged_ledgers_are_refused(tmp_path: Path, damage: Any, says: str) -> None:
    save_ledger(str(tmp_path), ledger(100, 200))
    path = tmp_path / "runs" / "demo.json"
    path.write_text(damage(path.read_text()))
    with pytest.raises(CacheError, match=says):
        load_ledger(str(tmp_path), "demo")
