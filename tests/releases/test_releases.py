"""A cache, a ledger and a state written by an earlier release open and resume with the same tokens, wherever they are moved."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make_golden_release import digest_numbers, read_samples

import megablend
from tests import runs
from tests.golden_releases import RELEASES, copy_release, load_expected

NAMES = [(release, name) for release in RELEASES for name in load_expected(release)["samples"]]
LAST = [(release, name) for release, name in NAMES if name != "pages train stage 0"]
"""Those whose configs are still in the folder."""


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return copy_release(request.node.callspec.params["release"], tmp_path)


def expected_of(release: str, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A state; and what was read, but for what came after the state."""
    expected = load_expected(release)
    samples = dict(expected["samples"][name])
    samples.pop("rest")
    return expected["states"][name], samples


def test_there_is_a_release() -> None:
    assert "v0_1_0" in RELEASES


@pytest.mark.parametrize(("release", "name"), LAST)
def test_a_ledger_of_the_release_opens_with_the_same_samples(
    folder: Path, release: str, name: str
) -> None:
    taken, expected = expected_of(release, name)
    dataset = megablend.open(folder / f"{taken['run']}.json", taken["split"])
    assert read_samples(dataset) == expected
    assert dataset.state_dict(taken["state"]["consumed_samples"]) == taken["state"]


@pytest.mark.parametrize(("release", "name"), NAMES)
def test_a_state_of_the_release_resumes(folder: Path, release: str, name: str) -> None:
    taken, expected = expected_of(release, name)
    dataset = megablend.open(folder / f"{taken['run']}.json", taken["split"], state=taken["state"])
    loader = megablend.Loader(
        dataset, micro_batch_size=1, data_parallel_rank=0, data_parallel_size=1, drop_last=False
    )
    loader.load_state_dict(taken["state"])
    count = expected["samples"] - taken["state"]["consumed_samples"]
    tokens = [batch["tokens"][0].numpy() for _, batch in zip(range(count), loader, strict=False)]
    assert len(tokens) == count
    assert digest_numbers(tokens) == load_expected(release)["samples"][name]["rest"]


@pytest.mark.parametrize(("release", "name"), NAMES)
def test_a_state_alone_is_enough(folder: Path, release: str, name: str) -> None:
    shutil.rmtree(folder / "cache" / "runs")
    taken, expected = expected_of(release, name)
    dataset = megablend.open(folder / f"{taken['run']}.json", taken["split"], state=taken["state"])
    assert read_samples(dataset) == expected
    assert dataset.state_dict() == taken["state"]


@pytest.mark.parametrize("release", RELEASES)
def test_a_state_finds_its_plan_where_the_run_was_planned_again(folder: Path, release: str) -> None:
    shutil.rmtree(folder / "cache" / "runs")
    for name in load_expected(release)["samples"]:
        taken, expected = expected_of(release, name)
        config = folder / f"{taken['run']}.json"
        megablend.build(config)
        dataset = megablend.open(config, taken["split"], state=taken["state"])
        tokens = [
            each.tokens[:-1] for each in runs.read_samples(dataset, range(expected["samples"]))
        ]
        assert digest_numbers(tokens) == expected["tokens"]


def test_new_runs_of_these_configs_have_another_order(tmp_path: Path) -> None:
    """So that the tests above can fail: version 1 of the plan is not what is planned today."""
    folder = copy_release("v0_1_0", tmp_path)
    shutil.rmtree(folder / "cache" / "runs")
    for name in (
        "pages train stage 1",
        "pages valid stage 1",
        "rows train stage 0",
        "in_place train stage 0",
    ):
        taken, expected = expected_of("v0_1_0", name)
        config = folder / f"{taken['run']}.json"
        megablend.build(config)
        dataset = megablend.open(config, taken["split"])
        assert dataset.run.ledger.plan_version == 2
        assert read_samples(dataset)["ordinals"] != expected["ordinals"]


@pytest.mark.parametrize("release", RELEASES)
def test_a_run_of_the_release_is_lengthened_and_keeps_its_past(folder: Path, release: str) -> None:
    config = json.loads((folder / "pages.json").read_text())
    before = json.loads((folder / "cache" / "runs" / "pages.json").read_text())
    built = megablend.build(folder / "pages.json")
    assert (built.ledger.digests, built.stages_before) == (tuple(before["digests"]), 2)
    assert not built.index.created
    (folder / "pages.json").write_text(json.dumps(config | {"samples": 1100}))
    assert megablend.build(folder / "pages.json").ledger.digests[:2] == built.ledger.digests
    dataset = megablend.open(folder / "pages.json")
    assert len(dataset) == 1100
    _, expected = expected_of(release, "pages train stage 1")
    sources, ordinals = dataset.run.plan.locate_many(np.arange(expected["samples"]))
    assert digest_numbers([ordinals]) == expected["ordinals"]
    every = np.stack(dataset.run.plan.locate_many(np.arange(1100)))
    for source in range(3):
        assert np.array_equal(
            np.sort(every[1][every[0] == source]), np.arange((every[0] == source).sum())
        )
    assert digest_numbers([sources]) == expected["sources"]
    taken, _ = expected_of(release, "pages valid stage 1")
    assert megablend.open(folder / "pages.json", "valid").state_dict() == taken["state"] | {
        "consumed_samples": 0
    }


@pytest.mark.parametrize("release", RELEASES)
def test_a_cache_of_the_release_is_found_undamaged(folder: Path, release: str) -> None:
    assert megablend.verify(folder / "cache").problems == ()
    for run, samples in (("pages", 700), ("rows", 400), ("in_place", 250)):
        assert (
            megablend.describe(folder / f"{run}.json").to_dict()["splits"]["train"]["samples"]
            == samples
        )
    megablend.build(folder / "pages.json")  # the data was moved
    assert megablend.verify(folder / "cache", data=True).problems == ()
