"""check --data: tokens that no vocabulary has are found, wherever they are, and named by file and row."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megablend.cli.main import cli
from megablend.config import load_config
from megablend.errors import ConfigError
from megablend.index.blocks.block_store import BlockStore
from megablend.index.build.build import Progress
from megablend.operations.build import build
from megablend.operations.check_data import check_data
from megablend.storage.local import data_error
from tests.cli.commands import runner_with_stderr
from tests.formats.writers import write_megatron

ROWS: list[list[int] | None] = [
    [1, 2, 3],
    [],
    None,
    *([i % 90] * (i % 30) for i in range(3, 200)),
    [5, 6],
]


def write(folder: Path, kind: str, rows: list[list[int] | None]) -> str:
    folder.mkdir(exist_ok=True)
    table = pa.table({"ids": pa.array(rows, pa.list_(pa.int64()))})
    path = folder / f"b.{kind}"
    if kind == "parquet":
        # without statistics, by which `build` would have found the wrong tokens already
        settings = {"write_statistics": False, "use_dictionary": False}
        pq.write_table(table, path, data_page_size=100, write_batch_size=10, **settings)
    elif kind == "arrow":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=9)
    else:
        write_megatron(folder / "b", rows, dtype="int64")
        path = folder / "b.bin"
    return str(path)


def config(folder: Path, *sources: dict[str, Any], **settings: Any) -> dict[str, Any]:
    named = [{"name": f"s{i}", **source} for i, source in enumerate(sources)]
    return {
        "cache": str(folder / "cache"),
        "sequence_length": 8,
        "epochs": 1,
        "sources": named,
        **settings,
    }


@pytest.mark.parametrize("documents", [True, False])
@pytest.mark.parametrize("kind", ["parquet", "arrow", "bin"])
@pytest.mark.parametrize("token", [-5, 100, 1 << 40])
def test_a_wrong_token_is_named_with_file_and_row(
    tmp_path: Path, kind: str, token: int, documents: bool
) -> None:
    rows = [*ROWS[:150], [7, token, token], *ROWS[150:]]
    path = write(tmp_path, kind, rows)
    given = config(
        tmp_path, {"path": path}, vocab_size=100, split="90,10,0" if documents else "1,0,0"
    )
    build(given)
    checked = check_data(given)
    (source,) = checked.sources
    assert (source.smallest, source.largest) == (min(token, 0) if token < 0 else 1, max(token, 89))
    in_group = " (row group 0)" if kind == "parquet" else ""
    assert checked.problems == (
        f"{path}: row 150{in_group}: token {token}, expected 0 to 99 (vocab_size 100); 2 tokens of the file are out of range: "
        "rewrite the file, or set `column:` if this is not the token column",
    )


def test_sources_have_vocabularies_of_their_own(tmp_path: Path) -> None:
    path = write(tmp_path, "parquet", ROWS)
    other = write(tmp_path / "other", "parquet", [[-1], [1 << 32]])
    sources = (
        {"path": path, "vocab_size": 90, "weight": 1},
        {"path": path, "weight": 1},
        {"path": other, "weight": 1},
    )
    given = config(tmp_path, *sources)
    build(given)
    seen: list[Progress] = []
    checked = check_data(given, progress=seen.append)
    assert [(each.files, each.num_files) for each in seen] == [(1, 3), (2, 3), (3, 3)]
    assert 0 < seen[0].bytes < seen[-1].bytes == seen[0].num_bytes
    assert [source.vocab_size for source in checked.sources] == [90, None, None]
    assert [(source.smallest, source.largest) for source in checked.sources] == [
        (1, 89),
        (1, 89),
        (-1, 1 << 32),
    ]
    assert [problem.partition(",")[0] for problem in checked.problems] == [
        f"{other}: row 0 (row group 0): token -1"
    ]
    assert "2 tokens of the file are out of range" in checked.problems[0]


def test_the_command_ends_with_3_where_tokens_are_wrong(tmp_path: Path) -> None:
    given = config(tmp_path, {"path": write(tmp_path, "parquet", ROWS)}, vocab_size=90)
    path = tmp_path / "run.json"
    path.write_text(json.dumps(given))
    build(path)
    done = runner_with_stderr().invoke(cli, ["check", str(path), "--data"])
    assert done.exit_code == 0
    assert "all token ids are in range" in done.output
    assert "megablend: read 1 of 1 files" in done.stderr
    path.write_text(json.dumps(given | {"vocab_size": 89}))
    done = runner_with_stderr().invoke(cli, ["check", str(path), "--data", "--json"])
    assert done.exit_code == 3
    assert (
        "row 89 (row group 0): token 89, expected 0 to 88 (vocab_size 89)"
        in json.loads(done.stdout)["data"]["problems"][0]
    )


def test_a_file_that_cannot_be_read_does_not_end_the_check(tmp_path: Path) -> None:
    path = Path(write(tmp_path, "parquet", ROWS))
    other = write(tmp_path / "other", "arrow", [[1, -1]])
    given = config(tmp_path, {"path": str(path), "weight": 1}, {"path": other, "weight": 1})
    build(given)
    path.unlink()
    first, second = check_data(given).problems
    assert first.startswith(f"{path}: no such file")
    assert second.startswith(f"{other}: row 0: token -1, expected 0 to 4294967295;")


@pytest.mark.parametrize(
    ("vocab_size", "says"),
    [
        (90, "1 files cannot be read"),
        (89, "1 files cannot be read; 1 files have token ids out of range"),
    ],
)
def test_files_that_cannot_be_read_are_not_said_to_be_out_of_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vocab_size: int, says: str
) -> None:
    first, second = (write(tmp_path / name, "parquet", ROWS) for name in "ab")
    given = config(tmp_path, {"path": first, "weight": 1}, {"path": second, "weight": 1})
    path = tmp_path / "run.json"
    path.write_text(json.dumps(given | {"vocab_size": vocab_size}))
    build(given)
    read = BlockStore.read_blocks

    def fail(store: BlockStore, ids: Any) -> Any:
        if store.snapshot.path(int(store.snapshot.file_of(ids[:1])[0])) == first:
            raise data_error(first, OSError(errno.EIO, os.strerror(errno.EIO)))
        return read(store, ids)

    monkeypatch.setattr(BlockStore, "read_blocks", fail)
    done = runner_with_stderr().invoke(cli, ["check", str(path), "--data"])
    assert done.exit_code == 3
    assert (
        f"{first}: cannot be read: Input/output error; the disk or the file server is failing"
        in done.output
    )
    assert done.output.splitlines()[-1] == says
    done = runner_with_stderr().invoke(cli, ["check", str(path), "--data", "--json"])
    assert json.loads(done.stdout)["data"]["unread"] == 1


@pytest.mark.parametrize(
    ("tokenizer", "size"),
    [
        ({"model": {"vocab": {"a": 0, "b": 7}}, "added_tokens": [{"id": 9, "content": "c"}]}, 10),
        ({"model": {"vocab": {"a": 0, "b": 7}}}, 8),
        ({"model": {"vocab": [["a", -1.0], ["b", -2.0]]}, "added_tokens": []}, 2),
    ],
)
def test_a_tokenizer_says_how_many_ids_it_has(
    tmp_path: Path, tokenizer: dict[str, Any], size: int
) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    given = config(
        tmp_path, {"path": write(tmp_path, "parquet", ROWS)}, vocab_size=tmp_path / "tokenizer.json"
    )
    build(given)
    assert check_data(given).sources[0].vocab_size == size


@pytest.mark.parametrize(
    ("settings", "source", "says"),
    [
        ({"vocab_size": 0}, {}, "vocab_size: found 0, expected more than 0"),
        ({"vocab_size": 1.5}, {}, "vocab_size: found 1.5, expected a whole number"),
        ({"vocab_size": 2**33}, {}, "expected at most 4294967296 token ids"),
        (
            {"vocab_size": 50},
            {"append_eod": 50},
            r"sources\[0\]: append_eod 50 is not in a vocabulary of 50; expected 0 to 49",
        ),
        (
            {"vocab_size": 99},
            {"append_eod": 50, "vocab_size": 50},
            "append_eod 50 is not in a vocabulary of 50",
        ),
        ({"vocab_size": 50, "eod_token": 51}, {}, "eod_token: 51 is not in a vocabulary of 50"),
    ],
)
def test_vocabularies_are_checked_with_the_config(
    tmp_path: Path, settings: dict[str, Any], source: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(config(tmp_path, {"path": "x.parquet", **source}, **settings))


def test_a_vocabulary_changes_no_plan(tmp_path: Path) -> None:
    given = config(tmp_path, {"path": write(tmp_path, "parquet", ROWS)})
    first = build(given).ledger
    assert build(given | {"vocab_size": int(np.int64(90))}).ledger == first
