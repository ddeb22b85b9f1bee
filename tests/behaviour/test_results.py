"""Results: frozen attributes, and what `--json` prints."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

import megablend
from megablend.inspect.description import CacheDescription, FilesDescription, RunDescription
from megablend.operations.manage_runs import DamagedRun, RunSummary
from megablend.operations.verify import VerifyResult
from tests.runs import documents, make_config, write_source
from tests.storages import STORAGE


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    sources = [
        write_source(tmp_path / "data", d, "parquet", documents(d, 60, 30, 5))
        | {"weight": 3 - 2 * d}
        for d in range(2)
    ]
    return make_config(tmp_path, sources, samples=200, run="demo", split="80,20,0")


def describe(config: dict[str, Any], **options: Any) -> RunDescription:
    found = megablend.describe(config, **options)
    assert isinstance(found, RunDescription)
    return found


def test_describe_has_attributes_and_a_dict(config: dict[str, Any]) -> None:
    assert isinstance(files := megablend.describe(config), FilesDescription)
    assert files.to_dict()["files"][0]["name"] == files.files[0].name == "s0"
    megablend.build(config)
    found = describe(config, micro_batch_size=2)
    train = found.splits["train"]
    assert [source.requested_share for source in train.sources] == [0.75, 0.25]
    assert sum(source.samples for source in train.sources) == train.samples == 200
    assert train.first_repeated_source is not None
    assert found.to_dict()["splits"]["train"]["sources"][0]["tokens"] == train.sources[0].tokens
    assert found.to_dict()["stages"] == [200]
    assert found.to_dict()["splits"]["train"].keys() >= {
        "samples",
        "tokens",
        "blended",
        "sources",
        "steps",
    }
    assert "problem" not in train.to_dict()
    assert "read_amplification" not in describe(config).to_dict()
    with pytest.raises(TypeError, match="'RunDescription' object is not subscriptable"):
        found["splits"]  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.run = "other"  # type: ignore[misc]


def test_json_has_the_old_keys_too(config: dict[str, Any]) -> None:
    megablend.build(config)
    found = json.loads(json.dumps(describe(config).to_dict()))
    (first, *_) = found["splits"]["train"]["sources"]
    assert first["share_wanted"] == first["requested_share"]
    assert first["share_given"] == first["actual_share"]
    assert first["unread_tokens_of_last_epoch"] == first["tokens_left_in_epoch"]
    assert (
        found["splits"]["train"]["first_to_run_out"]
        == found["splits"]["train"]["first_repeated_source"]
    )
    assert set(found["splits"]["train"]["first_to_run_out"]) == {"source", "sample"}
    collected = megablend.gc(config, older_than_days=0).to_dict()
    assert (collected["generations"], collected["others"]) == (
        collected["removed"],
        collected["other_files"],
    )


def test_caches_runs_samples_and_steps(tmp_path: Path, config: dict[str, Any]) -> None:
    built = megablend.build(config)
    assert built.to_dict()["run"]["plan"] == built.ledger.digest
    (tmp_path / "cache" / "runs" / "bad.json").write_text("{")
    bad, demo = megablend.list_runs(config)
    assert isinstance(bad, DamagedRun)
    assert isinstance(demo, RunSummary)
    assert bad.to_dict().keys() == {"run", "problem"}
    assert (demo.stages, demo.to_dict()["stages"], demo.index_exists) == ((200,), [200], True)
    assert megablend.show_run(config, "demo").blend["sources"][0]["share"] == "3/4"
    assert isinstance(cache := megablend.describe(config["cache"]), CacheDescription)
    assert cache.runs == (bad, demo)
    sample = megablend.show(config, 3)
    assert sum(piece.stop_token - piece.first_token for piece in sample.pieces) == len(
        sample.tokens
    )
    assert sample.to_dict()["tokens"] == list(sample.tokens)
    step = megablend.show_step(config, 1, micro_batch_size=3)
    assert step.samples[0] == sample
    assert step.to_dict()["samples"][0] == sample.to_dict()
    assert pickle.loads(pickle.dumps(step)) == copy.deepcopy(step) == step


def test_a_result_is_seen_in_five_lines(config: dict[str, Any]) -> None:
    built = repr(megablend.build(config | {"order": "document"}))
    assert built.startswith(
        "BuildResult(index=<BuildReport>, documents=<TablesReport>, ranks=1, ledger=<Ledger>"
    )
    found = describe(config, micro_batch_size=2)
    text = repr(found)
    assert text.startswith(f"RunDescription(cache='{config['cache'][:40]}")
    assert "splits={train, valid}" in text
    assert "index=<IndexDescription>" in text
    (file,) = megablend.find(config, "source0/0.parquet", limit=2).found[:1]
    assert "samples=<2 of FoundSample>" in repr(file)
    step = repr(
        dataclasses.replace(found, run="r" * 300, problems=("p " * 200, *map(str, range(99))))
    )
    for each in (text, step, built):
        assert len(each.splitlines()) <= 5
        assert all(len(line) <= 100 for line in each.splitlines())


def test_a_description_is_printed_by_source(config: dict[str, Any]) -> None:
    megablend.build(config)
    found = describe(config)
    lines = str(dataclasses.replace(found, warnings=("a doubt",))).splitlines()
    assert lines[:4] == [
        "warning: a doubt",
        "run 'demo': samples of 8 tokens",
        "train: 200 samples, 1,600 tokens",
        f"  s0: 75.00%, 1,200 tokens, {found.splits['train'].sources[0].epochs:,.2f} epochs",
    ]


def test_notebooks_show_tables(config: dict[str, Any]) -> None:
    megablend.build(config)
    found = describe(config)
    sources = tuple(dataclasses.replace(found.index.sources[0], name=f"<{i}>") for i in range(25))
    page = dataclasses.replace(
        found, index=dataclasses.replace(found.index, sources=sources)
    )._repr_html_()
    assert page.startswith("<b>RunDescription</b><table><tr><th>cache</th>")
    assert "<td>&lt;19&gt;</td>" in page
    assert "<p>and 5 more</p>" in page
    assert "&lt;20&gt;" not in page
    assert page.count("<table>") == page.count("</table>") > 3


class CountingStorage:
    """Reads as the ordinary storage does, and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.calls += 1
        return getattr(STORAGE, name)

    def for_checking(self) -> CountingStorage:
        """The same, so that its calls count too."""
        return self


@pytest.mark.parametrize(
    "read",
    [
        lambda config, storage: megablend.describe(config, storage=storage),
        lambda config, storage: megablend.check(config, storage=storage),
        lambda config, storage: megablend.verify(config, data=True, storage=storage),
        lambda config, storage: megablend.show(config, 3, storage=storage),
        lambda config, storage: megablend.show_step(config, 3, micro_batch_size=1, storage=storage),
    ],
    ids=["describe", "check", "verify", "show", "show_step"],
)
def test_a_storage_of_your_own(config: dict[str, Any], read: Any) -> None:
    megablend.build(config)
    storage = CountingStorage()
    found = read(config, storage)
    default = read(config, None)
    assert found == default
    assert storage.calls > 0


def test_files_are_listed_through_a_storage_of_your_own(config: dict[str, Any]) -> None:
    storage = CountingStorage()
    assert isinstance(megablend.describe(config, storage=storage), FilesDescription)
    assert storage.calls > 0


def test_a_result_of_verify_is_no_condition() -> None:
    """It was a list of problems once."""
    result = VerifyResult(cache="/c", data=False, problems=(), notes=())
    with pytest.raises(TypeError, match="check its `problems`"):
        bool(result)
