"""Remedies in messages about indexes, caches and the files that are indexed: each is done as its message says."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import megablend
from megablend.api.check_data import check_data
from megablend.api.gc import gc
from megablend.blocks import count_ranges
from megablend.config.vocab import read_vocab_size
from megablend.errors import CacheError, ChangedFileError, ConfigError, UnsupportedFileError
from megablend.formats import FORMATS
from megablend.fs import build_lock
from megablend.index import file_tasks
from megablend.index.sampled_digest import sampled_content_digest
from tests.api.test_remedies_of_runs import configure, run_named
from tests.api.test_repairs import Project, commands_in
from tests.formats.test_registry import TOKENS
from tests.pairs import write_pair
from tests.runs import make_config

Config = dict[str, Any]
ROWS = [list(range(1, 1 + i % 40)) for i in range(200)]


def source_of(path: Path, rows: list[list[int]], **more: Any) -> Config:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"ids": rows, **more}), path, write_statistics=False, use_dictionary=False)
    return {"name": path.stem, "path": str(path), "column": "ids", "weight": 1}


def read_all(config: Config) -> list[list[int]]:
    megablend.build(config)
    dataset = megablend.open(config)
    return [dataset[k]["tokens"].tolist() for k in range(len(dataset))]


@pytest.mark.parametrize("call", [lambda cache: gc(cache), lambda cache: megablend.verify(cache)], ids=["gc", "verify"])
def test_no_cache(tmp_path: Path, call: Callable[[str], Any]) -> None:
    project = Project(tmp_path)
    other = str(tmp_path / "other")
    with pytest.raises(CacheError, match="other: there is no cache here: build one, or specify another location"):
        call(other)
    call(str(project.cache))
    configure(cache=other)(project)
    megablend.build(str(project.path))
    call(other)


def refuse_locks(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """As file systems of which a mount option takes the locks."""
    try_lock = build_lock._try_lock

    def refuse(file: IO[str]) -> int:
        path = Path(f"/proc/self/fd/{file.fileno()}").readlink()
        return 38 if path.is_relative_to(cache) else try_lock(file)

    monkeypatch.setattr(build_lock, "_try_lock", refuse)


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = Project(tmp_path)
    refuse_locks(monkeypatch, project.cache)
    says = (
        r"copy the cache to one that has locks; or, while no build is running, remove (\S+): the next build then reads"
    )
    with pytest.raises(CacheError, match=says) as caught:
        gc(str(project.cache))
    shutil.copytree(project.cache, tmp_path / "copy")
    gc(str(tmp_path / "copy"))
    removed = re.search(says, str(caught.value))
    assert removed
    shutil.rmtree(removed[1])
    assert megablend.build(str(project.path)).index.read == 1
    assert project.read() == project.tokens


@pytest.mark.parametrize("is_unchanged", [True, False])
def test_an_index_that_is_gone(tmp_path: Path, is_unchanged: bool) -> None:
    project = Project(tmp_path)
    shutil.rmtree(project.kept)
    if not is_unchanged:
        project.add(1)
    (problem,) = megablend.verify(str(project.cache))
    assert re.search(
        r"run 'default' uses index \w+, which does not exist; `megablend build CONFIG` rebuilds it if", problem
    )
    build, reset = commands_in(problem)
    project.run(build, code=0 if is_unchanged else 1)
    if not is_unchanged:
        project.run(reset)
        project.run(build)
    assert megablend.verify(str(project.cache)) == []
    assert (project.read() == project.tokens) == is_unchanged


def test_a_run_that_is_not_committed(tmp_path: Path) -> None:
    project = Project(tmp_path)
    configure(run="next")(project)
    note = megablend.describe(str(project.path))["note"]
    assert note == "run 'next' is not committed; `megablend build CONFIG` commits it"
    run_named(project, note)
    assert megablend.describe(str(project.path))["note"] is None


@pytest.mark.parametrize("remedy", ["install", "build"])
def test_a_format_of_a_package_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remedy: str) -> None:
    formats = FORMATS | {"tokens": TOKENS}
    monkeypatch.setattr("megablend.formats.registry.FORMATS", formats)
    path = tmp_path / "data" / "a.tokens"
    path.parent.mkdir()
    table = pa.table({"ids": ROWS})
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    config = make_config(tmp_path, [{"name": "a", "path": str(path), "weight": 1}], samples=20)
    expected = read_all(config)
    del formats["tokens"]
    says = (
        "source 'a' has format 'tokens', which this megablend does not support; install the version or the package that"
    )
    with pytest.raises(CacheError, match=says):
        megablend.open(config)
    if remedy == "install":
        formats["tokens"] = TOKENS
    else:
        config["sources"][0]["format"] = "arrow"
        config["run"] = "again"
    assert read_all(config) == expected


def test_a_source_of_two_formats(tmp_path: Path) -> None:
    source_of(tmp_path / "data" / "a.parquet", ROWS)
    write_pair(tmp_path / "data" / "b", [9] * 60)
    paths = [str(tmp_path / "data" / name) for name in ("a.parquet", "b.bin")]
    config = make_config(tmp_path, [{"name": "x", "path": paths}], samples=20)
    with pytest.raises(ConfigError, match=r"mixes formats: .*; list each format as a separate source"):
        megablend.build(config)
    config["sources"] = [{"name": Path(path).stem, "path": path, "weight": 1} for path in paths]
    assert len(read_all(config)) == 20


def test_a_file_that_is_still_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "data" / "a.parquet"
    config = make_config(tmp_path, [source_of(path, ROWS)], samples=20)
    sample = sampled_content_digest

    def sample_while_it_is_written(*arguments: Any) -> Any:
        found = sample(*arguments)
        source_of(path, ROWS[::-1])
        return found

    with monkeypatch.context() as patch:
        patch.setattr(file_tasks, "sampled_content_digest", sample_while_it_is_written)
        says = "a.parquet: changed while it was being indexed; let its writer finish, then build again"
        with pytest.raises(ChangedFileError, match=says):
            megablend.build(config)
    assert len(read_all(config)) == 20


def test_a_document_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is lowered: 2^31 tokens take too long."""
    monkeypatch.setattr(count_ranges, "_LONGEST", 100)
    path = tmp_path / "data" / "a.parquet"
    long = list(range(1, 151))
    config = make_config(tmp_path, [source_of(path, [*ROWS, long])], samples=20, order="document")
    says = "a.parquet: a document has 150 tokens; document tables support up to 100: split it"
    with pytest.raises(UnsupportedFileError, match=says):
        read_all(config)
    source_of(path, [*ROWS, long[:75], long[75:]])
    assert len(read_all(config | {"run": "split"})) == 20


def test_a_token_out_of_range(tmp_path: Path) -> None:
    path, wrong = tmp_path / "data" / "a.parquet", [[token + 90 for token in row] for row in ROWS]
    source = source_of(path, wrong, right=ROWS)
    config = make_config(tmp_path, [source], samples=20, vocab_size=100)
    megablend.build(config)
    says = "tokens of the file are out of range: if this is the column of tokens, rewrite the file; if not, set `column:` to"
    (problem,) = check_data(config).problems
    assert re.search(says, str(problem)), problem
    other = config | {"sources": [source | {"column": "right"}], "run": "column"}
    megablend.build(other)
    assert not check_data(other).problems
    source_of(path, ROWS)
    config["run"] = "rewritten"
    megablend.build(config)
    assert not check_data(config).problems


def test_a_vocabulary_that_is_not_in_a_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    config = make_config(tmp_path, [source_of(tmp_path / "data" / "a.parquet", ROWS)], samples=20)
    says = r"not a tokenizer.json \(KeyError: .*\); give the number of token ids instead"
    megablend.build(config)
    with pytest.raises(ConfigError, match=says):
        check_data(config | {"vocab_size": str(path)})
    assert not check_data(config | {"vocab_size": 50}).problems
    path.write_text(json.dumps({"model": {"vocab": {str(i): i for i in range(50)}}}))
    assert read_vocab_size(str(path)) == 50


EXTRA = {"name": "a", "column": "ids", "extra_columns": ["mask"], "weight": 1}


def test_an_extra_column_with_fewer_rows(tmp_path: Path) -> None:
    """Of a flat column: rows without a value."""
    path = tmp_path / "data" / "a.parquet"
    mask = [None if i % 7 == 0 else i for i in range(200)]
    config = make_config(tmp_path, [source_of(path, ROWS, mask=mask) | EXTRA], samples=20)
    with pytest.raises(ConfigError, match="has 29 rows without a value; every row needs one"):
        read_all(config)
    source_of(path, ROWS, mask=list(range(200)))
    assert len(read_all(config | {"run": "whole"})) == 20
