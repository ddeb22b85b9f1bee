"""What an amendment or a build would leave out of a run without a word: new data are refused, the rest is noted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import megablend
from megablend.errors import PlanError
from megablend.run.ledger_file import load_ledger
from tests.behaviour.test_new_data import STAGES, later, make_run, write_file

pytestmark = pytest.mark.long
CHANGE: dict[str, Any] = {"samples": 1600, "sources": {"s0": {"weight": 5}}}


def with_stages(config: dict[str, Any], *stages: dict[str, Any]) -> dict[str, Any]:
    return config | {"stages": list(stages)}


@pytest.fixture
def grown(tmp_path: Path) -> dict[str, Any]:
    """A run that reads new data from sample 320 to its end, sample 1600."""
    config = make_run(tmp_path)
    write_file(tmp_path, 1, "m00", later(1))
    edited = with_stages(config, *STAGES)
    megablend.build(edited)
    return edited


def refuse(call: Any, config: dict[str, Any], says: str, **arguments: Any) -> None:
    """The call is refused, and the run stays as it was."""
    before = load_ledger(config["cache"], "default")
    with pytest.raises(PlanError, match=says):
        call(config, **arguments)
    assert load_ledger(config["cache"], "default") == before


def test_a_later_stage_with_new_data_cannot_be_left_out(grown: dict[str, Any]) -> None:
    kept, left = load_indices(grown)
    edited = with_stages(grown, STAGES[0], CHANGE)
    says = (
        "run 'default' reads new data from sample 320 on, but the config lists no stage with `new_data` there: list "
        "that stage again after the one that you add, or first replace it by one without "
        r"`new_data` \(`megablend amend CONFIG --at 320`\)$"
    )
    state = megablend.open(grown).state_dict(100)
    refuse(megablend.amend, edited, says, at=112)
    refuse(megablend.amend, edited, says, at=112, dry_run=True)
    refuse(megablend.amend, edited, says, state=json.loads(json.dumps(state)))
    both = with_stages(grown, STAGES[0], CHANGE | {"samples": 640}, STAGES[1])
    megablend.amend(both, at=112)
    assert load_indices(grown) == (kept, left)
    megablend.amend(with_stages(grown, STAGES[0], STAGES[1]), at=64)  # which begins earlier
    # Given up where it begins
    megablend.amend(edited, at=64)
    assert load_indices(grown) == (kept,)


def test_new_data_that_a_state_did_not_see_cannot_be_left_out(
    tmp_path: Path, grown: dict[str, Any]
) -> None:
    """The state is past the amendment that brought them."""
    config = with_stages(grown, STAGES[0] | {"samples": 1600})
    other = config | {"run": "other"}
    megablend.build(other)
    state = json.loads(json.dumps(megablend.open(other).state_dict(200)))
    write_file(tmp_path, 0, "m00", later(0))
    new = with_stages(other, STAGES[0] | {"samples": 1600}, {"samples": 1600, "new_data": True})
    megablend.build_index(new)
    megablend.amend(new, at=112)
    edited = with_stages(other, STAGES[0] | {"samples": 1600}, CHANGE)
    before = load_ledger(other["cache"], "other")
    with pytest.raises(PlanError, match="reads new data from sample 112 on, but the config lists"):
        megablend.amend(edited, state=state)
    assert load_ledger(other["cache"], "other") == before
    assert megablend.amend(new, state=state, dry_run=True).at == 208
    megablend.amend(edited, at=112)
    assert megablend.amend(edited, state=state).at == 208


def load_indices(config: dict[str, Any]) -> tuple[str, ...]:
    ledger = load_ledger(config["cache"], "default")
    assert ledger is not None
    return ledger.indices


def test_new_data_of_a_stage_that_has_begun_cannot_be_lost(grown: dict[str, Any]) -> None:
    """The run would go on with its first index."""
    lost = with_stages(grown, STAGES[0], {"samples": 1600})
    says = (
        "run 'default' has already started, and its stage 1, from sample 320 on, reads new data, but the config does "
        "not set `new_data` there; put `new_data: true` back in that stage$"
    )
    change = CHANGE | {"samples": 3200}
    refuse(megablend.build, with_stages(grown, STAGES[0], {"samples": 3200}), says)
    refuse(megablend.build, with_stages(lost, *lost["stages"], change), says)
    refuse(megablend.amend, with_stages(lost, *lost["stages"], change), says, at=640)
    assert "put `new_data: true` back" in str(
        megablend.describe(with_stages(lost, *lost["stages"], change)).to_dict()["note"]
    )
    megablend.build(lost)  # as it is committed, nothing is lost
    megablend.build(with_stages(grown, *STAGES, change))
    assert len(load_indices(grown)) == 2


def test_new_data_of_a_stage_that_has_begun_cannot_be_moved(tmp_path: Path) -> None:
    """Neither to a later stage nor to an earlier one, though as many stages have it."""
    config = make_run(tmp_path)
    stages = [{"samples": 320}, {"samples": 640}, {"samples": 960}, {"samples": 1600}]
    megablend.build(with_stages(config, *stages[:2]))
    write_file(tmp_path, 1, "m00", later(1))
    new = [stage | {"new_data": True} for stage in stages]
    megablend.build(with_stages(config, *stages[:2], new[2], stages[3]))
    change = CHANGE | {"samples": 2400}
    for number in (1, 3):
        moved = [*stages[:number], new[number], *stages[number + 1 :]]
        says = (
            f"reads no new data from sample {stages[number - 1]['samples']} on, but the config sets"
        )
        refuse(megablend.build, with_stages(config, *moved, change), says)
        refuse(megablend.amend, with_stages(config, *moved, change), says, at=1200)
    # Where its stage begins may be rounded otherwise than it was by an earlier release
    megablend.build(with_stages(config, stages[0], {"samples": 632}, *new[2:3], stages[3], change))


@pytest.mark.parametrize("ends", [[320, 1600], [320, 2400], [300, 1600]])
def test_new_data_cannot_be_added_to_what_is_committed(tmp_path: Path, ends: list[int]) -> None:
    config = make_run(tmp_path)
    two = with_stages(config, STAGES[0], {"samples": 1600})
    megablend.build(two)
    write_file(tmp_path, 1, "m00", later(1))
    added = with_stages(config, {"samples": ends[0]}, {"samples": ends[1], "new_data": True})
    says = (
        rf"run 'default' has already started and reads no new data from sample {ends[0]} on, but the config sets `new_data` "
        "there; remove it there, and set it in a stage at the end, or in one that `megablend amend CONFIG --at SAMPLE` "
        "adds$"
    )
    refuse(megablend.build, added, says)
    change = CHANGE | {"samples": ends[1]}
    refuse(megablend.amend, with_stages(added, *added["stages"], change), says, at=640)
    further = {"samples": 2400, "new_data": True}
    megablend.build(with_stages(two, *two["stages"], further))
    assert len(load_indices(config)) == 2


def test_what_else_an_amendment_leaves_out_is_noted(grown: dict[str, Any]) -> None:
    other = with_stages(grown, {"samples": 320}, CHANGE, CHANGE | {"samples": 2000, "lanes": 8})
    other["run"] = "other"
    megablend.build(other)
    megablend.skip(other, 400, 440, batch_size=4)
    megablend.skip(other, 48, 64, batch_size=4)
    edited = with_stages(
        other, {"samples": 320}, {"samples": 2000, "sources": {"s1": {"weight": 7}}}
    )
    found = megablend.amend(edited, at=112, dry_run=True)
    assert found.note == (
        "the run no longer has the stages that began at samples 320, 1,600, whose settings the config does not list; "
        "samples 400 to 440 of the previous plan are no longer skipped"
    )
    kept = with_stages(
        edited, edited["stages"][0], edited["stages"][1] | {"samples": 400}, *other["stages"][1:]
    )
    found = megablend.amend(kept, at=112)
    assert found.note == "samples 400 to 440 of the previous plan are no longer skipped"
    assert megablend.open(kept).skips.ranges == ((48, 64),)
    assert megablend.amend(kept, at=112, dry_run=True).note is None


def test_that_a_run_was_extended_before_is_not_noted(tmp_path: Path) -> None:
    config = make_run(tmp_path)
    megablend.build(with_stages(config, {"samples": 320}))
    megablend.build(with_stages(config, {"samples": 640}))
    edited = with_stages(config, {"samples": 640}, CHANGE | {"samples": 800})
    assert megablend.amend(edited, at=112, dry_run=True).note is None


def test_a_return_to_the_settings_of_the_stage_that_is_cut_is_noted(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    first = {"samples": 320}
    changed = CHANGE | {"samples": 640}
    back = {"samples": 1600, "sources": {"s0": {"weight": run["sources"][0]["weight"]}}}
    config = with_stages(run, first, changed, back)
    megablend.build(config)
    edited = with_stages(config, first, changed | {"samples": 1600})
    found = megablend.amend(edited, at=112, dry_run=True)
    assert found.note == (
        "the run no longer has the stage that began at sample 640, whose settings the config does not list"
    )


def test_a_stage_before_new_data_that_an_amendment_leaves_out_is_noted(
    tmp_path: Path, grown: dict[str, Any]
) -> None:
    middle = {"samples": 800, "lanes": 8}
    config = with_stages(grown, STAGES[0], middle) | {"run": "other"}
    write_file(tmp_path, 0, "m00", later(0))
    megablend.build(config)
    write_file(tmp_path, 0, "m000", later(0, 20))
    both = with_stages(config, STAGES[0], middle, STAGES[1])
    megablend.build(both)
    edited = with_stages(config, STAGES[0], CHANGE | {"samples": 800}, STAGES[1])
    write_file(tmp_path, 0, "m0000", later(0, 30))
    megablend.build_index(edited)
    note = megablend.amend(edited, at=112, dry_run=True).note
    assert (
        note
        == "the run no longer has the stage that began at sample 320, whose settings the config does not list"
    )
    all_three = with_stages(config, STAGES[0], CHANGE | {"samples": 320}, middle, STAGES[1])
    assert megablend.amend(all_three, at=112, dry_run=True).note is None
