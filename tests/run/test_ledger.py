"""The ledger: stages append, the past is locked, and a damaged file is never taken for whole."""

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from megablend.caches.find import find_store
from megablend.errors import CacheError, PlanError
from megablend.run.ledger import Ledger
from megablend.run.ledger_file import list_runs, load_ledger, parse_blend, save_ledger
from megablend.run.ledger_format import blend_record, ledger_record, open_seal
from megablend.run.stage import Blend, SourceShare, Stage
from megablend.system.digest import digest_json

A = SourceShare(name="a", append_eod=None, share=Fraction(1, 2), cycles=1)
B = SourceShare(name="b", append_eod=0, share=Fraction(1, 2), cycles=3)
BLEND = Blend(
    split="train of 1,0,0",
    sequence_length=64,
    add_extra_token_to_sequence=True,
    sources=(A, B),
    interleaving="lanes",
    order="block",
    seed=1,
    lanes=8,
    shuffle_window=16,
)
RECORD: dict[str, Any] = {
    "split": "train of 1,0,0",
    "sequence_length": 64,
    "add_extra_token_to_sequence": True,
    "sources": [
        {"name": "a", "append_eod": None, "share": "1/2", "cycles": 1},
        {"name": "b", "append_eod": 0, "share": "1/2", "cycles": 3},
    ],
    "seed": 1,
    "order": "page",
    "lanes": 8,
    "cycle": 16,
}
"""As release 0.1.0 writes it."""


def ledger(*ends: int, blend: Blend = BLEND, index: str = "f" * 32) -> Ledger:
    return Ledger(
        run="demo", stages=tuple(Stage(end=end, index=index, blend=blend) for end in ends)
    )


def test_appending_keeps_the_digests_of_the_past() -> None:
    longer = ledger(100).extend(ledger(250))
    assert longer.ends == (100, 250)
    assert longer.digests[0] == ledger(100).digest
    assert longer.digest != ledger(250).digest
    assert ledger(100).extend(ledger(100)) == ledger(100)
    assert longer.until(100) == ledger(100)
    assert longer.until(101) == longer


def test_a_sample_is_in_the_first_stage_that_ends_after_it() -> None:
    found = ledger(3, 8, 9)
    cut = found.stages[1]
    found = replace(found, stages=(found.stages[0], replace(cut, cut=3), found.stages[2]))
    assert found.ends == (3, 3, 9)
    for sample in range(12):
        after = [stage for stage in found.stages if sample < stage.stop] or found.stages[-1:]
        assert found.stage_at(sample) is after[0]


def test_the_record_and_the_digests_are_those_of_release_0_1_0() -> None:
    first = digest_json([1, "f" * 32, RECORD])
    digests = [digest_json([first, 100]), digest_json([digest_json([first, 100]), 250])]
    assert list(ledger(100, 250).digests) == digests
    record = {
        "version": 1,
        "run": "demo",
        "index": "f" * 32,
        "ends": [100, 250],
        "digests": digests,
        "blend": RECORD,
    }
    # In this order
    assert json.dumps(ledger_record("demo", ledger(100, 250).stages)) == json.dumps(record)
    document = blend_record(replace(BLEND, order="document", plan_version=2))
    assert (document["order"], document["plan"]) == ("row", 2)


def test_an_unblended_split_is_described_by_its_sources_alone() -> None:
    sources = tuple(SourceShare(name=each.name, append_eod=each.append_eod) for each in (A, B))
    blend = Blend(
        split="valid of 1,0,0",
        sequence_length=64,
        add_extra_token_to_sequence=True,
        sources=sources,
    )
    assert blend_record(blend) == {
        "split": "valid of 1,0,0",
        "sequence_length": 64,
        "add_extra_token_to_sequence": True,
        "sources": [{"name": "a", "append_eod": None}, {"name": "b", "append_eod": 0}],
    }
    # Other keys, whose values are not checked, are not taken
    record = blend_record(blend) | {"lanes": "x", "interleaving": "none", "plan": "y", "order": 1}
    assert parse_blend(record, may_be_unblended=True) == blend


def test_another_index_or_blend_is_another_digest() -> None:
    others = [
        replace(BLEND, interleaving="sequential"),
        replace(BLEND, order="reversed"),
        replace(BLEND, lanes=9),
    ]
    ledgers = [
        ledger(100),
        ledger(100, index="e" * 32),
        ledger(101),
        *(ledger(100, blend=blend) for blend in others),
    ]
    assert len({each.digest for each in ledgers}) == len(ledgers)


def test_a_stage_of_another_blend_is_a_link_of_its_own() -> None:
    stages = ledger(100, 200).stages
    changed = replace(stages[1], blend=replace(BLEND, lanes=4))
    found = Ledger(run="demo", stages=(stages[0], changed)).digests
    assert found[0] == ledger(100).digest
    assert found[1] not in {
        *ledger(100, 200).digests,
        *ledger(100, 200, blend=changed.blend).digests,
    }
    moved = Stage(end=200, index="e" * 32, blend=BLEND)
    assert Ledger(run="demo", stages=(stages[0], moved)).digest not in {
        ledger(100, 200).digest,
        found[1],
    }


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": 2}, "seed was 1 and is now 2"),
        ({"shuffle_window": 8}, "shuffle_window was 16 and is now 8"),
        ({"sources": (A,)}, "source 'b' was removed"),
        ({"sources": (replace(A, share=Fraction(1)),)}, "source 'b' was removed"),
        (
            {"sources": tuple(replace(A, name=n, share=Fraction(1, 3)) for n in "abc")},
            "source 'c' was added",
        ),
        (
            {"sources": (replace(A, share=Fraction(2, 3)), B)},
            "share of source 'a' was 1/2 and is now 2/3",
        ),
        ({"sources": (B, A)}, "the sources are in another order"),
    ],
)
def test_another_blend_is_refused_with_the_reason(change: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=f"has already started, so its order is fixed: {says}"):
        ledger(100).extend(ledger(200, blend=replace(BLEND, **change)))


def test_shortening_is_refused() -> None:
    with pytest.raises(
        PlanError,
        match="built for 100 samples, but 99 are now requested; a run can only be extended",
    ):
        ledger(100).extend(ledger(99))


def test_saved_and_loaded(tmp_path: Path) -> None:
    assert load_ledger(str(tmp_path), "demo") is None
    for blend in (
        BLEND,
        replace(BLEND, order="document", interleaving="sequential", plan_version=2),
    ):
        replaced = load_ledger(str(tmp_path), "demo")
        save_ledger(str(tmp_path), ledger(100, 200, blend=blend), replaces=replaced)
        assert load_ledger(str(tmp_path), "demo") == ledger(100, 200, blend=blend)
        assert list_runs(find_store(tmp_path)) == [ledger(100, 200, blend=blend)]


def test_the_version_of_the_plan_is_part_of_the_blend(tmp_path: Path) -> None:
    first = ledger(100)
    second = first.in_version(2)
    assert (first.plan_version, second.plan_version) == (1, 2)
    assert second.digest != first.digest
    assert second.in_version(1) == first
    sources = (SourceShare(name="a", append_eod=None),)
    unblended = ledger(
        100,
        blend=Blend(
            split="test", sequence_length=8, add_extra_token_to_sequence=True, sources=sources
        ),
    )
    assert unblended.in_version(2) == unblended


@pytest.mark.parametrize("version", [3, 0, "2", None, 2.0])
def test_a_newer_version_of_the_plan_is_refused(tmp_path: Path, version: Any) -> None:
    record = ledger_record("demo", ledger(100).stages)
    record["blend"] |= {"plan": version, "key of that version": 1}
    write(tmp_path, record)
    with pytest.raises(
        CacheError,
        match=f"found plan version {version!r}, expected 2 or an earlier one; use the version of megabl",
    ):
        load_ledger(str(tmp_path), "demo")


def test_cycles_are_those_of_the_ledger() -> None:
    def dealt(*cycles: int) -> Ledger:
        return ledger(
            100,
            blend=replace(
                BLEND,
                sources=tuple(replace(A, name=str(i), cycles=n) for i, n in enumerate(cycles)),
            ),
        )

    assert [
        source.cycles for source in dealt(9, 9, 9).with_cycles_of(dealt(7, 7)).blend.sources
    ] == [7, 7, 9]


def write(folder: Path, record: dict[str, Any]) -> None:
    (folder / "runs").mkdir(exist_ok=True)
    (folder / "runs" / "demo.json").write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda text: text[:-20], "checksum is damaged"),
        (lambda text: open_seal(text)[0][:-20], "cannot read the run's ledger"),
        (lambda text: text.replace("200", "300"), "does not match its checksum"),
        (lambda text: text.replace('"skips"', '"skipS"'), "checksum is damaged"),
        (lambda text: text.replace('"checksum"', '"checkrum"'), "checksum is damaged"),
        (lambda text: open_seal(text)[0].replace("200", "300"), "does not match its own digest"),
        (
            lambda text: open_seal(text)[0].replace('"1/2"', '"1/3"'),
            "does not match its own digest",
        ),
        (
            lambda text: json.dumps(json.loads(open_seal(text)[0]) | {"version": 9}),
            "version 9, expected 1 to 5; use the version of megablend",
        ),
        (
            lambda text: "[]",
            r"found ledger version \[\], expected 1 to 5; restore it from a backup, or reset the run",
        ),
        (
            lambda text: "{}",
            "found ledger version None, expected 1 to 5; restore it from a backup, or reset the run",
        ),
        (lambda text: json.dumps({"version": 1}), "does not match its own digest"),
    ],
)
def test_damaged_ledgers_are_refused(tmp_path: Path, damage: Any, says: str) -> None:
    save_ledger(str(tmp_path), ledger(100, 200))
    path = tmp_path / "runs" / "demo.json"
    path.write_text(damage(path.read_text()))
    with pytest.raises(CacheError, match=says):
        load_ledger(str(tmp_path), "demo")


@pytest.mark.parametrize(
    "change",
    [
        {"sources": []},
        {"sources": [RECORD["sources"][0] | {"share": "1e999999999"}]},
        {"sources": [RECORD["sources"][0] | {"share": "1/0"}]},
        {"sources": [RECORD["sources"][0] | {"share": "-1/2"}]},
        {"sources": [RECORD["sources"][0] | {"append_eod": "0"}]},
        {"sources": [RECORD["sources"][0] | {"cycles": "1"}]},
        {"sources": [RECORD["sources"][0] | {"cycles": 0}]},
        {"sources": [RECORD["sources"][0] | {"cycles": 33}]},
        {"sources": {"name": "a"}},
        {"seed": "1"},
        {"lanes": True},
        {"add_extra_token_to_sequence": 1},
        {"a key of another release": 1},
    ],
)
def test_ledgers_whose_digests_fit_are_refused_where_their_blends_make_no_sense(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    record = ledger_record("demo", ledger(100).stages) | {"blend": RECORD | change}
    record["digests"] = [digest_json([digest_json([1, "f" * 32, record["blend"]]), 100])]
    write(tmp_path, record)
    with pytest.raises(CacheError, match="does not match its own digest"):
        load_ledger(str(tmp_path), "demo")
