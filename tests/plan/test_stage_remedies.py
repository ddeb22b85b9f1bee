"""What messages about stages say to do is done, word for word; and then the run is planned, or the state is taken."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import megablend
from megablend.cli.main import cli
from tests.plan.test_blend_mistakes import apply

Change = dict[str, Any]
WEIGHTS: Change = {"s0": {"weight": 7}}
ONCE: Change = {"s0": {"max_epochs": 1}}
HEAVY: Change = {"sources": {"s0": {"weight": 9}}}


def stages(*listed: Change) -> Change:
    """Stages of which the last one says where the run ends."""
    return {"samples": None, "stages": list(listed)}


def to_end(**settings: Any) -> Change:
    """A first stage of 40 samples, and one to sample 200 with these settings."""
    return stages({"samples": 40}, {"samples": 200, **settings})


STAGES: dict[str, tuple[Change, str, list[Change]]] = {
    # what is requested, what is said, and requests that do what it says
    "a share of nothing": (
        {**to_end(sources=WEIGHTS), "s2": {"weight": 1e-6}},
        "source 's2' gets none of 200 samples: .*; give it a larger share, or a share of 0 in every stage$",
        [{**to_end(sources=WEIGHTS), "s2": {"weight": weight}} for weight in (1, 0)],
    ),
    "a cap": (
        to_end(sources=ONCE),
        r"96 samples of 8 tokens are requested, 25 are left; end the stage at sample 81 or before, raise the cap, give the "
        "source a smaller share, or set `on_exhausted: redistribute`$",
        [
            stages({"samples": 40}, {"samples": 81, "sources": ONCE}),
            to_end(sources={"s0": {"max_epochs": 3}}),
            to_end(sources={"s0": {"max_epochs": 1, "weight": 0.1}}),
            to_end(sources=ONCE) | {"on_exhausted": "redistribute"},
            to_end(sources=ONCE, on_exhausted="redistribute"),
        ],
    ),
    "redistribution without a cap": (
        to_end(on_exhausted="redistribute"),
        r"stages\[1\]: on_exhausted: without a cap .*; give max_epochs or max_tokens to at least one source, or remove on_ex",
        [
            to_end(on_exhausted="redistribute", sources=ONCE),
            to_end(on_exhausted="redistribute", sources={"s0": {"max_tokens": 400}}),
            to_end(sources=WEIGHTS),
        ],
    ),
    "a schedule without steps": (
        stages({"samples": 64}, {"samples": 80, "schedule": "linear", **HEAVY}),
        "has 16 samples, fewer than two cycles of 16 .*; end it later, or leave out schedule$",
        [
            stages({"samples": 64}, {"samples": 96, "schedule": "linear", **HEAVY}),
            stages({"samples": 64}, {"samples": 80, **HEAVY}),
        ],
    ),
    "a beginning outside the stage before": (
        stages({"samples": 100}, {"samples": 200, "from": 120, **HEAVY}),
        "from: found 120, expected a sample of the stage before it, 1 to 100$",
        [stages({"samples": 100}, {"samples": 200, "from": 100, **HEAVY})],
    ),
    "a beginning within a cycle": (
        stages({"samples": 100}, {"samples": 200, "from": 50, **HEAVY}),
        "from: found 50, expected 64, the end of a cycle of lanes x shuffle_window samples; `megablend amend CONFIG --at SAMPLE`",
        [stages({"samples": 100}, {"samples": 200, "from": 64, **HEAVY})],
    ),
    "an end before the beginning": (
        {**stages({"share": 0.001}, HEAVY), "tokens": 1600},
        r"stages\[0\]: it ends at sample 0, but begins at sample 0; end it later$",
        [{**stages({"share": 0.5}, HEAVY), "tokens": 1600}],
    ),
    "an interleaving": (
        {"interleaving": "x"},
        "interleaving: found 'x', expected one of lanes, sequential$",
        [{"interleaving": name} for name in ("lanes", "sequential")],
    ),
}


@pytest.mark.parametrize("name", STAGES)
def test_stages(base: Change, name: str) -> None:
    change, says, remedies = STAGES[name]
    with pytest.raises(megablend.MegablendError, match=says):
        megablend.describe(apply(base, change))
    for remedy in remedies:
        megablend.describe(apply(base, remedy))


@pytest.fixture
def committed(base: Change, tmp_path: Path) -> Change:
    """Run `built` of 200 samples in a cache of its own."""
    shutil.copytree(base["cache"], tmp_path / "cache")
    return base | {"cache": str(tmp_path / "cache"), "run": "built"}


def test_a_number_for_a_beginning_is_printed(committed: Change, tmp_path: Path) -> None:
    """By `amend`, whose number the config of a new run takes."""
    path, edited = tmp_path / "run.json", committed | stages({"samples": 200}, {"samples": 240, **HEAVY})
    del edited["samples"]
    path.write_text(json.dumps(edited))
    printed = CliRunner().invoke(cli, ["amend", str(path), "--at", "50"])
    written = re.search(r"write `from: (\d+)` into the stage", printed.output)
    assert written, printed.output
    second = edited["stages"][1] | {"from": int(written[1])}
    alone = edited | {"run": "alone", "stages": [edited["stages"][0], second]}
    assert megablend.build(alone).ledger.digest == megablend.open(edited).run.ledger.digest


def test_a_stage_that_was_built_keeps_its_end(committed: Change) -> None:
    """Its end is restored; or `amend` lets the next one begin earlier."""
    rest = {key: value for key, value in committed.items() if key != "samples"}
    two = rest | {"stages": [{"samples": 200}, {"samples": 240, **HEAVY}]}
    megablend.build(two)
    early = rest | {"stages": [{"samples": 96}, {"samples": 240, **HEAVY}]}
    says = r"its stage 0 ends at sample 200, .*; restore the stage's end, `samples: 200`; `megablend amend CONFIG --at SAMPLE`"
    with pytest.raises(megablend.PlanError, match=says):
        megablend.build(early)
    megablend.build(rest | {"stages": [{"samples": 200}, early["stages"][1]]})
    assert megablend.amend(two, at=96).at == 96


def test_a_state_of_a_stage_that_is_gone(committed: Change) -> None:
    """Amended twice; the state is of what the second amendment replaced."""
    rest = {key: value for key, value in committed.items() if key != "samples"}
    edited = rest | {"stages": [{"samples": 200}, {"samples": 240, **HEAVY}]}
    megablend.amend(edited, at=96)
    dataset = megablend.open(edited)
    states = {k: dataset.state_dict(k) for k in (64, 96, 120)}
    other = rest | {"stages": [{"samples": 200}, {"samples": 240, "lanes": 2}]}
    megablend.amend(other, at=64)
    says = "it was amended from sample 64 on; give a state of sample 96 or earlier"
    with pytest.raises(megablend.StateError, match=says):
        megablend.amend(other, state=states[120])
    assert megablend.amend(other, state=states[96], dry_run=True).at == 96
    says = "this state is of sample 96 .*: resume from a state of sample 64 or earlier, or amend the run from this state on"
    with pytest.raises(megablend.StateError, match=says):
        megablend.open(other, state=states[96])
    assert megablend.open(other, state=states[64]).consumed_samples == 64
    megablend.amend(other, state=states[96])
    assert megablend.open(other, state=states[96]).consumed_samples == 96


def test_a_split_of_one_pass_that_is_too_short(committed: Change) -> None:
    config = committed | {"run": "split", "sequence_length": 900, "split": "50,25,25"}
    megablend.build(config)
    says = r"'valid' has fewer tokens than one sample of 900 tokens \(703 tokens in all\): give it a larger share in `split`"
    with pytest.raises(megablend.PlanError, match=says):
        megablend.open(config, "valid")
    each = config | {"run": "each", "sequence_length": 700}
    megablend.build(each)
    with pytest.raises(
        megablend.PlanError, match=r"one sample of 700 tokens in each of its sources \(703 tokens in all\)"
    ):
        megablend.open(each, "valid")
    larger = config | {"split": "25,75,0", "run": "larger"}
    megablend.build(larger)
    assert len(megablend.open(larger, "valid")) > 0
    first, second = ({key: config["sources"][i][key] for key in ("name", "path", "column")} for i in (0, 2))
    listed = config | {"run": "listed", "sources": {"train": [second | {"weight": 1}], "valid": [first]}}
    del listed["split"]
    megablend.build(listed)
    with pytest.raises(megablend.PlanError, match=r"'valid' .* \(400 tokens in all\): add data to its sources"):
        megablend.open(listed, "valid")
    more = listed | {
        "run": "more",
        "sources": listed["sources"] | {"valid": [first | {"path": [first["path"], second["path"]]}]},
    }
    megablend.build(more)
    assert len(megablend.open(more, "valid")) == 2
