"""Runs of an earlier state of the code, amended, grown, skipped and renamed: every field of every sample is still the same."""

from __future__ import annotations

import json
import secrets
import shutil
from pathlib import Path
from typing import Any

import pytest
from make_golden_histories import FOLLOWING, digest_samples

import megablend
from megablend.errors import StateError
from megablend.operations.session import Session
from megablend.run.ledger_file import load_ledger
from tests.caches.conftest import use_container
from tests.storage.objects.conftest import azurite, environments, obstore
from tests.storage.objects.servers.fill import AzureContainer

__all__ = ["azurite", "environments", "obstore"]

FOLDER = Path(__file__).parent / "h71d913b"
IN_A_BUCKET = "in_a_bucket"
HISTORIES = sorted(path.name for path in FOLDER.iterdir() if path.name != IN_A_BUCKET)
LETTERS = 8
CHANGED: dict[tuple[str, str], dict[str, list[int]]] = {
    # Its extra token was the first one of what was left without the file that is gone: not what it had been before the stage.
    ("grown_at_the_end", "train"): {"labels": [147]},
}
"""By history and split, what a later release reads otherwise on purpose: the field, and the samples."""
CANNOT_GROW = ("redistributed",)
"""Histories whose shares depend on the run's length."""
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*checksums of blocks:UserWarning"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    name = request.node.callspec.params["name"]
    copied = Path(shutil.copytree(FOLDER / name, tmp_path / name))
    monkeypatch.chdir(copied)
    return copied


def load_expected(name: str) -> dict[str, Any]:
    expected: dict[str, Any] = json.loads((FOLDER / name / "expected.json").read_text())
    return expected


def divide(digests: str) -> list[str]:
    return [digests[at : at + LETTERS] for at in range(0, len(digests), LETTERS)]


def find_changes(before: dict[str, str], now: dict[str, str]) -> dict[str, list[int]]:
    """The samples of each field that differ; a field that only one has differs in all."""
    changes = {}
    for field in sorted(before.keys() | now.keys()):
        pairs = enumerate(
            zip(divide(before.get(field, "")), divide(now.get(field, "")), strict=True)
        )
        if differing := [k for k, (old, new) in pairs if old != new]:
            changes[field] = differing
    return changes


def read_split(dataset: megablend.Dataset) -> dict[str, str]:
    return digest_samples(dataset, range(len(dataset)))


@pytest.mark.parametrize("name", HISTORIES)
def test_every_field_of_every_sample_is_the_same(folder: Path, name: str) -> None:
    expected = load_expected(name)
    for split, before in expected["splits"].items():
        dataset = megablend.open("config.json", split)
        assert find_changes(before, read_split(dataset)) == CHANGED.get((name, split), {})
    train = megablend.open("config.json")
    assert list(train.run.ledger.digests) == expected["ledger"]
    assert [list(each) for each in train.skips.ranges] == expected["skips"]


@pytest.mark.parametrize("name", HISTORIES)
def test_states_go_on_or_are_refused_as_they_were(folder: Path, name: str) -> None:
    changed = CHANGED.get((name, "train"), {})
    for kept in load_expected(name)["states"]:
        if kept["following"] is None:
            with pytest.raises(StateError):
                megablend.open("config.json", state=kept["state"])
            continue
        dataset = megablend.open("config.json", state=kept["state"])
        assert dataset.consumed_samples == kept["state"]["consumed_samples"]
        first = dataset.consumed_samples
        now = digest_samples(dataset, range(first, min(first + FOLLOWING, len(dataset))))
        found = find_changes(kept["following"], now)
        assert all(first + k in changed.get(field, ()) for field, ks in found.items() for k in ks)
        loader = megablend.Loader(dataset, micro_batch_size=1, drop_last=False)
        if first < len(dataset):
            assert len(next(iter(loader))["tokens"]) == 1


@pytest.mark.parametrize("name", HISTORIES)
def test_stored_plans_are_used_or_made_again(folder: Path, name: str) -> None:
    with_plans = read_split(megablend.open("config.json"))
    shutil.rmtree("cache/splits")
    assert read_split(megablend.open("config.json")) == with_plans


@pytest.mark.parametrize("name", [name for name in HISTORIES if name not in CANNOT_GROW])
def test_a_build_changes_nothing_and_a_longer_one_only_appends(folder: Path, name: str) -> None:
    config = json.loads(Path("config.json").read_text())
    before = read_split(megablend.open("config.json"))
    digests = load_expected(name)["ledger"]
    ledger = load_ledger("cache", config["run"])
    assert ledger is not None
    stages = config.get("stages")
    if stages:
        last = stages[-1] | {"samples": ledger.num_samples + 40}
        config = {key: value for key, value in config.items() if key != "samples"} | {
            "stages": [*stages[:-1], last]
        }
    else:
        config["samples"] = ledger.num_samples + 40
    megablend.build(config)
    longer = megablend.open(config)
    assert longer.run.ledger.digests[: len(digests) - 1] == tuple(digests[:-1])
    assert len(longer) == ledger.num_samples + 40
    changes = find_changes(before, digest_samples(longer, range(ledger.num_samples)))
    assert changes == {}
    assert megablend.verify("cache").problems == ()


@pytest.mark.parametrize("has_copy", [True, False])
def test_a_cache_in_a_bucket_and_the_copy_of_a_node(
    azurite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_copy: bool
) -> None:
    """The node with the copy opens without the index in the bucket; one without it reads what the bucket has."""
    folder = Path(shutil.copytree(FOLDER / IN_A_BUCKET, tmp_path / "run"))
    monkeypatch.chdir(folder)
    container = AzureContainer(azurite, f"golden{secrets.token_hex(4)}")
    use_container(container, tmp_path, monkeypatch)
    config = json.loads(Path("config.json").read_text()) | {"cache": f"az://{container.name}/run"}
    Path("config.json").write_text(json.dumps(config))
    if has_copy:
        shutil.copytree("node", Session("config.json").cache.folder, dirs_exist_ok=True)
    for path in (each for each in Path("bucket").rglob("*") if each.is_file()):
        key = path.relative_to("bucket")
        if not has_copy or key.parts[0] != "generations" or "commits" in key.parts:
            container.put(f"run/{key}", path.read_bytes())
    expected = load_expected(IN_A_BUCKET)
    for split, before in expected["splits"].items():
        assert find_changes(before, read_split(megablend.open("config.json", split))) == {}
    kept = next(each for each in expected["states"] if each["following"] is not None)
    dataset = megablend.open("config.json", state=kept["state"])
    first = dataset.consumed_samples
    assert kept["following"] == digest_samples(dataset, range(first, first + FOLLOWING))
