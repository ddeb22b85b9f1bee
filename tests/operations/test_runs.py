"""Build, lengthen, resume, move: what a run promised stays."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megablend
from megablend.order.block import BlockOrder
from megablend.order.registry import ORDERS, OrderKind
from tests.formats.writers import KINDS
from tests.runs import EOD, documents, make_config, read_samples, write_source


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    sources = [
        write_source(tmp_path / "data", d, kind, documents(d, 60, 30, 5))
        for d, kind in enumerate(["parquet", "arrow"])
    ]
    for source, weight in zip(sources, ("0.75", "0.25"), strict=True):
        source |= {"weight": weight, "append_eod": EOD}
    return make_config(tmp_path, sources, samples=100, run="demo")


def tokens(dataset: megablend.Dataset) -> torch.Tensor:
    return torch.tensor(np.stack([each.tokens[:-1] for each in read_samples(dataset)]))


def test_a_run_must_be_built(config: dict[str, Any]) -> None:
    with pytest.raises(
        megablend.CacheError,
        match="contains no run 'demo'; run `megablend build CONFIG` first",
    ):
        megablend.open(config)


def test_building_again_changes_nothing(config: dict[str, Any]) -> None:
    first = megablend.build(config)
    again = megablend.build(config)
    assert (first.stages_before, again.stages_before) == (0, 1)
    assert again.index.read == 0
    assert not again.index.created
    assert again.ledger == first.ledger


def test_a_longer_run_begins_with_the_shorter(config: dict[str, Any]) -> None:
    megablend.build(config)
    short = megablend.open(config)
    before = tokens(short)
    state = short.state_dict(40)
    with pytest.raises(
        megablend.CacheError,
        match="built for 100 samples, but the config now requests 170; run `megablend build CONFIG`",
    ):
        megablend.open(config | {"samples": 170})
    for samples in (170, 171, 230):
        assert megablend.build(config | {"samples": samples}).ledger.ends[-1] == samples
    longer = megablend.open(config | {"samples": 230})
    assert torch.equal(tokens(longer)[:100], before)
    longer.load_state_dict(state)  # of a stage ago
    assert longer.consumed_samples == 40
    assert megablend.open(config | {"samples": 230}, state=state).consumed_samples == 40


def test_a_job_with_its_old_config_goes_on_when_the_run_was_lengthened(
    config: dict[str, Any],
) -> None:
    megablend.build(config)
    dataset = megablend.open(config)
    before = tokens(dataset)
    state = dataset.state_dict(40)
    megablend.build(config | {"samples": 170})
    assert torch.equal(tokens(megablend.open(config)), before)
    assert megablend.open(config, state=state).consumed_samples == 40
    later = megablend.open(config | {"samples": 170}).state_dict(120)
    with pytest.raises(megablend.StateError, match="the plan differs"):
        megablend.open(config, state=later)
    with pytest.raises(
        megablend.PlanError, match="was built for 170 samples, but 130 are now requested"
    ):
        megablend.open(config | {"samples": 130})


def test_lowering_and_reweighting_are_refused_with_the_reason(config: dict[str, Any]) -> None:
    megablend.build(config)
    with pytest.raises(
        megablend.PlanError,
        match="was built for 100 samples, but 99 are now requested; a run can only be extended",
    ):
        megablend.build(config | {"samples": 99})
    sources = [config["sources"][0] | {"weight": "0.5"}, config["sources"][1]]
    for call in (megablend.build, megablend.open):
        with pytest.raises(
            megablend.PlanError,
            match=r"share of source 's0' was 3/4 and is now 2/3; restore the config",
        ):
            call(config | {"sources": sources})
        with pytest.raises(megablend.PlanError, match="seed was 7 and is now 8"):
            call(config | {"seed": 8})
    assert len(megablend.open(config)) == 100
    other = megablend.build(config | {"sources": sources, "run": "other"})
    assert other.index.read == 0
    assert (
        len(megablend.open(config))
        == len(megablend.open(config | {"sources": sources, "run": "other"}))
        == 100
    )


def test_equal_shares_written_otherwise_are_the_same_run(config: dict[str, Any]) -> None:
    ledger = megablend.build(config).ledger
    sources = [
        source | {"weight": weight}
        for source, weight in zip(config["sources"], (30, 10), strict=True)
    ]
    assert megablend.build(config | {"sources": sources}).ledger == ledger


def test_a_running_job_keeps_its_snapshot(tmp_path: Path, config: dict[str, Any]) -> None:
    old = megablend.build(config)
    before = tokens(megablend.open(config))
    KINDS["parquet"].write(tmp_path / "data" / "source0" / "9.parquet", [[900_001, 900_002]] * 9)
    new = megablend.build(config)
    assert (new.index.read, new.index.reused) == (1, 4)
    assert new.index.digest != old.index.digest
    assert new.pinned
    assert torch.equal(tokens(megablend.open(config)), before)
    assert megablend.build(config | {"run": "new"}).ledger.index == new.index.digest


def test_a_changed_file_is_named_by_build_and_by_the_reader(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    megablend.build(config)
    dataset = megablend.open(config)
    shutil.copy(
        tmp_path / "data" / "source0" / "1.parquet", tmp_path / "data" / "source0" / "0.parquet"
    )
    with pytest.raises(megablend.DataError, match=r"0\.parquet"):
        tokens(dataset)
    assert megablend.build(config | {"run": "new"}).index.changed == ("s0/0.parquet",)


def test_a_state_of_another_index_or_plan_is_refused(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    megablend.build(config)
    state = megablend.open(config).state_dict(16)
    assert len(json.dumps(state)) < 1000
    other = config | {"run": "other", "seed": 9}
    megablend.build(other)
    dataset = megablend.open(other)
    with pytest.raises(
        megablend.StateError,
        match=f"the plan differs: the state was saved with plan {state['plan']}",
    ):
        dataset.load_state_dict(state)
    KINDS["parquet"].write(tmp_path / "data" / "source0" / "9.parquet", [[900_001, 900_002]] * 9)
    newer = config | {"run": "newer"}
    digest = megablend.build(newer).index.digest
    dataset = megablend.open(newer)
    with pytest.raises(
        megablend.StateError,
        match=rf"of index {state['index']}, but .* of index {digest}; .*open\(config, state",
    ):
        dataset.load_state_dict(state)
    assert dataset.consumed_samples == 0
    resumed = megablend.open(config, state=state)
    assert (resumed.run.ledger.index, resumed.consumed_samples) == (state["index"], 16)


def test_a_state_opens_its_own_snapshot_without_the_ledger(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    megablend.build(config)
    dataset = megablend.open(config)
    before = tokens(dataset)
    state = dataset.state_dict(32)
    KINDS["parquet"].write(tmp_path / "data" / "source0" / "9.parquet", [[900_001, 900_002]] * 9)
    (tmp_path / "cache" / "runs" / "demo.json").unlink()
    megablend.build(config)  # the run's name now stands for a run on the new index
    assert torch.equal(tokens(megablend.open(config, state=state)), before)


def test_a_state_whose_snapshot_is_gone(tmp_path: Path, config: dict[str, Any]) -> None:
    megablend.build(config)
    state = megablend.open(config).state_dict(32)
    shutil.rmtree(tmp_path / "cache" / "generations" / state["index"])
    with pytest.raises(
        megablend.StateError, match=f"saved with index {state['index']}, which is not in"
    ):
        megablend.open(config, state=state)


def test_moved_data_resumes(tmp_path: Path, config: dict[str, Any]) -> None:
    megablend.build(config)
    dataset = megablend.open(config)
    before = tokens(dataset)
    state = dataset.state_dict(32)
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    moved = [
        source | {"path": source["path"].replace("/data/", "/elsewhere/")}
        for source in config["sources"]
    ]
    # Without a build
    assert torch.equal(tokens(megablend.open(config | {"sources": moved}, state=state)), before)
    assert megablend.build(config | {"sources": moved}).index.digest == state["index"]
    assert torch.equal(tokens(megablend.open(config | {"sources": moved})), before)


@pytest.mark.parametrize("consumed", [-1, 101])
def test_consumed_samples_out_of_range(config: dict[str, Any], consumed: int) -> None:
    megablend.build(config)
    with pytest.raises(
        megablend.StateError,
        match=f"consumed_samples is {consumed}; expected 0 to 100, the samples",
    ):
        megablend.open(config, consumed_samples=consumed)


def test_unknown_split_and_doubled_resume(config: dict[str, Any]) -> None:
    megablend.build(config)
    with pytest.raises(
        megablend.ConfigError, match="found split 'vlid', expected one of train, valid, test"
    ):
        megablend.open(config, "vlid")
    with pytest.raises(megablend.ConfigError, match="found both state and consumed_samples"):
        megablend.open(config, state=megablend.open(config).state_dict(), consumed_samples=5)
    with pytest.raises(
        megablend.PlanError, match="split 'valid' has fewer tokens than one sample of 8 tokens"
    ):
        megablend.open(config, "valid")


def test_max_epochs_is_a_hard_cap(config: dict[str, Any]) -> None:
    sources = [config["sources"][0], config["sources"][1] | {"max_epochs": "0.5"}]
    says = r"source 's1' would be read .* more than its max_epochs 0\.5 \(.* At most [\d,]+ samples fit all caps"
    with pytest.raises(megablend.PlanError, match=says):
        megablend.build(config | {"sources": sources, "samples": 300})


def test_a_source_too_small_for_a_sample_is_refused_by_name(config: dict[str, Any]) -> None:
    sources = [config["sources"][0], config["sources"][1] | {"weight": "1e-9"}]
    with pytest.raises(
        megablend.PlanError,
        match=r"source 's1' gets none of the 100 samples: its share is 1\.33e-09",
    ):
        megablend.build(config | {"sources": sources})


@pytest.mark.parametrize(("unit", "amount"), [("tokens", "7"), ("epochs", "0.001")])
def test_an_amount_too_small_for_a_sample_is_refused_by_name(
    config: dict[str, Any], unit: str, amount: str
) -> None:
    sources = [
        {key: value for key, value in source.items() if key != "weight"} | {unit: value}
        for source, value in zip(config["sources"], ("800", amount), strict=True)
    ]
    config = {key: value for key, value in config.items() if key != "samples"} | {
        "sources": sources
    }
    with pytest.raises(
        megablend.PlanError,
        match=rf"source 's1' would give train \d+ tokens, fewer than .* or `{unit}: 0`",
    ):
        megablend.build(config)
    config["sources"] = [sources[0], sources[1] | {unit: 0}]
    assert megablend.build(config).stages_before == 0


def test_more_samples_than_a_plan_holds(config: dict[str, Any]) -> None:
    with pytest.raises(
        megablend.PlanError,
        match="would have 1,152,921,504,606,846,976 samples; a plan can have at most",
    ):
        megablend.build(config | {"samples": 1 << 60})


@pytest.mark.parametrize(
    ("unit", "values"), [("samples", (30, 20)), ("tokens", (245, 160)), ("epochs", ("1.5", "2"))]
)
def test_amounts_are_given_exactly(
    config: dict[str, Any], unit: str, values: tuple[Any, Any]
) -> None:
    sources = [
        {key: value for key, value in source.items() if key != "weight"} | {unit: value}
        for source, value in zip(config["sources"], values, strict=True)
    ]
    config = {key: value for key, value in config.items() if key != "samples"} | {
        "sources": sources
    }
    megablend.build(config)
    described = megablend.describe(config).to_dict()["splits"]["train"]["sources"]
    if unit == "epochs":
        for source, epochs in zip(described, (1.5, 2), strict=True):
            assert source["samples"] == int(epochs * source["tokens"] - 1) // 8
    else:
        assert [source["samples"] for source in described] == [30, 20]


def test_validation_is_one_pass_unless_sized(config: dict[str, Any]) -> None:
    megablend.build(config | {"split": "50,50,0", "samples": 30})
    one_pass = megablend.describe(config | {"split": "50,50,0", "samples": 30}).to_dict()["splits"][
        "valid"
    ]
    assert not one_pass["blended"]
    assert all(source["epochs"] <= 1 for source in one_pass["sources"])
    sized = megablend.describe(
        config | {"split": "50,50,0", "samples": 30, "valid_samples": 1000}
    ).to_dict()["splits"]["valid"]
    assert (sized["samples"], [source["samples"] for source in sized["sources"]]) == (
        1000,
        [750, 250],
    )


def test_a_source_list_per_split(tmp_path: Path, config: dict[str, Any]) -> None:
    train, valid = config["sources"]
    config |= {"sources": {"train": [train], "valid": [valid | {"weight": 1}]}}
    megablend.build(config)
    assert set(megablend.describe(config).to_dict()["splits"]) == {"train", "valid"}
    assert (megablend.open(config, "valid")[0]["tokens"] // 100_000 <= 1).all()
    assert (megablend.open(config)[0]["tokens"] < 100_000).all()
    with pytest.raises(megablend.PlanError, match="the config lists no sources for split 'test'"):
        megablend.open(config, "test")


def test_pages_of_any_blocks(config: dict[str, Any]) -> None:
    built = megablend.build(config)
    store = megablend.open_index(config["cache"], built.index.digest)
    num_blocks = len(store.snapshot.tokens_before) - 1
    pages = store.read_blocks(range(num_blocks))
    listed = [documents(d, 60, 30, 5) for d in range(2)]
    assert pages.tokens.tolist() == [
        token for docs in listed for doc in docs for token in doc or []
    ]
    again = store.read_blocks([3, 0, 3])
    assert again.block_offsets[-1] == len(again.tokens) == again.offsets[-1]
    assert again.tokens[: again.block_offsets[1]].tolist() == store.read_blocks([3]).tokens.tolist()
    assert len(store.read_blocks([]).tokens) == 0
    with pytest.raises(IndexError, match=f"block {num_blocks} is out of range"):
        store.read_blocks([num_blocks])
    with pytest.raises(TypeError, match="block numbers must be integers, not float64"):
        store.read_blocks([1.5])


def test_a_build_keeps_what_the_order_of_large_sources_needs(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ORDERS, "block", OrderKind(partial(BlockOrder, threshold=3, groups=4)))
    blended = config | {"split": "50,50,0", "valid_samples": 20}
    megablend.build(blended)
    expected = {split: tokens(megablend.open(blended, split)) for split in ("train", "valid")}
    monkeypatch.setattr(
        "megablend.index.tables.ranged_blocks.count_groups",
        lambda *args: pytest.fail("counted again"),
    )
    for split, found in expected.items():
        assert torch.equal(tokens(megablend.open(blended, split)), found)
