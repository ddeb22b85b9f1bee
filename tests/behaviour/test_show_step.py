"""What a rank read at a step, against the loaders of all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import megablend
from megablend.errors import ConfigError
from tests.inspect.test_find import make_run


def test_ranks_read_what_is_shown(tmp_path: Path) -> None:
    config, _ = make_run(tmp_path, lanes=6)
    edited = config | {"seed": 8, "samples": 7}
    for rank in range(3):
        loader = megablend.Loader(
            megablend.open(config),
            micro_batch_size=2,
            data_parallel_rank=rank,
            data_parallel_size=3,
        )
        batches = iter(loader)
        for step in range(3):
            read = [next(batches) for _ in range(2)]
            tokens = [row[:8] for batch in read for row in batch["tokens"].tolist()]
            shown = megablend.show_step(
                edited,
                step,
                rank=rank,
                micro_batch_size=2,
                data_parallel_size=3,
                global_batch_size=12,
            )
            assert [each["tokens"][:8] for each in shown.to_dict()["samples"]] == tokens
            assert (shown.to_dict()["run"], shown.to_dict()["step"], shown.to_dict()["rank"]) == (
                "demo",
                step,
                rank,
            )


def test_steps_that_there_are_not(tmp_path: Path) -> None:
    config, _ = make_run(tmp_path)
    sizes: dict[str, Any] = {"micro_batch_size": 4, "data_parallel_size": 2}
    assert len(megablend.show_step(config, 24, rank=1, **sizes).to_dict()["samples"]) == 4
    with pytest.raises(
        ConfigError, match="found step 25, expected 0 to 24: train has 200 samples, 8 per step"
    ):
        megablend.show_step(config, 25, **sizes)
    with pytest.raises(
        ConfigError, match="a step of 1,000 samples is larger than train, which has 200 samples"
    ):
        megablend.show_step(config, 0, micro_batch_size=1000)
    with pytest.raises(ConfigError, match="found rank 2, expected 0 to 1"):
        megablend.show_step(config, 0, rank=2, **sizes)
    with pytest.raises(
        ConfigError,
        match="found a global batch of 12 samples, expected a multiple of micro batch 4 x 2",
    ):
        megablend.show_step(config, 0, global_batch_size=12, **sizes)
