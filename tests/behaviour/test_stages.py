"""Runs of several stages: weights, lanes, windows and sequence lengths that change, in all that opens a run."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

import megablend
from megablend.run.ledger_file import load_ledger
from tests.runs import documents, make_config, read_samples, write_source

STAGES: list[dict[str, Any]] = [
    {"samples": 160},
    {"samples": 320, "lanes": 8, "sources": {"s0": {"weight": 1}, "s2": {"weight": 2}}},
    {"samples": 480, "sequence_length": 16, "shuffle_window": 2},
    {"samples": 640, "sequence_length": 8, "sources": {"s1": {"weight": 0}}},
]
LENGTHS = [8] * 320 + [16] * 160 + [8] * 160


def config_of(folder: Path, **settings: Any) -> dict[str, Any]:
    sources = [
        write_source(folder / "data", d, "parquet", documents(d, 150, 60, 5)) | {"weight": weight}
        for d, weight in ((0, 3), (1, 1), (2, 0))
    ]
    return make_config(folder, sources, **({"stages": STAGES} | settings))


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    return config_of(tmp_path)


def ledger_path(cache: str, run: str) -> Path:
    return Path(cache) / "runs" / f"{run}.json"


def stream(source: int) -> list[int]:
    """The tokens of a source in the order of its files."""
    return [token for document in documents(source, 150, 60, 5) for token in document or []]


ENDS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "tokens": ({"tokens": 8 * 480}, [{"tokens": 8 * 160}, {"tokens": 8 * 320}, {"lanes": 8}]),
    "shares of tokens": ({"tokens": 8 * 640}, [{"share": 0.25}, {"share": 0.5}, {"lanes": 8}]),
    "shares of samples": ({"samples": 640}, [{"share": 0.25}, {"share": 0.5}, {"lanes": 8}]),
}
"""Settings of a run, and stages that end at samples 160 and 320."""


@pytest.mark.parametrize("case", ENDS)
def test_ends_of_stages_count_from_the_beginning_of_the_run(case: str, tmp_path: Path) -> None:
    settings, stages = ENDS[case]
    config = config_of(tmp_path, stages=stages, **settings)
    megablend.build(config)
    ledger = load_ledger(config["cache"], "default")
    assert ledger is not None
    assert ledger.ends == (160, 320, 480 if case == "tokens" else 640)


def test_every_source_goes_on_where_it_was_whatever_changes(tmp_path: Path) -> None:
    config = config_of(tmp_path, order="sequential")
    megablend.build(config)
    dataset = megablend.open(config)
    read = defaultdict[int, list[tuple[int, list[int]]]](list)
    for length, sample in zip(LENGTHS, read_samples(dataset), strict=True):
        assert len(sample.tokens) == length + 1
        read[sample.source].append((sample.ordinal, sample.tokens.tolist()))
    for source, samples in read.items():
        assert [ordinal for ordinal, _ in sorted(samples)] == list(range(len(samples)))
        tokens = [token for _, each in sorted(samples) for token in each[:-1]]
        expected = stream(source) * (len(tokens) // len(stream(source)) + 1)
        assert tokens == expected[: len(tokens)]


def test_loaders_read_all_stages_and_resume_in_each_with_any_ranks(config: dict[str, Any]) -> None:
    megablend.build(config)
    dataset = megablend.open(config)
    expected = [dataset[k] for k in range(len(dataset))]
    assert [len(sample["tokens"]) for sample in expected] == LENGTHS
    whole = [
        row for batch in megablend.Loader(dataset, micro_batch_size=8) for row in batch["tokens"]
    ]
    assert all(
        torch.equal(row, sample["tokens"]) for row, sample in zip(whole, expected, strict=True)
    )
    loader = megablend.Loader(dataset, micro_batch_size=8)
    place = 0
    rng = random.Random(3)
    while place < len(dataset):
        state = json.loads(json.dumps(loader.state_dict()))
        size = rng.choice([1, 2, 4])
        resumed = megablend.open(config, state=state)
        parts = [
            megablend.Loader(
                resumed,
                micro_batch_size=8 // size,
                data_parallel_rank=rank,
                data_parallel_size=size,
            )
            for rank in range(size)
        ]
        for step, batches in enumerate(zip(*parts, strict=True)):
            rows = [row for batch in batches for row in batch["tokens"]]
            assert all(
                torch.equal(row, expected[place + i]["tokens"]) for i, row in enumerate(rows)
            )
            place += len(rows)
            if step == 8:
                break
        loader = parts[0]
        for part in parts:
            part.close()


def test_workers_read_all_stages(config: dict[str, Any]) -> None:
    megablend.build(config)
    dataset = megablend.open(config)
    batches = list(megablend.Loader(dataset, micro_batch_size=16, num_workers=2))
    rows = [row for batch in batches for row in batch["tokens"]]
    assert [len(row) for row in rows] == LENGTHS
    assert all(torch.equal(row, dataset[k]["tokens"]) for k, row in enumerate(rows))


def test_a_step_with_samples_of_two_lengths_is_refused_with_the_nearest_end(
    config: dict[str, Any],
) -> None:
    megablend.build(config)
    dataset = megablend.open(config)
    with pytest.raises(
        megablend.ConfigError,
        match=r"change at sample 320, in the middle of a batch .*steps of 12 samples .* sample 324, or choose",
    ):
        iter(
            megablend.Loader(
                dataset, micro_batch_size=3, data_parallel_rank=0, data_parallel_size=4
            )
        )
    with pytest.raises(
        megablend.ConfigError,
        match=r"change at sample 480, .* from sample 321 on.* sample 477, or",
    ):
        megablend.Loader(dataset, micro_batch_size=6, consumed_samples=321)
    megablend.Loader(dataset, micro_batch_size=7, consumed_samples=480).close()


def test_masks_may_change_between_stages(tmp_path: Path) -> None:
    stages = [{"samples": 80}, {"samples": 160, "inter_document_masking": True}]
    config = config_of(tmp_path, stages=stages)
    megablend.build(config)
    dataset = megablend.open(config)
    assert ["cu_seqlens" in dataset[k] for k in (79, 80)] == [False, True]
    batches = list(megablend.Loader(dataset, micro_batch_size=8))
    assert ["cu_seqlens" in batch for batch in batches] == [False] * 10 + [True] * 10
    with pytest.raises(
        megablend.ConfigError,
        match=r"change at sample 80, .* the nearest end of a step, sample 84, or choose",
    ):
        iter(megablend.Loader(dataset, micro_batch_size=12))
    megablend.Loader(
        megablend.open(config, state=dataset.state_dict(8)), micro_batch_size=12
    ).close()


def test_a_run_is_extended_by_listing_another_stage(config: dict[str, Any]) -> None:
    first = megablend.build(config | {"stages": STAGES[:2]})
    state = megablend.open(config | {"stages": STAGES[:2]}).state_dict(200)
    with pytest.raises(
        megablend.CacheError, match="was built for 320 samples, but the config now requests 640"
    ):
        megablend.open(config)
    more = megablend.build(config)
    assert more.ledger.digests[:2] == first.ledger.digests
    assert more.stages_before == 2
    assert megablend.open(config, state=state).consumed_samples == 200
    # A config that was not edited goes on
    assert len(megablend.open(config | {"stages": STAGES[:2]})) == 320
    assert megablend.build(config).ledger == more.ledger


def test_one_blend_lengthened_and_then_changed_goes_on(config: dict[str, Any]) -> None:
    """An unaligned end that is committed may be followed by a stage."""
    alone = {key: value for key, value in config.items() if key != "stages"}
    one = megablend.build(alone | {"samples": 101})
    two = megablend.build(alone | {"samples": 151})
    stages = [{"samples": 151}, {"samples": 200, "sources": {"s0": {"weight": 1}}}]
    three = megablend.build(alone | {"stages": stages})
    assert three.ledger.digests[:2] == two.ledger.digests
    assert three.ledger.ends == (101, 151, 200)
    assert two.ledger.digests[0] == one.ledger.digest
    state = megablend.open(alone | {"stages": stages}).state_dict(190)
    ledger_path(alone["cache"], "default").unlink()  # config, data and state make the same again
    assert megablend.open(alone | {"stages": stages}, state=state).run.ledger == three.ledger


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"stages": [STAGES[0] | {"lanes": 2}, *STAGES[1:]]},
            r"its order is fixed: lanes was 4 and is now 2; restore the config",
        ),
        (
            {"stages": [STAGES[0], STAGES[1] | {"sources": {"s2": {"weight": 2}}}, *STAGES[2:]]},
            r"in stage 1, from sample 160 on, share of source 's0' was 1/4 and is now 1/2",
        ),
        (
            {"stages": [{"samples": 80}, *STAGES[1:]]},
            r"its stage 0 ends at sample 160, but the config changes before that: lanes was 4 and is now 8; restore the stage's "
            r"end, `samples: 160`, or let the next stage begin earlier with `megablend amend CONFIG --at SAMPLE`",
        ),
        ({"stages": STAGES[:1]}, None),
        (
            {
                "stages": [
                    STAGES[0],
                    {"samples": 240} | {k: STAGES[1][k] for k in ("lanes", "sources")},
                ]
            },
            "only be extended",
        ),
    ],
)
def test_the_past_is_locked(
    config: dict[str, Any], change: dict[str, Any], says: str | None
) -> None:
    megablend.build(config)
    if says is None:  # as the run was at the end of a stage
        assert len(megablend.open(config | change)) == 160
        return
    with pytest.raises(megablend.PlanError, match=says):
        megablend.build(config | change)


def test_a_committed_run_is_looked_at_without_its_config(
    config: dict[str, Any], tmp_path: Path
) -> None:
    built = megablend.build(config)
    dataset = megablend.open(config)
    for k in (0, 159, 160, 330, 639):
        sample = megablend.show(config["cache"], k, run="default")
        assert sample.tokens == tuple(dataset.sample(k).tokens.tolist())
    file = f"{tmp_path}/data/source0/0.parquet"
    found = megablend.find(config["cache"], file, run="default").to_dict()["found"][0]
    reads = {each["sample"] for each in found["samples"]}
    index = dataset.run.store.snapshot
    number = next(i for i in range(index.num_files) if index.path(i) == file)
    expected = {k for k in range(640) if number in index.file_of(dataset.sample(k).spans.blocks)}
    assert any(piece.file == file for piece in megablend.show(config, min(expected)).pieces)
    assert reads == expected
    for each in found["samples"][::10]:
        assert each["pieces"][-1]["stop_token"] <= LENGTHS[each["sample"]] + 1
    target = tmp_path / "order.parquet"
    megablend.export(config["cache"], target, run="default")
    assert pq.read_table(target)["ordinal"].to_pylist() == [
        each.ordinal for each in read_samples(dataset, range(640))
    ]
    assert built.ledger == dataset.run.ledger


def test_describe_and_stats_count_tokens_of_all_lengths(config: dict[str, Any]) -> None:
    megablend.build(config)
    dataset = megablend.open(config)
    described = megablend.describe(config, micro_batch_size=8).to_dict()["splits"]["train"]
    assert described["tokens"] == sum(LENGTHS)
    by_source = dict.fromkeys(dataset.sources, 0)
    for length, sample in zip(LENGTHS, read_samples(dataset), strict=True):
        by_source[dataset.sources[sample.source]] += length
    stats = megablend.Loader(dataset, micro_batch_size=8, consumed_samples=640).stats()
    assert {each["name"]: each["tokens"] for each in stats["sources"]} == by_source
    totals = {name: len(stream(number)) for number, name in enumerate(dataset.sources)}
    assert [each["epochs"] for each in described["sources"]] == pytest.approx(
        [(by_source[name] + 1) / totals[name] for name in dataset.sources]
    )


def test_diff_says_where_two_histories_part(config: dict[str, Any], tmp_path: Path) -> None:
    megablend.build(config)
    others = config | {
        "stages": [*STAGES[:2], STAGES[2] | {"sources": {"s0": {"weight": 5}}}, STAGES[3]]
    }
    megablend.build(others | {"run": "other"})
    paths = [ledger_path(config["cache"], run) for run in ("default", "other")]
    found = megablend.diff(*paths)
    assert found.to_dict()["agrees_up_to"] == 320
    one = megablend.open(config)
    other = megablend.open(others | {"run": "other"})
    differs = [one[k]["tokens"].tolist() != other[k]["tokens"].tolist() for k in range(320, 480)]
    assert found.to_dict()["parts_at"] == 320 + differs.index(True)
    assert {
        "what": "share of source 's0' from sample 320 on",
        "a": "1/4",
        "b": "5/8",
    } in found.to_dict()["differences"]


def test_validation_has_the_top_levels_settings_or_those_of_a_stage(tmp_path: Path) -> None:
    config = config_of(tmp_path, split="80,20", valid_samples=24)
    megablend.build(config)
    valid = megablend.open(config, "valid")
    of_stage = megablend.open(config, "valid", stage=2)
    assert [len(each[0]["tokens"]) for each in (valid, of_stage)] == [8, 16]
    counts = [each.run.plan.counts(24).tolist() for each in (valid, of_stage)]
    assert counts == [[18, 6, 0], [6, 6, 12]]
    assert (
        megablend.open(config, "valid", stage=2, state=of_stage.state_dict(8)).consumed_samples == 8
    )
    with pytest.raises(megablend.StateError, match="the plan differs"):
        valid.load_state_dict(of_stage.state_dict(8))
    with pytest.raises(
        megablend.ConfigError, match="found stage 4; the config lists 4 stages, counted from 0"
    ):
        megablend.open(config, "valid", stage=4)
    with pytest.raises(
        megablend.ConfigError, match="found stage=1 for train, which has all stages"
    ):
        megablend.open(config, stage=1)


def test_a_cap_holds_over_all_stages(config: dict[str, Any]) -> None:
    tokens = len(stream(0))
    stages: list[dict[str, Any]] = [
        {"samples": 160},
        {"samples": 1600, "sources": {"s0": {"max_epochs": 1}}},
    ]
    left = (tokens - 1 - 120 * 8) // 8
    with pytest.raises(megablend.PlanError) as error:
        megablend.build(config | {"stages": stages})
    assert f"1,080 samples of 8 tokens are requested, {left:,} are left" in str(error.value)
    assert "stages[1]: source 's0' would have been read" in str(error.value)
    fits = 160 + left * 4 // 3
    assert f"end the stage at sample {fits:,} or before" in str(error.value)
    stages[1]["samples"] = fits
    assert megablend.build(config | {"stages": stages}).ledger.num_samples == fits


def test_a_ledger_stays_small(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    settings = {"lanes": 16, "shuffle_window": 1024, "sequence_length": 9}
    plain = [{"samples": 160}, {"samples": 3200} | settings]
    sizes = []
    for run, stages in (
        ("a", plain[:1]),
        ("b", plain),
        (
            "c",
            [
                plain[0],
                plain[1] | {"sources": {f"s{d}": {"weight": 0.123456 + d} for d in range(3)}},
            ],
        ),
    ):
        megablend.build(config | {"stages": stages, "run": run})
        sizes.append(len(ledger_path(config["cache"], run).read_bytes()))
    assert sizes[1] - sizes[0] <= 200 + 3 * 40
    assert sizes[2] - sizes[1] <= 3 * 40


def test_what_a_source_cannot_give_goes_to_the_others_stage_by_stage(
    config: dict[str, Any],
) -> None:
    """Each stage is solved once, for what its cap leaves at the stage's start, also where an amendment cuts the one before."""
    tokens = len(stream(0))
    settings = {"sources": {"s0": {"max_epochs": 1}}, "samples": 320}
    stages: list[dict[str, Any]] = [
        settings,
        {"samples": 960, "sources": {"s1": {"weight": 2}}},
        {"samples": 1200},
    ]
    capped = config | {"on_exhausted": "redistribute", "stages": stages}
    capped["sources"] = [
        source | {"max_epochs": 1} if source["name"] == "s0" else source
        for source in config["sources"]
    ]
    built = megablend.build(capped)
    plan = megablend.open(capped).run.plan
    given = [plan.counts(end).tolist() for end in (320, 960, 1200)]
    assert given[0] == [240, 80, 0]
    # s0 to its cap, the rest from s1
    assert given[1] == [(tokens - 1) // 8, 960 - (tokens - 1) // 8, 0]
    assert given[2][0] == given[1][0]
    assert megablend.build(capped).ledger == built.ledger
    edited = capped | {"stages": [*stages[:2], stages[2] | {"sources": {"s2": {"weight": 1}}}]}
    at = megablend.amend(edited, at=500).at
    plan = megablend.open(edited).run.plan
    left = (tokens - 1) // 8 - plan.counts(at)[0]
    assert plan.counts(1200)[0] == plan.counts(at)[0] + min(left, (1200 - at) * 3 // 6)
    assert megablend.build(edited).ledger == megablend.open(edited).run.ledger


@pytest.mark.parametrize("amended", [False, True], ids=["planned", "amended"])
def test_a_source_finishes_its_epoch_in_the_old_order(tmp_path: Path, amended: bool) -> None:
    first = {"samples": 480}
    then = {"samples": 2400, "order": "sequential", "sources": {"s1": {"weight": 2}}}
    config = config_of(tmp_path, stages=[first])
    megablend.build(config)
    old = megablend.open(config)
    past = [each.tokens.tolist() for each in read_samples(old, range(480))]
    changed = config | {"stages": [first, then]}
    at = megablend.amend(changed, at=100).at if amended else 480
    megablend.build(changed)
    dataset = megablend.open(changed)
    samples = read_samples(dataset)
    assert [sample.tokens.tolist() for sample in samples[:at]] == past[:at]
    for number in (0, 1):
        tokens = stream(number)
        mine = sorted((s.ordinal, k) for k, s in enumerate(samples) if s.source == number)
        assert [ordinal for ordinal, _ in mine] == list(range(len(mine)))
        read = [token for _, k in mine for token in samples[k].tokens.tolist()[:-1]]
        epochs = [read[i : i + len(tokens)] for i in range(0, len(read), len(tokens))]
        assert all(sorted(epoch) == sorted(tokens) for epoch in epochs[:-1])
        in_order = [epoch == tokens[: len(epoch)] for epoch in epochs]
        begun = sum(s.source == number for s in samples[:at]) * 8 // len(tokens)
        switch = in_order.index(True)
        assert switch in (begun + 1, begun + 2)
        assert in_order == [False] * switch + [True] * (len(epochs) - switch)
    loaded = [
        row
        for batch in megablend.Loader(dataset, micro_batch_size=8)
        for row in batch["tokens"].tolist()
    ]
    assert loaded == [sample.tokens.tolist()[:-1] for sample in samples]


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_schedule_changes_shares_in_steps(tmp_path: Path, kind: str) -> None:
    stages: list[dict[str, Any]] = [
        {"samples": 64},
        {"samples": 704, "schedule": kind, "sources": {"s0": {"weight": 0}, "s2": {"weight": 3}}},
        {"samples": 800},
    ]
    config = config_of(tmp_path, stages=stages, shuffle_window=1, block_bytes=4096)
    built = megablend.build(config)
    assert built.ledger.ends == (64, 704, 800)  # one entry, one link
    dataset = megablend.open(config)
    schedule = built.ledger.stages[1].blend.schedule
    assert schedule is not None
    plan = dataset.run.plan
    edges = [64, *(64 + end for end in schedule.ends)]
    shares = [(plan.counts(b) - plan.counts(a))[0] / (b - a) for a, b in pairwise(edges)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.375 > shares[-1]
    assert (plan.counts(704) - plan.counts(64)).tolist() == pytest.approx([240, 160, 240], abs=2)
    described = megablend.describe(config).to_dict()["splits"]["train"]["sources"]
    assert [round(each["requested_share"], 6) for each in described] == [0.36, 0.25, 0.39]
    assert megablend.build(config).ledger == built.ledger
    assert megablend.show(config["cache"], 500, run="default") == megablend.show(config, 500)
    state = dataset.state_dict(300)
    assert len(state["stages"]) == 3
    edited = config | {"stages": [*stages[:2], {"samples": 900, "sources": {"s0": {"weight": 9}}}]}
    at = megablend.amend(edited, at=310).at
    amended = megablend.open(edited, state=state)
    assert amended.run.ledger.ends == (64, at, 900)
    assert [each.tokens.tolist() for each in read_samples(amended, range(0, at, 9))] == [
        dataset.sample(k).tokens.tolist() for k in range(0, at, 9)
    ]
    assert megablend.show(config["cache"], 500, run="default") == megablend.show(edited, 500)
    shorter = [stages[0], stages[1] | {"samples": 640}]
    with pytest.raises(
        megablend.PlanError,
        match=rf"schedule was {kind} in . steps over 640 samples from shares 3/4, 1/4, 0",
    ):
        megablend.build(config | {"stages": [*shorter, stages[2]]})


def test_a_step_is_long_enough_for_the_source_with_the_longest_period(tmp_path: Path) -> None:
    shares = {name: {"weight": weight} for name, weight in (("s0", 9), ("s1", 4), ("s2", 1))}
    stages = [{"samples": 64}, {"samples": 2112, "schedule": "linear", "sources": shares}]
    config = config_of(
        tmp_path, stages=stages, order="document", sequence_length=64, shuffle_window=1
    )
    blend = megablend.build(config).ledger.stages[1].blend
    cycles = [source.cycles or 1 for source in blend.sources]
    assert blend.schedule is not None
    assert min(cycles) < max(cycles)
    num_steps = len(blend.schedule.ends)
    assert num_steps == 2048 // blend.schedule.cycle // (4 * max(cycles)) > 2


def test_a_stage_too_short_for_steps_is_refused(tmp_path: Path) -> None:
    stages = [
        {"samples": 64},
        {"samples": 80, "schedule": "linear", "sources": {"s0": {"weight": 9}}},
    ]
    with pytest.raises(megablend.PlanError, match="has 16 samples, fewer than two cycles of 16"):
        megablend.build(config_of(tmp_path, stages=stages))


def test_samples_read_in_batches_are_those_read_singly(config: dict[str, Any]) -> None:
    """For the tests that read many, in sections whose samples have other lengths."""
    megablend.build(config)
    dataset = megablend.open(config)
    ks = [0, 159, 160, 161, 330, 500, 639]
    assert len(read_samples(dataset)) == len(dataset)
    for k, read in zip(ks, read_samples(dataset, ks), strict=True):
        single = dataset.sample(k)
        assert (read.source, read.ordinal, read.tokens.tolist()) == (
            single.source,
            single.ordinal,
            single.tokens.tolist(),
        )


@pytest.mark.parametrize("end", [{"samples": 163}, {"tokens": 163 * 8 + 5}])
def test_a_run_whose_last_stage_ended_off_its_lanes_grows_and_is_made_again_by_its_config_alone(
    config: dict[str, Any], tmp_path: Path, end: dict[str, int]
) -> None:
    alone = {key: value for key, value in config.items() if key != "samples"}
    short = alone | {"stages": [end]}
    assert megablend.build(short).warnings == ()
    grown = alone | {"stages": [end, {"samples": 320, "lanes": 8}]}
    (warned,) = megablend.build(grown).warnings
    assert (
        "stages[0]: ends at sample 163, with 163 samples, which is not a multiple of its 4 lanes"
        in warned
    )
    assert warned in megablend.describe(grown).to_dict()["warnings"]
    if "tokens" in end:
        assert "write the stage's end as `samples: 163`" in warned
        grown["stages"][0] = {"samples": 163}
    fresh = grown | {"cache": str(tmp_path / "fresh")}
    megablend.build(fresh)
    dataset = megablend.open(grown)
    again = megablend.open(fresh)
    assert dataset.run.ledger.digest == again.run.ledger.digest
    assert len(dataset) == 320
    for k in range(320):
        one = dataset[k]
        other = again[k]
        assert all(
            torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name])) for name in one
        )
