"""Remedies of data files and of commands' options: files are written, and commands are called, as the messages say."""

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from megablend.cli.main import cli
from tests.api.test_remedies import ROWS, Config, config, refused, setting, works
from tests.api.test_repairs import Project
from tests.pairs import write_pair

TOKENS = np.concatenate([np.array(row, np.uint16) for row in ROWS])
Write = Callable[[Path], Any]


class Fault(NamedTuple):
    """A file that is refused, its message, and the ways out: each writes the file, or returns changed settings."""

    name: str
    write: Write
    says: str
    remedies: list[Callable[[Path, str], Config | None]]
    source: Config = {}  # noqa: RUF012


def parquet(path: Path, columns: dict[str, Any], **options: Any) -> None:
    pq.write_table(pa.table(columns), path, **options)


def arrow(path: Path, table: pa.Table) -> None:
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)


def two_columns(path: Path, names: list[str]) -> None:
    arrow(path, pa.Table.from_arrays([pa.array(ROWS), pa.array([1] * len(ROWS))], names=names))


def options_in(message: str) -> Config:
    """`format_options: {dtype: uint16}` of a message."""
    found = re.search(r"`format_options: \{(\w+): (\w+)\}`", message)
    assert found, message
    return {"format_options": {found[1]: found[2]}}


FAULTS: dict[str, Fault] = {
    "dictionary-encoded": Fault(
        "a.arrow",
        lambda path: arrow(path, pa.table({"ids": pa.array(TOKENS).dictionary_encode()})),
        r"is dictionary-encoded; decode it before writing \(Array\.dictionary_decode\(\)\)",
        [lambda path, _: arrow(path, pa.table({"ids": pa.array(TOKENS).dictionary_encode().dictionary_decode()}))],
        {"column": "ids"},
    ),
    "two columns of one name": Fault(
        "a.arrow",
        lambda path: two_columns(path, ["ids", "ids"]),
        "has two columns named ids; rename one",
        [lambda path, _: two_columns(path, ["ids", "counts"])],
        {"column": "ids"},
    ),
    "an unknown column": Fault(
        "a.parquet",
        lambda path: parquet(path, {"ids": ROWS}),
        r"no column 'idz'; did you mean '(\w+)'\?",
        [lambda _, message: {"column": re.search(r"did you mean '(\w+)'", message)[1]}],  # type: ignore[index]
        {"column": "idz"},
    ),
    "Feather of the first version": Fault(
        "a.feather",
        lambda path: write_first_feather(path),
        "is Feather V1, which cannot contain lists; write the tokens to a Parquet file",
        [lambda path, _: beside(path)],
        {"format": "arrow", "column": "ids"},
    ),
    "a stream among files": Fault(
        "a.arrow",
        lambda path: write_stream(path),
        "set `format: arrow-stream` for its source",
        [lambda _, message: {"format": setting(message, "format")}],
        {"format": "arrow"},
    ),
    "numbers without a header": Fault(
        "a.bin",
        lambda path: path.write_bytes(TOKENS.tobytes()),
        r"if the \.bin is a plain file of token ids \(nanoGPT, llm\.c, \.\.\.\), set `format: raw` for its source",
        [lambda path, message: {"format": setting(message, "format"), "format_options": {"dtype": "uint16"}}],
    ),
    "a pair whose .idx is gone": Fault(
        "a.bin",
        lambda path: write_half(path),
        r"restore the \.idx",
        [lambda path, _: write_whole(path)],
    ),
    "an unknown dtype": Fault(
        "a.bin",
        lambda path: path.write_bytes(TOKENS.tobytes()),
        "the dtype of its tokens is unknown",
        [lambda _, message: {"format": "raw", **options_in(message)}],
        {"format": "raw"},
    ),
    "a .npy of floats": Fault(
        "a.npy",
        lambda path: np.save(path, TOKENS.astype(np.float32)),
        "contains .* according to its .npy header; write one of uint16, ",
        [lambda path, _: np.save(path, TOKENS)],
    ),
    "a .npy of two dimensions": Fault(
        "a.npy",
        lambda path: np.save(path, TOKENS[:1000].reshape(10, 100)),
        r"write one dimension \(tokens\.reshape\(-1\)\)",
        [lambda path, _: np.save(path, TOKENS[:1000].reshape(10, 100).reshape(-1))],
    ),
    "options of a format without options": Fault(
        "a.parquet",
        lambda path: parquet(path, {"ids": ROWS}),
        "found option 'dtype', but this format has no options; remove format_options",
        [lambda *_: {"format_options": None}],
        {"format_options": {"dtype": "uint16"}},
    ),
    "two ends of documents": Fault(
        "a.bin",
        lambda path: path.write_bytes(TOKENS.tobytes()),
        "found both eod_token and bos_token; set only one of them",
        [
            lambda *_: {"format_options": {"dtype": "uint16", "eod_token": 1}},
            lambda *_: {"format_options": {"dtype": "uint16", "bos_token": 2}},
        ],
        {"format": "raw", "format_options": {"dtype": "uint16", "eod_token": 1, "bos_token": 2}},
    ),
    "half of a token": Fault(
        "a.bin",
        lambda path: path.write_bytes(TOKENS.tobytes() + b"x"),
        r"has [\d,]+ bytes, expected header_bytes 0 plus a multiple of 2, the size of a uint16: truncated, or the dtype is wrong",
        [lambda path, _: write_tokens(path)],
        {"format": "raw", "format_options": {"dtype": "uint16"}},
    ),
    "half of a header": Fault(
        "a.bin",
        lambda path: path.write_bytes(TOKENS.tobytes()),
        "header_bytes: found 3, expected a multiple of (2), the size of a uint16",
        [lambda *_: {"format_options": {"dtype": "uint16", "header_bytes": 2}}],
        {"format": "raw", "format_options": {"dtype": "uint16", "header_bytes": 3}},
    ),
    "a .npy of a future version": Fault(
        "a.npy",
        lambda path: write_npy_of_version(path, 9),
        "its .npy header has version 9 or is truncated; rewrite it with numpy.save",
        [lambda path, _: np.save(path, TOKENS)],
    ),
    "what begins like a file of llm.c": Fault(
        "a.bin",
        lambda path: path.write_bytes(np.array([20240520, 9, 5], np.int32).tobytes() + TOKENS.tobytes()),
        "begins like an llm.c file .*; if it is not an llm.c file, set header_bytes: 0 and dtype",
        [lambda *_: {"format_options": {"header_bytes": 0, "dtype": "uint16"}}],
        {"format": "raw"},
    ),
    "a column of a raw file": Fault(
        "a.npy",
        lambda path: np.save(path, TOKENS),
        "raw files have no columns; remove (column)",
        [lambda *_: {"column": None}],
        {"column": "ids"},
    ),
    "a slip in an option": Fault(
        "a.bin",
        lambda path: path.write_bytes(TOKENS.tobytes()),
        r"unknown option 'dtyp'; did you mean '(\w+)'\?",
        [lambda *_: {"format_options": {"dtype": "uint16"}}],
        {"format": "raw", "format_options": {"dtyp": "uint16"}},
    ),
    "text": Fault(
        "a.parquet",
        lambda path: parquet(path, {"text": ["x"] * 100}),
        "no column contains integers or lists of integers; megablend reads token ids: tokenize the text first",
        [lambda path, _: parquet(path, {"text": ["x"] * len(ROWS), "input_ids": ROWS})],
    ),
    "an unknown suffix": Fault(
        "a.tokens",
        lambda path: parquet(path, {"ids": ROWS}),
        "unknown kind of file; .* for files with other names, set `format` to one of .*(parquet)",
        [lambda *_: {"format": "parquet"}],
    ),
    "an empty Parquet file": Fault(
        "a.parquet",
        lambda path: path.write_bytes(b""),
        "the file is empty; rewrite or re-download it",
        [lambda path, _: parquet(path, {"ids": ROWS})],
    ),
    "an empty raw file": Fault(
        "a.npy",
        lambda path: path.write_bytes(b""),
        "is empty; restore or remove it",
        [lambda path, _: np.save(path, TOKENS)],
    ),
    "a short Arrow file": Fault(
        "a.arrow",
        lambda path: path.write_bytes(b"ARROW1\0\0"),
        "8 bytes are too short for an Arrow IPC file; restore the file",
        [lambda path, _: arrow(path, pa.table({"ids": ROWS}))],
    ),
    "a truncated Arrow file": Fault(
        "a.arrow",
        lambda path: cut(lambda: arrow(path, pa.table({"ids": ROWS})), path),
        "truncated, or still being written; wait until it is written, or rewrite or re-download the file",
        [lambda path, _: arrow(path, pa.table({"ids": ROWS}))],
    ),
    "a truncated Arrow stream": Fault(
        "a.arrow",
        lambda path: cut(lambda: write_stream(path), path),
        "truncated, or still being written; wait until it is written, or rewrite or re-download the file",
        [lambda path, _: write_stream(path)],
    ),
    "a truncated .idx": Fault(
        "a.bin",
        lambda path: cut(lambda: write_whole(path), path.with_suffix(".idx")),
        "truncated, or still being written; wait until it is written, or rewrite or re-download the file",
        [lambda path, _: write_whole(path)],
    ),
    "no Arrow stream": Fault(
        "a.arrows",
        lambda path: path.write_bytes(b"PAR1PAR1PAR1"),
        "no message of an Arrow stream begins here: found b'PAR1'; rewrite or re-download the file",
        [lambda path, _: write_stream(path)],
    ),
    "a short .idx": Fault(
        "a.bin",
        lambda path: write_short_idx(path),
        "10 bytes are too short for the 34-byte header; restore the file",
        [lambda path, _: write_whole(path)],
    ),
    "an extra column of another length": Fault(
        "a.parquet",
        lambda path: parquet(path, {"ids": ROWS, "mask": [row[1:] for row in ROWS]}),
        "each list must have as many values as its row has tokens, nulls not counted",
        [lambda path, _: parquet(path, {"ids": ROWS, "mask": [[1] * len(row) for row in ROWS]})],
        {"column": "ids", "extra_columns": ["mask"]},
    ),
}


def beside(path: Path) -> Config:
    """Write the tokens to a Parquet file, and read that."""
    other = path.with_suffix(".parquet")
    parquet(other, {"ids": ROWS})
    return {"path": str(other), "format": None}


def write_tokens(path: Path) -> None:
    path.write_bytes(TOKENS.tobytes())


def write_npy_of_version(path: Path, version: int) -> None:
    np.save(path, TOKENS)
    data = bytearray(path.read_bytes())
    data[6] = version
    path.write_bytes(data)


def write_whole(path: Path) -> None:
    write_pair(path.with_suffix(""), [9] * 60)


def write_half(path: Path) -> None:
    write_whole(path)
    path.with_suffix(".idx").unlink()


def cut(write: Callable[[], Any], path: Path) -> None:
    """Write a file without its last 20 bytes."""
    write()
    path.write_bytes(path.read_bytes()[:-20])


def write_short_idx(path: Path) -> None:
    write_whole(path)
    path.with_suffix(".idx").write_bytes(b"MMIDIDX\0\0\0")


def write_first_feather(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        feather.write_feather(pa.table({"ids": TOKENS}), path, version=1)


def write_stream(path: Path) -> None:
    table = pa.table({"ids": ROWS})
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)


@pytest.mark.parametrize("name", FAULTS)
def test_a_file(tmp_path: Path, name: str) -> None:
    fault = FAULTS[name]
    for number, remedy in enumerate(fault.remedies):
        path = tmp_path / str(number) / fault.name
        path.parent.mkdir()
        fault.write(path)
        source = {"path": str(path), **fault.source}
        message = refused(config(path.parent, source))
        assert re.search(fault.says, message), message
        changed = source | (remedy(path, message) or {})
        works(config(path.parent, {key: value for key, value in changed.items() if value is not None}))


COMMANDS = [
    # (a command, what it says, commands that do as it says)
    (
        "show CONFIG",
        "give one of --sample and --step",
        ["show CONFIG --sample 0", "show CONFIG --step 0 --micro-batch 2"],
    ),
    ("show CONFIG --step 0", "--step needs --micro-batch", ["show CONFIG --step 0 --micro-batch 2"]),
    (
        "show CONFIG --sample 0 --rank 1",
        "--rank needs --step",
        ["show CONFIG --step 0 --micro-batch 2 --data-parallel 2 --rank 1"],
    ),
    ("show CONFIG --sample 150", "expected 0 to 149", ["show CONFIG --sample 149"]),
    ("show CONFIG --step 75 --micro-batch 2", "expected 0 to 74", ["show CONFIG --step 74 --micro-batch 2"]),
    (
        "show CONFIG --step 0 --micro-batch 2 --global-batch 3",
        "expected a multiple of micro batch 2 x 1 ranks = 2",
        ["show CONFIG --step 0 --micro-batch 2 --global-batch 4"],
    ),
    ("describe CONFIG --ranks 4", "needs --micro-batch", ["describe CONFIG --ranks 4 --micro-batch 2"]),
    (
        "describe CONFIG --sort share --match x",
        "patterns such as 'web-\\*' may contain",
        ["describe CONFIG --match a*"],
    ),
    ("describe CONFIG --sort shares", "did you mean 'share'", ["describe CONFIG --sort share"]),
    ("describe CACHE --top 2", "is a cache; give a config", ["describe CONFIG --top 2"]),
    ("skip CONFIG --to 4", "--to needs --from", ["skip CONFIG --from 0 --to 4 --batch 2"]),
    ("skip CONFIG --from 0", "--from needs --to and --batch", ["skip CONFIG --from 0 --to 4 --batch 2"]),
    ("runs reset CACHE", "`megablend runs list` lists its runs", ["runs list CACHE", "runs reset CACHE default"]),
    ("runs remove CACHE x", r"found no run 'x' \(there are 'default'\)", ["runs remove CACHE default"]),
    (
        "find CONFIG 1.parquet:1",
        "`megablend describe` lists the sources",
        ["describe CONFIG", "find CONFIG 0.parquet"],
    ),
    ("find CONFIG 0.parquet:1", "leave out the row to find the whole file", ["find CONFIG 0.parquet"]),
]


@pytest.mark.parametrize(("command", "says", "instead"), COMMANDS, ids=[command for command, *_ in COMMANDS])
def test_a_command(tmp_path: Path, command: str, says: str, instead: list[str]) -> None:
    project = Project(tmp_path)

    def call(line: str) -> Any:
        words = {"CONFIG": str(project.path), "CACHE": str(project.cache)}
        return CliRunner().invoke(cli, [words.get(word, word) for word in line.split()])

    done = call(command)
    assert done.exit_code != 0
    assert re.search(says, f"{done.exception} {done.output}"), f"{done.exception} {done.output}"
    for line in instead:
        done = call(line)
        assert done.exit_code == 0, (line, done.output, done.exception)


def test_a_tokenizer_that_is_none(tmp_path: Path) -> None:
    project = Project(tmp_path)
    words = ["show", str(project.path), "--sample", "0", "--tokenizer"]
    (tmp_path / "no.json").write_text("{}")
    done = CliRunner().invoke(cli, [*words, str(tmp_path / "no.json")])
    assert "no.json: cannot load a tokenizer.json from it" in str(done.exception)
    model = {"type": "WordLevel", "vocab": {str(i): i for i in range(50)}, "unk_token": "0"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    done = CliRunner().invoke(cli, [*words, str(tmp_path / "tokenizer.json")])
    assert done.exit_code == 0, done.exception
