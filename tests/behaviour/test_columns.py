"""The column that holds a source's tokens: said by build and describe, and kept by indexes and runs that were made before."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import megablend
from megablend.cli.main import cli
from megablend.errors import ConfigError
from megablend.formats.arrow import column as arrow_column
from megablend.formats.parquet.metadata import schema
from megablend.operations.build import build

ROWS = list(range(1, 400))


def write(path: Path, **columns: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    table = pa.table(columns)
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    return path


def config(folder: Path, *paths: Path, **settings: Any) -> dict[str, Any]:
    sources = [{"name": f"s{i}", "path": path, "weight": 1} for i, path in enumerate(paths)]
    return {
        "cache": str(folder / "cache"),
        "sequence_length": 8,
        "samples": 20,
        "sources": sources,
        **settings,
    }


def choose_the_only_one(
    path: str,
    column: str | None,
    problems: Mapping[str, str | None],
    lists: Collection[str],
    *,
    numbers: bool = False,
) -> str:
    """The rule of release 0.1."""
    (fit,) = [name for name, problem in problems.items() if problem is None]
    return fit


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_an_index_and_its_runs_keep_the_column_that_an_older_release_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    write(tmp_path / "data" / f"a.{kind}", text=["x"] * len(ROWS), words=ROWS)
    given = config(tmp_path, tmp_path / "data" / f"*.{kind}")
    with monkeypatch.context() as older:
        older.setattr(schema, "choose_column", choose_the_only_one)
        older.setattr(arrow_column, "choose_column", choose_the_only_one)
        first = build(given)
    tokens = megablend.open(given)[0]["tokens"].tolist()
    assert build(given).index.digest == first.index.digest
    assert megablend.open(given)[0]["tokens"].tolist() == tokens
    assert build(given | {"run": "new"}).index.columns == {"s0": "words"}
    assert megablend.open(given | {"run": "new"})[0]["tokens"].tolist() == tokens
    write(tmp_path / "data" / f"b.{kind}", text=["x"], words=[1])
    with pytest.raises(
        ConfigError, match=r"b\..*: cannot tell which column .* set `column: words` for this source"
    ):
        build(given)
    assert megablend.open(given)[0]["tokens"].tolist() == tokens


def test_build_and_describe_say_which_column_was_taken(tmp_path: Path) -> None:
    lists = pa.array([[i] * 5 for i in ROWS])
    given = config(
        tmp_path,
        write(tmp_path / "a.parquet", input_ids=lists, attention_mask=lists),
        write(tmp_path / "b.arrow", text=["x"] * len(ROWS), words=lists),
        write(tmp_path / "c.arrow", odd_words=lists, words=lists),
    )
    given["sources"][2]["column"] = "odd_words"
    assert build(given).index.columns == {"s0": "input_ids", "s1": "words", "s2": "odd_words"}
    described = megablend.describe(given).to_dict()["index"]["sources"]
    assert [source["column_taken"] for source in described] == ["input_ids", "words", "odd_words"]
    (tmp_path / "run.json").write_text(json.dumps(given, default=str))
    built = CliRunner().invoke(cli, ["build", str(tmp_path / "run.json")])
    assert "tokens are read from column 'input_ids' of s0" in built.output
    assert "tokens are read from column 'words' of s1" in built.output
    assert (
        "odd_words"
        in CliRunner().invoke(cli, ["describe", "--all", str(tmp_path / "run.json")]).output
    )
