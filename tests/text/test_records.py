"""What is known of each source's text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megablend.errors import ChangedFileError, CorruptFileError
from megablend.operations.build import build
from megablend.operations.session import Session
from megablend.operations.source_specs import list_specs
from megablend.storage.by_scheme import make_storage
from megablend.text.estimate import estimate_pending
from megablend.text.source import find_text, list_bad
from megablend.text.tasks import plan_tasks
from megablend.text.verify_text import verify_text
from tests.text.test_build import make_config

STORAGE = make_storage()


def test_sources_that_share_a_folder_have_records_of_their_own(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name in ("a", "b"):
        for i in range(2):
            bad = "{}\n" * (i + 1 if name == "b" else 0)
            (data / f"{name}{i}.jsonl").write_text(f'{{"text": "some text of {name}{i}"}}\n' + bad)
    config = make_config(tmp_path, samples=2, on_bad_document="skip", max_bad=1)
    source = config["sources"][0]
    config["sources"] = [
        source | {"name": name, "path": f"{data}/{name}*.jsonl"} for name in ("a", "b")
    ]
    build(config)
    opened = Session(config).config
    specs = list_specs(opened)
    assert [find_text(opened, spec, STORAGE).pending for spec in specs] == [[], []]
    assert list_bad(opened, "a", STORAGE) == []
    assert [each.count for each in list_bad(opened, "b", STORAGE)] == [3]
    assert list(verify_text(opened, specs, STORAGE, 10)) == []


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_key_that_no_document_has_is_told(tmp_path: Path, name: str) -> None:
    path = tmp_path / "data" / name
    path.parent.mkdir()
    if name == "a.parquet":
        pq.write_table(pa.table({"text": ["some text"] * 9, "id": range(9)}), path)
    else:
        path.write_text('{"text": "some text", "id": 1}\n' * 9)
    config = make_config(tmp_path, samples=1)
    assert build(config).index.notes == ()
    config["sources"][0]["key"] = "idd"
    (note,) = build(config | {"run": "other"}).index.notes
    assert "no document has the key 'idd'; correct `key`" in note


@pytest.mark.parametrize("name", ["0.parquet", "0.arrow", "0.jsonl.gz"])
def test_what_is_damaged_from_its_beginning_is_left_out_of_estimates_and_builds(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "1.jsonl").write_text('{"text": "some text"}\n' * 9)
    (data / name).write_bytes(b"neither this nor that" * 9)
    config = make_config(tmp_path, samples=1)
    with pytest.raises(CorruptFileError, match="on_unreadable: skip"):
        build(config)
    config |= {"on_unreadable": "skip"}
    opened = Session(config).config
    (spec,) = list_specs(opened)
    _, estimate, _ = estimate_pending(opened, spec, STORAGE)
    assert estimate.tokens > 0
    monkeypatch.setattr("megablend.text.tokenise._ESTIMATED_BYTES", 0)
    for _ in range(2):
        (skipped,) = build(config).index.skipped
        assert name in skipped
        assert find_text(opened, spec, STORAGE).pending == []


def test_tables_and_mixed_splits_are_warned_of(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "_delta_log").mkdir(parents=True)
    (data / "_delta_log/00000000000000000000.json").write_text("{}")
    for name in ("train", "test"):
        path = data / f"{name}-dbadd770-48be-4e69-9197-642d62ace002.parquet"
        pq.write_table(pa.table({"text": ["some text"] * 9}), path)
    config = make_config(tmp_path, samples=1)
    name = config["sources"][0]["name"]
    config["sources"][0]["path"] = f"{data}/*.parquet"
    (note,) = build(config).index.notes
    assert f"source {name!r}: its patterns match files of several splits (test (" in note
    assert f"source {name!r}: {data} is a Delta table, " in note


@pytest.mark.parametrize("left_out", [b'{"text": "b', b""])
def test_text_that_is_replaced_by_shorter_text_is_not_called_damaged(
    tmp_path: Path, left_out: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does a rank see it whose node has other text than the rank that listed it."""
    path = tmp_path / "data/a.jsonl"
    path.parent.mkdir()
    path.write_text('{"text": "a"}\n' * 9)

    def replace(*arguments: Any) -> Any:
        tasks = plan_tasks(*arguments)
        path.write_bytes(left_out)
        return tasks

    monkeypatch.setattr("megablend.text.tokenise.plan_tasks", replace)
    config = make_config(tmp_path, samples=1)
    with pytest.raises(
        ChangedFileError, match=r"a\.jsonl: changed while .* being tokenised, or is"
    ):
        build(config, processes=1)
