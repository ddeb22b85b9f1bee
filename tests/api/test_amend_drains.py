"""Amendments after amendments, and where samples get another length: stages begin after what is left of those before them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megablend
from megablend.errors import PlanError
from megablend.plan.run import Run
from tests.runs import make_config, write_blend

FIRST: dict[str, Any] = {"samples": 640}
LONGER: dict[str, Any] = {"samples": 1200, "sequence_length": 12, "sources": {"s0": {"weight": 1}, "s2": {"weight": 2}}}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return write_blend(tmp_path_factory.mktemp("drains"), 3, 1, 0)


@pytest.fixture
def config(tmp_path: Path, data: list[dict[str, Any]]) -> dict[str, Any]:
    return make_config(tmp_path, data)


def check_run(config: dict[str, Any], left: tuple[int, ...] = ()) -> Run:
    """The opened run, of which every source's samples cover its tokens, none twice, and without a gap but for sources `left`."""
    run = megablend.open(config).run
    plan = run.plan
    assert plan.num_samples == run.num_samples
    sources, ordinals = plan.locate_many(np.arange(plan.num_samples))
    assert np.array_equal(plan.samples_of(sources, ordinals), np.arange(plan.num_samples))
    starts, steps = plan.token_ranges(sources, ordinals)
    steps = np.broadcast_to(steps, starts.shape)
    for source in range(plan.num_sources):
        of_source = np.flatnonzero(sources == source)
        of_source = of_source[np.argsort(starts[of_source])]
        stops = starts[of_source] + steps[of_source]
        assert not len(of_source) or starts[of_source[0]] == 0
        gaps = starts[of_source[1:]] - stops[:-1]
        assert (gaps >= 0).all(), source
        assert source in left or not gaps.any(), source
    return run


def test_the_config_alone_rebuilds_a_run_with_a_drain(config: dict[str, Any], tmp_path: Path) -> None:
    """A later cut is at the end of a cycle as they are counted after the drain."""
    megablend.build(config | {"stages": [FIRST]})
    first = megablend.amend(config | {"stages": [FIRST, LONGER]}, at=100)
    assert (first.at, first.drain) == (112, 330)
    stages = [FIRST, LONGER, {"samples": 1200, "sources": {"s1": {"weight": 5}}}]
    second = megablend.amend(config | {"stages": stages}, at=500)
    assert (second.at - 112 - 330) % 16 == 0
    run = check_run(config | {"stages": stages})
    written = [FIRST, LONGER | {"from": first.at}, stages[2] | {"from": second.at}]
    other = config | {"cache": str(tmp_path / "other"), "stages": written}
    assert megablend.build(other).ledger == run.ledger
    wrong = other | {"cache": str(tmp_path / "wrong"), "stages": [*written[:2], stages[2] | {"from": 112 + 25 * 16}]}
    with pytest.raises(PlanError, match="from: found 512, expected 522, the end of a cycle"):
        megablend.build(wrong)


def test_a_cut_of_a_lengthened_run(config: dict[str, Any]) -> None:
    """The part that was built later counts its cycles from where the first part ended."""
    megablend.build(config | {"samples": 100})
    stages: list[dict[str, Any]] = [{"samples": 1280}, {"samples": 1280, "from": 320, "sources": {"s2": {"weight": 2}}}]
    with pytest.raises(PlanError, match="from: found 320, expected 324, the end of a cycle"):
        megablend.build(config | {"stages": stages})
    stages[1]["from"] = 324
    assert megablend.build(config | {"stages": stages}).ledger.ends == (100, 324, 1280)
    check_run(config | {"stages": stages})


def test_an_amendment_where_a_lengthened_run_was_continued(config: dict[str, Any]) -> None:
    megablend.build(config | {"samples": 100})
    megablend.build(config | {"samples": 640})
    stages: list[dict[str, Any]] = [FIRST, {"samples": 960, "sources": {"s2": {"weight": 2}}}]
    with pytest.raises(megablend.ConfigError, match=r"no stage that begins at sample 100 .* and `from: 100`"):
        megablend.amend(config | {"stages": stages}, at=97)
    stages[1]["from"] = 100
    assert megablend.amend(config | {"stages": stages}, at=97).at == 100
    check_run(config | {"stages": stages})


def test_a_schedule_after_a_drain(config: dict[str, Any]) -> None:
    """Its steps divide what is left after the drain; the last one is read to its end."""
    megablend.build(config | {"stages": [FIRST]})
    stages = [FIRST, LONGER | {"samples": 3200, "schedule": "linear", "steps": 4}]
    assert megablend.amend(config | {"stages": stages}, at=100).samples == 3200
    run = check_run(config | {"stages": stages})
    steps = [each for each in run.plan.list_stretches() if each.stage == 1]
    assert (steps[0].start, steps[-1].stop) == (112 + 330, 3200)


def test_an_amendment_right_after_a_drain(config: dict[str, Any]) -> None:
    config |= {"lanes": 4}
    megablend.build(config | {"samples": 80})
    megablend.build(config | {"samples": 800})
    stages: list[dict[str, Any]] = [
        {"samples": 800},
        {"samples": 1600, "sequence_length": 4, "shuffle_window": 1},
        {"samples": 2000, "shuffle_window": 2},
    ]
    first = megablend.amend(config | {"stages": stages[:2]}, at=16)
    assert first.drain == 64
    assert megablend.amend(config | {"stages": stages}, at=first.at + first.drain + 1).at == 84
    check_run(config | {"stages": stages})


def test_a_run_whose_length_is_no_multiple_of_lanes(config: dict[str, Any]) -> None:
    """It is amended as it was built, and other commands know the run afterwards."""
    config |= {"lanes": 6}
    megablend.build(config | {"samples": 100})
    stages: list[dict[str, Any]] = [{"samples": 100}, {"samples": 400, "sources": {"s2": {"weight": 2}}}]
    assert megablend.amend(config | {"stages": stages}, at=20).at == 24
    check_run(config | {"stages": stages})
    assert megablend.show(config["cache"], 3, run="default")
    assert not megablend.list_skips(config["cache"], run="default")["skips"]
    stages.append({"samples": 400, "sources": {"s1": {"weight": 9}}})
    assert megablend.amend(config | {"stages": stages}, at=200).at == 216
    check_run(config | {"stages": stages}, left=(0, 1, 2))


@pytest.mark.parametrize("max_epochs", [1.5, 2])
def test_redistribution_after_a_drain(config: dict[str, Any], max_epochs: float) -> None:
    capped = config["sources"][0] | {"max_epochs": 100}
    config |= {"on_exhausted": "redistribute", "sources": [capped, *config["sources"][1:]]}
    megablend.build(config | {"stages": [FIRST]})
    sources = {"s0": {"weight": 3, "max_epochs": max_epochs}, "s1": {"weight": 1}, "s2": {"weight": 1}}
    stages = [FIRST, {"samples": 900, "sequence_length": 12, "sources": sources}]
    found = megablend.amend(config | {"stages": stages}, at=100)
    assert found.drain > 0
    assert max_epochs - 0.01 < found.sources[0].after.epochs <= max_epochs
    check_run(config | {"stages": stages})


def test_tokens_of_a_drain_count(config: dict[str, Any]) -> None:
    megablend.build(config | {"stages": [FIRST]})
    stages = [FIRST, {"tokens": 20_000, "sequence_length": 32, "sources": {"s2": {"weight": 2}}}]
    assert megablend.amend(config | {"stages": stages}, at=100).drain > 0
    run = check_run(config | {"stages": stages})
    assert 20_000 - 32 < run.plan.count_tokens(run.num_samples).sum() <= 20_000


def test_the_description_of_a_stage_that_begins_with_a_drain(config: dict[str, Any]) -> None:
    megablend.build(config | {"stages": [FIRST]})
    edited = config | {"stages": [FIRST, LONGER]}
    found = megablend.amend(edited, at=100)
    train = megablend.describe(edited)["splits"]["train"]
    tokens = [sum(each["tokens"] for each in stage["sources"]) for stage in train["stages"]]
    assert tokens == [112 * 8, found.drain * 8 + (1200 - 112 - found.drain) * 12]
    assert sum(tokens) == train["tokens"]


def test_caps_of_a_stage_that_is_cut(config: dict[str, Any]) -> None:
    """What it would have read beyond the cut does not count."""
    megablend.build(config | {"stages": [FIRST]})
    without = {"s0": {"weight": 0}, "s1": {"weight": 3}, "s2": {"weight": 3}}
    stages = [FIRST | {"sources": {"s0": {"max_epochs": 1}}}, {"samples": 640, "sources": without}]
    assert megablend.amend(config | {"stages": stages}, at=100).at == 112
    check_run(config | {"stages": stages}, left=(0,))


def test_a_drain_is_read_in_the_settings_before(config: dict[str, Any]) -> None:
    """Where masks change, a section that holds a drain knows the lanes that it is read in."""
    megablend.build(config | {"lanes": 16, "stages": [FIRST]})
    stages = [FIRST, LONGER | {"lanes": 2, "eod_mask_loss": True}]
    edited = config | {"lanes": 16, "eod_token": 0, "stages": stages}
    found = megablend.amend(edited, at=100)
    assert found.drain > 0
    run = megablend.open(edited).run
    views = [run.view(section) for section in run.sections]
    assert [[blend.lanes for blend in view.blends] for view in views] == [[16], [16], [2]]


def test_a_drain_reads_what_was_begun_before_a_lower_cap(config: dict[str, Any]) -> None:
    """A stage without a source may cap it at less than was read before; what its lanes have begun is read to its end."""
    without = {"samples": 800, "sources": {"s1": {"weight": 0, "max_epochs": 0.5}, "s2": {"weight": 1}}}
    stages = [FIRST, without, LONGER | {"sources": {"s1": {"weight": 1, "max_epochs": None}}}]
    megablend.build(config | {"stages": stages[:1]})
    megablend.amend(config | {"stages": stages[:2]}, at=600)
    assert megablend.amend(config | {"stages": stages}, at=700).drain
    run = check_run(config | {"stages": stages})
    drained = next(each for each in run.plan.list_stretches() if each.start == 704)
    assert drained.read[1] > 0
