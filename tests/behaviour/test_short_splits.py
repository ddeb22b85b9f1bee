"""Splits that are too short for a step, or whose length is unknown, are reported."""

from pathlib import Path
from typing import Any

import pytest

import megablend
from megablend.cli.describe import print_cache, print_summary
from megablend.inspect.description import CacheDescription, RunDescription
from tests.runs import documents, make_config, write_source


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    source = write_source(tmp_path / "data", 0, "arrow", documents(0, 60, 30, 5))
    config = make_config(
        tmp_path, [source | {"weight": 1}], samples=40, run="demo", split="90,10,0"
    )
    megablend.build(config)
    return config


def test_a_split_shorter_than_a_step_is_told(
    config: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    valid = megablend.open(config, split="valid")
    assert 0 < len(valid) < 64
    expected = (
        rf"valid has {len(valid)} samples, fewer than the 64 in one step \(micro batch 8 x 8 ranks\): the sampler "
        r"yields no batches"
    )
    with pytest.warns(RuntimeWarning, match=expected):
        loader = megablend.Loader(
            valid, micro_batch_size=8, data_parallel_rank=0, data_parallel_size=8
        )
    assert list(loader) == []
    kept = megablend.Loader(
        valid, micro_batch_size=8, data_parallel_rank=0, data_parallel_size=8, drop_last=False
    )
    assert len(list(kept)) == 1
    found = megablend.describe(config, micro_batch_size=8, data_parallel_size=8)
    assert isinstance(found, RunDescription)
    assert [found.to_dict()["splits"][split]["steps"] for split in ("train", "valid")] == [0, 0]
    print_summary(found)
    assert f"valid: {len(valid)} samples are fewer than a step needs" in capsys.readouterr().out
    found = megablend.describe(config, micro_batch_size=1)
    assert isinstance(found, RunDescription)
    assert found.to_dict()["splits"]["valid"]["steps"] == len(valid)
    print_summary(found)
    assert "fewer than a step" not in capsys.readouterr().out


def test_a_bare_number_is_taken_for_train_alone(config: dict[str, Any]) -> None:
    assert megablend.open(config, consumed_samples=8).consumed_samples == 8
    with pytest.raises(
        megablend.ConfigError, match=r"found consumed_samples=2 for valid, .*state="
    ):
        megablend.open(config, split="valid", consumed_samples=2)
    state = megablend.open(config, split="valid").state_dict(2)
    with pytest.raises(
        megablend.StateError,
        match="belongs to split 'valid', but this dataset is split 'train'; open that split",
    ):
        megablend.open(config).load_state_dict(state)
    assert megablend.open(config, split="valid", state=state).consumed_samples == 2
    assert megablend.open(config, split="valid", consumed_samples=0).consumed_samples == 0


def test_a_damaged_ledger_hides_no_other(
    config: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    megablend.build(config | {"run": "other"})
    ledger = Path(config["cache"]) / "runs" / "demo.json"
    ledger.write_text(ledger.read_text().replace("40", "41"))
    found = megablend.describe(config["cache"])
    assert isinstance(found, CacheDescription)
    damaged, other = found.to_dict()["runs"]
    assert (damaged["run"], other["run"], other["stages"]) == ("demo", "other", [40])
    assert "demo.json: the ledger does not match its checksum" in damaged["problem"]
    print_cache(found)
    printed = capsys.readouterr().out
    assert "damaged: " in printed
    assert "other" in printed
