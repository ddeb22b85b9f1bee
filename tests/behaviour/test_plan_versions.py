"""The version of the plan: new runs have the newest, runs keep theirs, and what is described is what is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megablend
from megablend.run.run import Run
from tests.golden_releases import copy_release
from tests.runs import EOD, documents, make_config, write_source


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    sources = [
        write_source(tmp_path / "data", d, "arrow", documents(d, 60, 30, 5)) for d in range(3)
    ]
    for source, weight in zip(sources, ("0.6", "0.3", "0.1"), strict=True):
        source |= {"weight": weight, "append_eod": EOD}
    return make_config(tmp_path, sources, samples=900, split="80,20,0", valid_samples=200)


def first_repeat(run: Run) -> dict[str, Any]:
    """Found by looking at every sample: where a source has had as many as read its first epoch."""
    sources, ordinals = run.plan.locate_many(np.arange(run.num_samples))
    spans = run.locate_spans(sources, ordinals)
    again = np.unique(spans.rows[spans.epochs > 0])
    samples = {
        np.flatnonzero(sources == source)[ordinals[again[sources[again] == source]].min()]: source
        for source in set(sources[again].tolist())
    }
    return {"source": run.sources[samples[min(samples)]].name, "sample": int(min(samples))}


def test_new_runs_have_the_newest_version_in_all_blended_splits(config: dict[str, Any]) -> None:
    ledger = megablend.build(config).ledger
    assert ledger.plan_version == 2
    assert megablend.open(config, "valid").run.ledger.plan_version == 2
    del config["valid_samples"]
    assert megablend.open(config, "valid").run.ledger.plan_version == 1


def test_described_is_where_a_source_is_first_read_again(config: dict[str, Any]) -> None:
    megablend.build(config)
    described = megablend.describe(config).to_dict()["splits"]
    for split in ("train", "valid"):
        assert described[split]["first_repeated_source"] == first_repeat(
            megablend.open(config, split).run
        )


@pytest.mark.parametrize("run", ["pages", "rows", "in_place"])
def test_it_is_so_for_runs_of_the_first_version(tmp_path: Path, run: str) -> None:
    config = copy_release("v0_1_0", tmp_path) / f"{run}.json"
    opened = megablend.open(config).run
    assert opened.ledger.plan_version == 1
    assert megablend.describe(config).to_dict()["splits"]["train"][
        "first_repeated_source"
    ] == first_repeat(opened)


def test_cycles_are_read_from_the_ledger(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = megablend.build(config).ledger
    plan = megablend.open(config).run.plan
    before = [plan.locate(k) for k in range(0, 900, 7)]
    state = megablend.open(config).state_dict(10)
    monkeypatch.setattr("megablend.run.compile.cycles_per_run", lambda *args: 3)
    assert {source.cycles for source in ledger.blend.sources} != {3}
    assert megablend.build(config).ledger == ledger
    for opened in (megablend.open(config), megablend.open(config, state=state)):
        assert [opened.run.plan.locate(k) for k in range(0, 900, 7)] == before
    longer = megablend.build(config | {"samples": 1200}).ledger
    assert (longer.blend, longer.digests[:1]) == (ledger.blend, ledger.digests)


def test_a_state_of_no_version_is_refused_with_both_digests(config: dict[str, Any]) -> None:
    ledger = megablend.build(config).ledger
    state = megablend.open(config).state_dict(10)
    state |= {"plan": "0" * 32, "stages": [[900, "0" * 32]]}
    with pytest.raises(
        megablend.StateError,
        match=f"saved with plan {'0' * 32} of .*, but this dataset has plan {ledger.digest}",
    ):
        megablend.open(config, state=state)
