"""export, against the samples themselves."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import megablend
from megablend.errors import ConfigError, MegablendError, ResourceError
from megablend.inspect import export as export_module
from tests.inspect.test_find import make_run
from tests.runs import EOD


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return rows


def test_rows_are_the_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = make_run(tmp_path)
    monkeypatch.setattr(export_module, "CHUNK", 16)
    target = tmp_path / "order.parquet"
    seen = list[tuple[int, int]]()
    written = megablend.export(
        config, target, start=30, stop=71, progress=lambda done, of: seen.append((done, of))
    )
    assert seen == [(16, 41), (32, 41), (41, 41)]
    assert written.to_dict()["bytes"] == target.stat().st_size
    assert pq.ParquetFile(target).num_row_groups == 3
    rows = rows_of(target)
    dataset = megablend.open(config)
    assert [row["sample"] for row in rows] == list(range(30, 71))
    files = {dataset.run.store.snapshot.path(i, dataset.run.store.roots): i for i in range(6)}
    for row in rows:
        shown = megablend.show(config, row["sample"])
        assert (row["source"], row["ordinal"], row["epoch"]) == (
            shown.to_dict()["source"],
            shown.to_dict()["ordinal"],
            shown.to_dict()["pieces"][0]["epoch"],
        )
        firsts = [
            dataset.run.store.snapshot.files.entry(files[piece["file"]]).first_block
            for piece in row["pieces"]
        ]
        numbers = [
            first + piece["block"] for first, piece in zip(firsts, row["pieces"], strict=True)
        ]
        parts = [
            dataset.read_blocks([number]).tokens[piece["start"] : piece["stop"]]
            for number, piece in zip(numbers, row["pieces"], strict=True)
        ]
        assert np.concatenate(parts).tolist() == shown.to_dict()["tokens"]
        assert [piece["byte_offset"] for piece in row["pieces"]] == [
            each["byte_offset"] for each in shown.to_dict()["pieces"]
        ]
        assert [piece["epoch"] for piece in row["pieces"]] == [
            each["epoch"] for each in shown.to_dict()["pieces"]
        ]


@pytest.mark.parametrize(
    ("order", "split"), [("document", "train"), ("document", "valid"), ("block", "train")]
)
def test_pieces_name_rows_where_the_index_knows_them(
    tmp_path: Path, order: str, split: str
) -> None:
    config, listed = make_run(tmp_path, order=order, valid_samples=60)
    target = tmp_path / "order.parquet"
    num_pieces = 0
    megablend.export(config, target, split=split)
    dataset = megablend.open(config, split)
    for row in rows_of(target):
        at = 0
        tokens = dataset.sample(row["sample"]).tokens.tolist()
        for piece in row["pieces"]:
            first = tokens[at]
            at += piece["stop"] - piece["start"]
            if order == "block":
                assert piece["row"] is None
            elif first != EOD:
                num_pieces += 1
                documents = listed[int(row["source"][1:])]
                file = int(Path(piece["file"]).stem)
                rows_per_file = -(-len(documents) // 2)
                assert first in (documents[file * rows_per_file + piece["row"]] or [])
    assert (num_pieces > 100) == (order == "document")


def test_the_file_says_which_run_it_is_of(tmp_path: Path) -> None:
    config, _ = make_run(tmp_path)
    target = tmp_path / "order.parquet"
    megablend.export(config["cache"], target, run="demo", stop=5)
    kept = json.loads(pq.read_schema(target).metadata[b"megablend"])
    ledger = megablend.open(config).run.ledger
    assert (kept["run"], kept["plan"], kept["index"]) == ("demo", ledger.digest, ledger.index)
    megablend.export(config, target, split="valid")
    assert [row["sample"] for row in rows_of(target)] == list(
        range(len(megablend.open(config, "valid")))
    )
    megablend.export(config, target, start=7, stop=7)
    assert rows_of(target) == []


def test_nothing_half_written_is_left(tmp_path: Path) -> None:
    config, _ = make_run(tmp_path)
    target = tmp_path / "out" / "order.parquet"
    target.parent.mkdir()
    target.write_text("before")

    def stop(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        megablend.export(config, target, progress=stop)
    assert [path.name for path in target.parent.iterdir()] == ["order.parquet"]
    assert target.read_text() == "before"
    with pytest.raises(
        ConfigError, match="found samples 0 to 201, expected a range within 0 to 200"
    ):
        megablend.export(config, target, stop=201)
    with pytest.raises(MegablendError, match="missing"):
        megablend.export(config, tmp_path / "missing" / "order.parquet")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    config, _ = make_run(tmp_path)
    target = tmp_path / "order.parquet"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, hard))
    try:
        with pytest.raises(
            ResourceError,
            match=rf"^{target}: .*File too large.*; allow larger files \(`ulimit -f`\)",
        ):
            megablend.export(config, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not [path for path in tmp_path.iterdir() if "order" in path.name]
    megablend.export(config, target)


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_only_files_are_replaced(tmp_path: Path, kind: str) -> None:
    config, _ = make_run(tmp_path)
    target = tmp_path / "target"
    target.mkdir() if kind == "folder" else os.mkfifo(target)
    before = target.stat()
    with pytest.raises(ConfigError, match="specify the name of a regular file to write"):
        megablend.export(config, target)
    assert target.stat().st_ino == before.st_ino
    with pytest.raises(ConfigError, match="its folder does not exist"):
        megablend.export(config, tmp_path / "none" / "order.parquet")
