"""Amendments after amendments, and where samples get another length: stages begin after what is left of those before them."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner

import megablend
from megablend.cli.main import cli
from megablend.errors import PlanError
from megablend.run.ledger_file import parse_ledger
from megablend.run.ledger_format import chain_digests, ledger_record
from megablend.run.plan_stages import plan_stages
from megablend.run.run import Run
from tests.cases import others_slow
from tests.golden_releases import copy_release
from tests.runs import make_config, read_samples, write_blend

FIRST: dict[str, Any] = {"samples": 640}
LONGER: dict[str, Any] = {
    "samples": 1200,
    "sequence_length": 12,
    "sources": {"s0": {"weight": 1}, "s2": {"weight": 2}},
}


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
    assert np.array_equal(plan.find_samples(sources, ordinals), np.arange(plan.num_samples))
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


def test_the_config_alone_rebuilds_a_run_with_a_drain(
    config: dict[str, Any], tmp_path: Path
) -> None:
    """A later cut is at the end of a cycle as they are counted after the drain."""
    megablend.build(config | {"stages": [FIRST]})
    first = megablend.amend(config | {"stages": [FIRST, LONGER]}, at=100)
    assert (first.at, first.drain, first.drain_settings) == (
        112,
        400,
        ({"from": 112, "drain": 400},),
    )
    stages = [FIRST, LONGER, {"samples": 2000, "sources": {"s1": {"weight": 5}}}]
    second = megablend.amend(config | {"stages": stages}, at=500)
    assert (second.at - 112 - 400) % 16 == 0
    run = check_run(config | {"stages": stages})
    written = [FIRST, LONGER | {"from": first.at, "drain": 400}, stages[2] | {"from": second.at}]
    other = config | {"cache": str(tmp_path / "other"), "stages": written}
    assert megablend.build(other).ledger == run.ledger
    wrong = other | {
        "cache": str(tmp_path / "wrong"),
        "stages": [*written[:2], stages[2] | {"from": 112 + 33 * 16 + 1}],
    }
    with pytest.raises(PlanError, match="from: found 641, expected 656, the end of a cycle"):
        megablend.build(wrong)


def test_a_cut_of_a_lengthened_run(config: dict[str, Any]) -> None:
    """The part that was built later counts its cycles from where the first part ended."""
    megablend.build(config | {"samples": 100})
    stages: list[dict[str, Any]] = [
        {"samples": 1280},
        {"samples": 1280, "from": 320, "sources": {"s2": {"weight": 2}}},
    ]
    with pytest.raises(PlanError, match="from: found 320, expected 324, the end of a cycle"):
        megablend.build(config | {"stages": stages})
    stages[1]["from"] = 324
    assert megablend.build(config | {"stages": stages}).ledger.ends == (100, 324, 1280)
    check_run(config | {"stages": stages})


def test_an_amendment_where_a_lengthened_run_was_continued(config: dict[str, Any]) -> None:
    megablend.build(config | {"samples": 100})
    megablend.build(config | {"samples": 640})
    stages: list[dict[str, Any]] = [FIRST, {"samples": 960, "sources": {"s2": {"weight": 2}}}]
    with pytest.raises(
        megablend.ConfigError, match=r"no stage that begins at sample 100 .* and `from: 100`"
    ):
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
    steps = [each for each in run.plan.stages if each.number == 1]
    assert (steps[0].start, steps[-1].stop) == (112 + 400, 3200)


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
    stages: list[dict[str, Any]] = [
        {"samples": 100},
        {"samples": 400, "sources": {"s2": {"weight": 2}}},
    ]
    assert megablend.amend(config | {"stages": stages}, at=20).at == 24
    check_run(config | {"stages": stages})
    assert megablend.show(config["cache"], 3, run="default")
    assert not megablend.list_skips(config["cache"], run="default").to_dict()["skips"]
    stages.append({"samples": 400, "sources": {"s1": {"weight": 9}}})
    assert megablend.amend(config | {"stages": stages}, at=200).at == 216
    check_run(config | {"stages": stages}, left=(0, 1, 2))


@pytest.mark.parametrize("max_epochs", [1.5, 2])
def test_redistribution_after_a_drain(config: dict[str, Any], max_epochs: float) -> None:
    capped = config["sources"][0] | {"max_epochs": 100}
    config |= {"on_exhausted": "redistribute", "sources": [capped, *config["sources"][1:]]}
    megablend.build(config | {"stages": [FIRST]})
    sources = {
        "s0": {"weight": 3, "max_epochs": max_epochs},
        "s1": {"weight": 1},
        "s2": {"weight": 1},
    }
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
    train = megablend.describe(edited).to_dict()["splits"]["train"]
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
    without = {
        "samples": 800,
        "sources": {"s1": {"weight": 0, "max_epochs": 0.5}, "s2": {"weight": 1}},
    }
    stages = [FIRST, without, LONGER | {"sources": {"s1": {"weight": 1, "max_epochs": None}}}]
    megablend.build(config | {"stages": stages[:1]})
    megablend.amend(config | {"stages": stages[:2]}, at=600)
    assert megablend.amend(config | {"stages": stages}, at=700).drain
    run = check_run(config | {"stages": stages})
    drained = next(each for each in run.plan.stages if each.start == 704)
    assert drained.read[1] > 0


def walk(dataset: megablend.Dataset, totals: np.ndarray[Any, np.dtype[np.int64]], at: int) -> None:
    """Check what a run with a drain reads, sample by sample: each token once an epoch, and the totals of the drain, evenly."""
    drain = int(totals.sum())
    samples = read_samples(dataset)
    lengths = [len(sample.tokens) - 1 for sample in samples]
    assert lengths == [8] * (at + drain) + [12] * (len(samples) - at - drain)
    for source in range(len(totals)):
        counts = Counter(
            t for sample in samples if sample.source == source for t in sample.tokens[:-1].tolist()
        )
        if counts:
            assert max(counts.values()) - min(counts.values()) <= 1
    blend = dataset.run.ledger.stages[0].blend
    read = np.array(
        [[sample.source == source for source in range(len(totals))] for sample in samples]
    ).astype(int)
    inside = read[at : at + drain]
    assert (inside.sum(axis=0) == totals).all()
    for begin in range(0, drain, blend.lanes):
        step = inside[begin : begin + blend.lanes].sum(axis=0)
        short = (
            begin
            >= drain // (blend.lanes * blend.shuffle_window) * blend.lanes * blend.shuffle_window
        )
        assert np.abs(step - totals / drain * min(blend.lanes, drain - begin)).max() <= (
            4 if short else 2
        )


@pytest.mark.long
@pytest.mark.parametrize("seed", others_slow(range(12), quick=(2, 3, 6, 9)))
def test_a_drain_continues_the_stage_before(
    config: dict[str, Any], tmp_path: Path, seed: int
) -> None:
    """In its shares, no longer than it must be, to where steps and lanes end; the config alone makes it again."""
    rng = random.Random(seed)
    weights = [rng.randint(1, 8) for _ in range(3)]
    lanes = rng.choice([4, 6, 8, 16])
    later = rng.choice([4, 6, 8])
    batch = rng.choice([None, 8, 12, 24])
    sources = [
        each | {"weight": weight} for each, weight in zip(config["sources"], weights, strict=True)
    ]
    config |= {"lanes": lanes, "shuffle_window": 16, "sources": sources}
    megablend.build(config | {"samples": 2000})
    longer = {
        "samples": 6000,
        "sequence_length": 12,
        "lanes": later,
        "sources": {"s0": {"weight": rng.randint(1, 9)}},
    }
    edited = config | {"stages": [{"samples": 2000}, longer]}
    foreseen = megablend.amend(edited, at=rng.randrange(1, 1000), batch=batch, dry_run=True)
    found = megablend.amend(edited, at=foreseen.requested, batch=batch)
    assert (found.drain, found.plan) == (foreseen.drain, foreseen.plan)
    dataset = megablend.open(edited)
    unit = math.lcm(lanes, later, batch or 1)
    assert (found.at + found.drain) % unit == 0
    assert found.fitting_unit == found.at + found.drain
    run = check_run(edited)
    left = find_left(run)
    drained = next(each for each in run.plan.stages if each.start == found.at)
    walk(dataset, drained.read, found.at)
    assert (drained.read >= left).all()
    shares = np.array(weights) / sum(weights)
    least = int(np.ceil(left / shares - 1e-9).max())
    least += -(found.at + least) % unit
    if least <= 2 * left.sum():
        assert found.drain == least
        assert np.abs(drained.read - shares * found.drain).max() < 1
    else:  # twice what is left, as far as steps and lanes allow, and what is beyond a source's share comes of all others
        assert left.sum() <= found.drain <= max(2 * left.sum(), left.sum() + unit)
        assert found.drain + unit > 2 * left.sum()
        free = drained.read > left
        assert (shares[~free] * found.drain < left[~free]).all()
        rest = drained.read[free].sum()
        assert np.abs(drained.read[free] - shares[free] / shares[free].sum() * rest).max() < 1
    step = batch or lanes
    for ranks in (each for each in range(1, step + 1) if step % each == 0):
        micro = step // ranks
        passed = 0
        for rank in range(ranks):
            of_rank: dict[str, Any] = {
                "micro_batch_size": micro,
                "data_parallel_rank": rank,
                "data_parallel_size": ranks,
            }
            assert (
                sum(map(len, megablend.PretrainingSampler(dataset, **of_rank)))
                == 6000 // step * micro
            )
            with closing(megablend.Loader(dataset, **of_rank, drop_last=False)) as loader:
                passed += sum(len(each["tokens"]) for each in loader)
        assert passed == 6000
    (settings,) = found.drain_settings
    written = [{"samples": 2000}, longer | settings]
    other = config | {"cache": str(tmp_path / "other"), "stages": written}
    assert megablend.build(other).ledger == run.ledger
    assert megablend.open(cache=config["cache"], run=run.ledger.run).run.ledger == run.ledger


def find_left(run: Run) -> np.ndarray[Any, np.dtype[np.int64]]:
    """What a drain without a length of its own reads of each source: what the cut has left."""
    *before, last = run.ledger.stages
    plan = plan_stages(
        [*before, dataclasses.replace(last, drain=None)], run.data.tokens_by_index, run.data.blocks
    )
    drains = [each.read for each in plan.stages if each.start == run.ledger.starts[-1]]
    left: np.ndarray[Any, np.dtype[np.int64]] = drains[0]
    return left


def test_what_cannot_be_spread_in_shares(config: dict[str, Any]) -> None:
    """A source without a share in the stage before keeps a drain no longer than twice what is left, and is named."""
    without = {"samples": 640, "sources": {"s1": {"weight": 0}}}
    stages = [FIRST, without, LONGER | {"samples": 1600}]
    megablend.build(config | {"stages": stages[:1]})
    megablend.amend(config | {"stages": stages[:2]}, at=100)
    found = megablend.amend(config | {"stages": stages}, at=130)
    assert found.drained is not None
    left = find_left(check_run(config | {"stages": stages}))
    sources = {each.name: each for each in found.drained.sources}
    assert left[1] > 0
    assert (sources["s1"].samples, sources["s1"].share_before) == (left[1], 0)
    assert found.drain <= 2 * left.sum()


def test_a_ledger_with_a_drain(config: dict[str, Any]) -> None:
    """It is read as it was written, in a version of its own; its digest and its states say how long the drain is."""
    megablend.build(config | {"stages": [FIRST]})
    before = megablend.open(config | {"stages": [FIRST]}).state_dict(50)
    stages = [FIRST, LONGER]
    megablend.amend(config | {"stages": stages}, at=100)
    dataset = megablend.open(config | {"stages": stages})
    ledger = dataset.run.ledger
    record = ledger_record(ledger.run, ledger.stages)
    assert record["version"] == 4
    assert parse_ledger(record) == ledger
    assert parse_ledger(record).digests == ledger.digests
    first, last = ledger.stages
    for drain in (None, 404):
        assert chain_digests([first, dataclasses.replace(last, drain=drain)])[1] != ledger.digest
    damaged = {**record, "stages": [record["stages"][0], record["stages"][1] | {"drain": 404}]}
    with pytest.raises(ValueError, match="does not match its own digest"):
        parse_ledger(damaged)
    state = dataset.state_dict(300)
    assert json.loads(json.dumps(state))["stages"][1][3] == 400
    for each in (before, state):
        assert megablend.open(config | {"stages": stages}, state=each).run.ledger == ledger


def test_a_ledger_without_the_length_of_its_drain(config: dict[str, Any]) -> None:
    """It keeps the drain that it has, and so does a config that says `from` alone."""
    stages = [FIRST, LONGER | {"from": 112}]
    run = megablend.build(config | {"stages": stages})
    assert run.ledger.stages[1].drain is None
    opened = check_run(config | {"stages": stages})
    assert opened.sections[0].stop == 112 + 330
    longer = [FIRST, LONGER | {"from": 112, "samples": 1600}]
    assert megablend.build(config | {"stages": longer}).ledger.stages[1:] == (
        opened.ledger.stages[1],
        dataclasses.replace(opened.ledger.stages[1], end=1600),
    )
    with pytest.raises(PlanError, match=r"stages\[1\]: drain: found 400, expected no `drain`"):
        megablend.open(config | {"stages": [FIRST, stages[1] | {"drain": 400}]})


def test_a_run_with_a_drain_is_lengthened(config: dict[str, Any]) -> None:
    megablend.build(config | {"stages": [FIRST]})
    megablend.amend(config | {"stages": [FIRST, LONGER]}, at=100)
    longer = config | {"stages": [FIRST, LONGER | {"samples": 1600}]}
    megablend.build(longer)
    run = check_run(longer)
    assert [stage.drain for stage in run.ledger.stages] == [None, 400, None]
    assert [stretch.start for stretch in run.plan.stages] == [0, 112, 512, 1200]
    assert megablend.open(cache=config["cache"], run=run.ledger.run).run.ledger == run.ledger


def test_drains_that_the_config_gets_wrong(config: dict[str, Any], tmp_path: Path) -> None:
    megablend.build(config | {"stages": [FIRST]})
    wrong = [FIRST, LONGER | {"drain": 404}]
    with pytest.raises(
        PlanError,
        match=r"stages\[1\]: drain: found 404, expected 400 \(or another `--batch`\), or no `drain`",
    ):
        megablend.amend(config | {"stages": wrong}, at=100)
    useless = [FIRST, {"samples": 1200, "drain": 8, "sources": {"s1": {"weight": 2}}}]
    with pytest.raises(PlanError, match=r"stages\[1\]: drain: found 8, expected no `drain`"):
        megablend.amend(config | {"stages": useless}, at=100)
    megablend.amend(config | {"stages": [FIRST, LONGER]}, at=100)
    with pytest.raises(
        PlanError, match=r"stages\[1\]: drain: found 404, expected 400, as the run was amended"
    ):
        megablend.open(config | {"stages": wrong})
    other = config | {"cache": str(tmp_path / "other")}
    short = [FIRST, LONGER | {"from": 112, "drain": 300}]
    with pytest.raises(
        PlanError,
        match=r"stages\[1\]: drain: found 300 samples, expected at least 330, the number that the lanes",
    ):
        megablend.build(other | {"stages": short})
    same = [FIRST, {"samples": 1200, "drain": 300}]
    with pytest.raises(
        PlanError,
        match=r"stages\[1\]: found `drain`, but this stage needs none: its samples have the same length",
    ):
        megablend.build(other | {"stages": same})
    off = [FIRST, LONGER | {"from": 112, "drain": 401}]
    says = "stages[1]: drain: found 401, expected 400 or 404, so that the new length of samples begins at"
    assert [says in line for line in megablend.build(other | {"stages": off}).warnings] == [True]
    assert [
        says in line for line in megablend.describe(other | {"stages": off}).to_dict()["warnings"]
    ].count(True) == 1
    fits = other | {
        "cache": str(tmp_path / "fits"),
        "stages": [FIRST, LONGER | {"from": 112, "drain": 400}],
    }
    assert megablend.build(fits).warnings == ()
    with pytest.raises(
        megablend.ConfigError,
        match=r"stages\[0\]: found `drain`, but the first stage begins at sample 0",
    ):
        megablend.build(other | {"stages": [FIRST | {"drain": 300}]})


def test_caps_of_a_drain(config: dict[str, Any]) -> None:
    """What it reads further counts, in the stage that it continues."""
    megablend.build(config | {"stages": [FIRST]})
    capped = FIRST | {"sources": {"s1": {"max_tokens": 112 * 2 + 8 * 60}}}
    with pytest.raises(
        PlanError,
        match=r"stages\[0\]: source 's1' .*amend the run at an earlier sample, or raise the cap",
    ):
        megablend.amend(config | {"stages": [capped, LONGER]}, at=100)


def test_the_description_of_a_drain(config: dict[str, Any]) -> None:
    megablend.build(config | {"stages": [FIRST]})
    edited = config | {"stages": [FIRST, LONGER]}
    megablend.amend(edited, at=100)
    found = megablend.describe(edited, micro_batch_size=4)
    assert found.to_dict()["fitting_unit"] == 512
    drain = found.to_dict()["splits"]["train"]["stages"][1]["drain"]
    assert (drain["start"], drain["stop"], drain["sequence_length"]) == (112, 512, 8)
    shares = {each["name"]: (each["samples"], each["share_before"]) for each in drain["sources"]}
    assert shares == {"s0": (300, 0.75), "s1": (100, 0.25), "s2": (0, 0)}
    assert "drain" not in found.to_dict()["splits"]["train"]["stages"][0]


def test_steps_that_do_not_end_where_a_drain_does(config: dict[str, Any]) -> None:
    """The command that the message gives makes them fit."""
    megablend.build(config | {"stages": [FIRST]})
    edited = config | {"stages": [FIRST, LONGER]}
    megablend.amend(edited, at=100)
    with pytest.raises(
        megablend.ConfigError,
        match=r"change at sample 512, .*`megablend amend CONFIG --at 112 --batch 24`",
    ):
        next(iter(megablend.PretrainingSampler(megablend.open(edited), micro_batch_size=24)))
    again = megablend.amend(edited, at=112, batch=24)
    assert (again.at, again.at + again.drain) == (112, 528)
    sampler = megablend.PretrainingSampler(megablend.open(edited), micro_batch_size=24)
    assert sum(map(len, sampler)) == 1200


@pytest.mark.long
def test_what_the_commands_print(config: dict[str, Any], tmp_path: Path) -> None:
    megablend.build(config | {"stages": [FIRST]})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config | {"stages": [FIRST, LONGER]}))
    lines = [
        "samples 112 to 528, 416 of 8 tokens, are a drain",
        "a step size (micro batch x ranks, counted from sample 0) fits if it divides 528",
    ]
    for command in (
        ["amend", "--at", "100", "--batch", "24", "--dry-run"],
        ["amend", "--at", "100", "--batch", "24"],
        ["describe", "--micro-batch", "8", "--all"],
    ):
        printed = CliRunner().invoke(cli, [command[0], str(tmp_path / "run.yaml"), *command[1:]])
        assert printed.exit_code == 0, printed.output
        assert all(line in printed.output for line in lines), printed.output
        assert ("and `drain: 416` into the stage from sample 112 on" in printed.output) == (
            len(command) == 5
        )
    printed = CliRunner().invoke(cli, ["runs", "show", str(tmp_path / "run.yaml")])
    assert "samples 112 to 1,200, the first 416 of them a drain, changes:" in printed.output, (
        printed.output
    )


def test_samples_of_two_lengths_that_are_read_together(config: dict[str, Any]) -> None:
    megablend.build(config | {"stages": [FIRST]})
    megablend.amend(config | {"stages": [FIRST, LONGER]}, at=100, batch=24)
    dataset = megablend.open(config | {"stages": [FIRST, LONGER]})
    ks = [*range(500, 560), 3, 1000, 4]
    for k, found in zip(ks, dataset.samples(ks), strict=True):
        expected = dataset.sample(k)
        assert (found.source, found.ordinal) == (expected.source, expected.ordinal)
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert found.starts.tolist() == expected.starts.tolist()
        assert [each.tolist() for each in found.spans] == [each.tolist() for each in expected.spans]


def test_a_build_that_appends_a_drain_says_so(config: dict[str, Any], tmp_path: Path) -> None:
    megablend.build(config | {"samples": 100})
    stages: list[dict[str, Any]] = [
        {"samples": 1280},
        {"samples": 1280, "from": 324, "sequence_length": 12},
    ]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config | {"stages": stages}))
    printed = CliRunner().invoke(cli, ["build", str(tmp_path / "run.yaml")])
    chain = megablend.show_run(config["cache"], "default").chain
    assert chain[-1].drain is not None, printed.output
    assert (
        f"stage 2 appended, which begins with a drain of {chain[-1].drain:,} samples"
        in printed.output
    ), printed.output


@pytest.mark.parametrize("run", ["pages", "rows", "in_place"])
@pytest.mark.parametrize("at", [1, 100])
def test_a_run_of_the_first_version(tmp_path: Path, run: str, at: int) -> None:
    """Its drain is of what its lanes have left in that version."""
    path = copy_release("v0_1_0", tmp_path) / f"{run}.json"
    samples = megablend.open(path).run.num_samples
    given = {
        key: value
        for key, value in json.loads(path.read_text()).items()
        if key not in ("samples", "epochs")
    }
    longer = {"samples": 40 * samples, "sequence_length": 2 * given["sequence_length"]}
    path.write_text(json.dumps(given | {"stages": [{"samples": samples}, longer]}))
    found = megablend.amend(path, at=at)
    opened = megablend.open(path).run
    assert opened.ledger.plan_version == 1
    assert opened.sections[0].stop == found.at + found.drain
    drained = next(each for each in opened.plan.stages if each.start == found.at)
    assert (drained.read >= find_left(opened)).all()
    assert megablend.build(path).ledger == opened.ledger


def test_a_drain_before_files_that_go(tmp_path: Path) -> None:
    """Nothing more is begun of a source that loses files; the others make up for it."""
    config = make_config(tmp_path, write_blend(tmp_path, 3, 2, 1))
    megablend.build(config | {"samples": 640})
    file = sorted(Path(config["sources"][1]["path"]).parent.iterdir())[1]
    file.rename(tmp_path / "aside")
    megablend.build_index(config | {"samples": 640})
    (tmp_path / "aside").rename(file)  # what lanes have begun is read from it
    edited = config | {
        "stages": [{"samples": 640}, {"samples": 1600, "sequence_length": 12, "new_data": True}]
    }
    found = megablend.amend(edited, at=100)
    assert found.drained is not None
    left = find_left(megablend.open(edited).run)
    read = [source.samples for source in found.drained.sources]
    assert (read[1], found.drain) == (left[1], found.drain_settings[0]["drain"])
    assert found.drain > left.sum()
    assert (found.at + found.drain) % 4 == 0
