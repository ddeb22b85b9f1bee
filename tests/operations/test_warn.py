"""Settings that a run has and that change nothing are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import megablend


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"eod_token": 5}, True),
        ({"eod_token": 5, "create_attention_mask": True}, True),
        ({"eod_token": 5, "eod_mask_loss": True}, False),
        ({"eod_token": 5, "stages": [{"samples": 4}, {"eod_mask_loss": True}]}, False),
        ({}, False),
    ],
)
def test_an_eod_token_on_which_nothing_acts_is_told(
    tmp_path: Path, settings: dict[str, Any], told: bool
) -> None:
    """Who sets it expects the token after each document, which `append_eod` puts there."""
    pq.write_table(pa.table({"input_ids": [list(range(100))]}), tmp_path / "a.parquet")
    config = {
        "cache": str(tmp_path / "cache"),
        "sequence_length": 8,
        "samples": 8,
        "lanes": 1,
        "shuffle_window": 4,
        "sources": [{"name": "a", "path": str(tmp_path / "a.parquet"), "weight": 1}],
    }
    warnings = megablend.build({**config, **settings}).warnings
    assert any(text.startswith("eod_token: has no effect") for text in warnings) is told
