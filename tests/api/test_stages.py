"""Runs of several stages: weights, lanes, windows and sequence lengths that change, in all that opens a run."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import megablend
from tests.runs import documents, make_config, write_source

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


def test_every_source_goes_on_where_it_was_whatever_changes(tmp_path: Path) -> None:
    config = config_of(tmp_path, order="sequential")
    megablend.build(config)
    dataset = megablend.open(config)
    read = defaultdict[int, list[tuple[int, list[int]]]](list)
    for k, length in enumerate(LENGTHS):
        sample = dataset.sample(k)
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
    whole = [row for batch in megablend.Loader(dataset, micro_batch_size=8) for row in batch["tokens"]]
    assert all(torch.equal(row, sample["tokens"]) for row, sample in zip(whole, expected, strict=True))
    loader, place = megablend.Loader(dataset, micro_batch_size=8), 0
    rng = random.Random(3)
    while place < len(dataset):
        state, size = json.loads(json.dumps(loader.state_dict())), rng.choice([1, 2, 4])
        resumed = megablend.open(config, state=state)
        parts = [
            megablend.Loader(resumed, micro_batch_size=8 // size, data_parallel_rank=rank, data_parallel_size=size)
            for rank in range(size)
        ]
        for step, batches in enumerate(zip(*parts, strict=True)):
            rows = [row for batch in batches for row in batch["tokens"]]
            assert all(torch.equal(row, expected[place + i]["tokens"]) for i, row in enumerate(rows))
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


def test_a_step_with_samples_of_two_lengths_is_refused_with_the_nearest_end(config: dict[str, Any]) -> None:
    megablend.build(config)
    dataset = megablend.open(config)
    with pytest.raises(
        megablend.ConfigError, match=r"change at sample 320, within a step of 12 samples .* sample 324;"
    ):
        megablend.Loader(dataset, micro_batch_size=3, data_parallel_rank=0, data_parallel_size=4)
    with pytest.raises(
        megablend.ConfigError, match=r"change at sample 480, .* counted from sample 321, .* sample 477;"
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
    with pytest.raises(megablend.ConfigError, match="nearest end of a step is sample 84"):
        megablend.Loader(dataset, micro_batch_size=12)


def test_a_run_is_extended_by_listing_another_stage(config: dict[str, Any]) -> None:
    first = megablend.build(config | {"stages": STAGES[:2]})
    state = megablend.open(config | {"stages": STAGES[:2]}).state_dict(200)
    with pytest.raises(megablend.CacheError, match="was built for 320 samples, the config now asks for 640"):
        megablend.open(config)
    more = megablend.build(config)
    assert more.ledger.digests[:2] == first.ledger.digests
    assert more.stages_before == 2
    assert megablend.open(config, state=state).consumed_samples == 200
    assert len(megablend.open(config | {"stages": STAGES[:2]})) == 320  # a config that was not edited goes on
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
            r"its order is fixed: lanes was 4, is now 2 \(plan",
        ),
        (
            {"stages": [STAGES[0], STAGES[1] | {"sources": {"s2": {"weight": 2}}}, *STAGES[2:]]},
            r"in stage 1, from sample 160 on, share of source 's0' was 1/4, is now 1/2",
        ),
        (
            {"stages": [{"samples": 80}, *STAGES[1:]]},
            r"its stage 0 goes on to sample 160, but the config's changes before: lanes was 4, is now 8; restore the stage's "
            r"end, or change the blend from where training is \(`megablend amend CONFIG --at SAMPLE`\)",
        ),
        ({"stages": STAGES[:1]}, None),
        (
            {"stages": [STAGES[0], {"samples": 240} | {k: STAGES[1][k] for k in ("lanes", "sources")}]},
            "only be extended",
        ),
    ],
)
def test_the_past_is_locked(config: dict[str, Any], change: dict[str, Any], says: str | None) -> None:
    megablend.build(config)
    if says is None:  # as the run was at the end of a stage
        assert len(megablend.open(config | change)) == 160
        return
    with pytest.raises(megablend.PlanError, match=says):
        megablend.build(config | change)


def test_a_committed_run_is_looked_at_without_its_config(config: dict[str, Any], tmp_path: Path) -> None:
    built = megablend.build(config)
    dataset = megablend.open(config)
    for k in (0, 159, 160, 330, 639):
        sample = megablend.show(config["cache"], k, run="default")
        assert sample.tokens == tuple(dataset.sample(k).tokens.tolist())
    file = f"{tmp_path}/data/source0/0.parquet"
    found = megablend.find(config["cache"], file, run="default")["found"][0]
    reads = {each["sample"] for each in found["samples"]}
    expected = {k for k in range(640) if any(p.file == file for p in megablend.show(config, k).pieces)}
    assert reads == expected
    for each in found["samples"][::10]:
        assert each["pieces"][-1]["stop_token"] <= LENGTHS[each["sample"]] + 1
    target = tmp_path / "order.parquet"
    megablend.export(config["cache"], target, run="default")
    assert pq.read_table(target)["ordinal"].to_pylist() == [dataset.sample(k).ordinal for k in range(640)]
    assert built.ledger == dataset.run.ledger


def test_describe_and_stats_count_tokens_of_all_lengths(config: dict[str, Any]) -> None:
    megablend.build(config)
    dataset = megablend.open(config)
    described = megablend.describe(config, micro_batch_size=8).to_dict()["splits"]["train"]
    assert described["tokens"] == sum(LENGTHS)
    by_source = dict.fromkeys(dataset.sources, 0)
    for k, length in enumerate(LENGTHS):
        by_source[dataset.sources[dataset.sample(k).source]] += length
    stats = megablend.Loader(dataset, micro_batch_size=8, consumed_samples=640).stats()
    assert {each["name"]: each["tokens"] for each in stats["sources"]} == by_source
    totals = {name: len(stream(number)) for number, name in enumerate(dataset.sources)}
    assert [each["epochs"] for each in described["sources"]] == pytest.approx(
        [(by_source[name] + 1) / totals[name] for name in dataset.sources]
    )


def test_diff_says_where_two_histories_part(config: dict[str, Any], tmp_path: Path) -> None:
    megablend.build(config)
    others = config | {"stages": [*STAGES[:2], STAGES[2] | {"sources": {"s0": {"weight": 5}}}, STAGES[3]]}
    megablend.build(others | {"run": "other"})
    paths = [ledger_path(config["cache"], run) for run in ("default", "other")]
    found = megablend.diff(*paths)
    assert found["agrees_up_to"] == 320
    assert found["parts_at"] == 320 + int(
        np.flatnonzero(
            [
                megablend.show(config, k).tokens != megablend.show(others | {"run": "other"}, k).tokens
                for k in range(320, 480)
            ]
        )[0]
    )
    assert {"what": "share of source 's0' from sample 320 on", "a": "1/4", "b": "5/8"} in found["differences"]


def test_validation_has_the_top_levels_settings_or_those_of_a_stage(tmp_path: Path) -> None:
    config = config_of(tmp_path, split="80,20", valid_samples=24)
    megablend.build(config)
    valid, of_stage = megablend.open(config, "valid"), megablend.open(config, "valid", stage=2)
    assert [len(each[0]["tokens"]) for each in (valid, of_stage)] == [8, 16]
    counts = [each.run.plan.counts(24).tolist() for each in (valid, of_stage)]
    assert counts == [[18, 6, 0], [6, 6, 12]]
    assert megablend.open(config, "valid", stage=2, state=of_stage.state_dict(8)).consumed_samples == 8
    with pytest.raises(megablend.StateError, match="the plan differs"):
        valid.load_state_dict(of_stage.state_dict(8))
    with pytest.raises(megablend.ConfigError, match="found stage 4; the config lists 4 stages, counted from 0"):
        megablend.open(config, "valid", stage=4)
    with pytest.raises(megablend.ConfigError, match="found stage for train, which has all stages"):
        megablend.open(config, stage=1)


def test_a_cap_holds_over_all_stages(config: dict[str, Any]) -> None:
    tokens = len(stream(0))
    stages: list[dict[str, Any]] = [{"samples": 160}, {"samples": 1600, "sources": {"s0": {"max_epochs": 1}}}]
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
        ("c", [plain[0], plain[1] | {"sources": {f"s{d}": {"weight": 0.123456 + d} for d in range(3)}}]),
    ):
        megablend.build(config | {"stages": stages, "run": run})
        sizes.append(len(ledger_path(config["cache"], run).read_bytes()))
    assert sizes[1] - sizes[0] <= 200 + 3 * 40
    assert sizes[2] - sizes[1] <= 3 * 40
