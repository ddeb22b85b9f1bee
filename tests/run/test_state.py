"""The state: small, plain, and refused where it is of another run."""

import json
from typing import Any

import pytest

from megablend.errors import StateError
from megablend.run.links import Link
from megablend.run.state import State

STATE = State(
    run="demo",
    split="train",
    indices=("a" * 32,),
    stages=(Link(100, "b" * 32), Link(200, "c" * 32)),
    consumed_samples=150,
)


def test_round_trip_under_a_kilobyte() -> None:
    text = json.dumps(STATE.to_dict())
    assert State.from_dict(json.loads(text)) == STATE
    assert len(text) < 1000
    longer = State(
        run="demo",
        split="train",
        indices=("a" * 32,),
        stages=(Link(10**13, "b" * 32),) * 2,
        consumed_samples=0,
    )
    longest = State(
        run="demo",
        split="train",
        indices=("a" * 32,),
        stages=(Link(10**13, "b" * 32),) * 102,
        consumed_samples=0,
    )
    assert len(json.dumps(longest.to_dict())) - len(json.dumps(longer.to_dict())) <= 60 * 100


def test_stages_appended_since_are_fine() -> None:
    STATE.check(split="train", indices=("a" * 32,), stages=[*STATE.stages, Link(300, "d" * 32)])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"split": "valid"}, "to split 'train', but this dataset is split 'valid'"),
        (
            {"indices": ("e" * 32,)},
            f"of index {'a' * 32}, but this dataset has plan {'c' * 32} of index {'e' * 32}; .*megablend.open",
        ),
        (
            {"stages": (Link(100, "b" * 32), Link(200, "d" * 32))},
            f"saved with plan {'c' * 32} of .*, but this dataset has plan {'d' * 32}",
        ),
        (
            {"stages": (Link(100, "b" * 32),)},
            f"saved with plan {'c' * 32} of .*, but this dataset has plan {'b' * 32}",
        ),
    ],
)
def test_another_run_is_refused_with_both_digests(change: dict[str, Any], says: str) -> None:
    with pytest.raises(StateError, match=says):
        STATE.check(**({"split": "train", "indices": ("a" * 32,), "stages": STATE.stages} | change))


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({}, "not a megablend state"),
        ({"epoch": 3}, "not a megablend state"),
        (STATE.to_dict() | {"version": 2}, "found state version 2, expected 1"),
        ({k: v for k, v in STATE.to_dict().items() if k != "stages"}, "KeyError 'stages'"),
        (STATE.to_dict() | {"stages": []}, "`plan`, `stages` and `consumed_samples` do not"),
        (STATE.to_dict() | {"plan": "0" * 32}, "`plan`, `stages` and `consumed_samples` do not"),
        (
            STATE.to_dict() | {"consumed_samples": -1},
            "`plan`, `stages` and `consumed_samples` do not",
        ),
        (STATE.to_dict() | {"consumed_samples": "many"}, "TypeError"),
        (STATE.to_dict() | {"consumed_samples": 2.7}, "TypeError"),
    ],
)
def test_what_is_no_state_is_refused(state: dict[str, Any], says: str) -> None:
    with pytest.raises(StateError, match=says):
        State.from_dict(state)
    assert State.from_dict(STATE.to_dict()) == STATE  # "load another checkpoint"
