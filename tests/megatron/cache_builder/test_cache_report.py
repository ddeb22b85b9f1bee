"""The result of `prepare`, as a notebook and `--json` show it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megablend.megatron import prepare
from tests.megatron.plugin_data import draw_documents, write_word
from tests.megatron.reference import config_of

pytestmark = [
    pytest.mark.usefixtures("distributed"),
    pytest.mark.filterwarnings("ignore:The pad token id:UserWarning"),
]


def test_a_report_is_shown_like_other_results(tmp_path: Path) -> None:
    words = [
        write_word(tmp_path / str(seed), "megatron", draw_documents(seed, 30)) for seed in range(2)
    ]
    config = config_of(tmp_path / "cache", blend=(words, [0.25, 0.75]), split="80,20,0")
    report = prepare(config, [40, 10, 0])
    text = repr(report)
    assert text.startswith("CacheReport(cache=")
    assert "splits=<2 of SplitPlan>" in text
    assert len(text.splitlines()) <= 5
    assert "<tr><th>dry_run</th><td>False</td></tr>" in report._repr_html_()
    printed = json.loads(json.dumps(report.to_dict()))
    assert printed["cache"] == str(tmp_path / "cache")
    assert [split["split"] for split in printed["splits"]] == ["train", "valid"]
    num_bytes = sum(np.load(path).nbytes for path in (tmp_path / "cache").glob("*.npy"))
    assert sum(split["bytes"] for split in printed["splits"]) == num_bytes
    assert {each["base"] for each in printed["artefacts"]} == report.missing
