"""What messages say to do is done here, word for word; and then it works."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import megablend
from megablend.api.build import build
from megablend.cli.main import cli
from megablend.errors import MegablendError
from tests.formats.writers import write_megatron

Config = dict[str, Any]
ROWS = [list(range(1, 1 + i % 40)) for i in range(200)]


def write(path: Path, kind: Any = None, *, name: str = "ids", rows: list[list[int]] | None = None, **more: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({name: pa.array(rows or ROWS, kind or pa.list_(pa.int32())), **more})
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    return path


def config(folder: Path, *sources: Config, **settings: Any) -> Config:
    named = [{"name": f"s{i}", **source} for i, source in enumerate(sources)]
    return {"cache": str(folder / "cache"), "sequence_length": 8, "samples": 20, "sources": named, **settings}


def _begin(given: Config) -> Any:
    build(given)
    return megablend.open(given)[0]


def refused(given: Config) -> str:
    with pytest.raises(MegablendError) as caught:
        _begin(given)
    return str(caught.value)


def works(given: Config) -> None:
    build(given)
    assert len(megablend.open(given)[0]["tokens"]) == 8


def setting(message: str, key: str) -> Any:
    """The value that a message says to set a key to, as JSON or text."""
    value = re.search(rf"`{key}: ([^`]+)`", message)
    assert value, message
    try:
        return json.loads(value[1])
    except ValueError:
        return value[1]


# Folders and patterns: the message names a pattern.


def mds(folder: Path) -> None:
    (folder / "shard.00000.mds").write_bytes(b"x")
    (folder / "index.json").write_text("{}")


def touch(path: Path) -> Path:
    path.write_bytes(b"")
    return path


FOLDERS: dict[str, Callable[[Path], Any]] = {
    "files": lambda folder: write(folder / "a.parquet"),
    "with _SUCCESS": lambda folder: (touch(folder / "_SUCCESS"), write(folder / "a.parquet")),
    "of folders": lambda folder: (touch(folder / "_SUCCESS"), write(folder / "deep" / "er" / "a.arrow")),
    "pairs": lambda folder: write_megatron(folder / "x", ROWS),
    "beside other files": lambda folder: (touch(folder / "dataset_info.json"), write(folder / "a.parquet")),
    "with brackets": lambda folder: write(folder / "a.parquet"),
}


@pytest.mark.parametrize("pattern", ["{folder}", "{folder}/", "{folder}/*"])
@pytest.mark.parametrize("case", FOLDERS)
def test_a_folder(tmp_path: Path, case: str, pattern: str) -> None:
    folder = tmp_path / ("odd [x]" if case == "with brackets" else "data")
    folder.mkdir()
    FOLDERS[case](folder)
    if pattern.endswith("*") and case in ("files", "pairs", "with brackets", "of folders"):
        return  # found without advice, or a folder of nothing but _SUCCESS
    message = refused(config(tmp_path, {"path": pattern.format(folder=folder)}))
    advised = re.search("specify its files as `([^`]+)`", message)
    assert advised, message
    works(config(tmp_path, {"path": advised[1]}))


def test_a_folder_of_shards_that_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    mds(tmp_path / "data")
    message = refused(config(tmp_path, {"path": tmp_path / "data"}))
    assert "contains MosaicML MDS shards, which megablend does not read: write the tokens to Parquet" in message
    (tmp_path / "empty").mkdir()
    assert "it contains no files that megablend reads (.parquet," in refused(
        config(tmp_path, {"path": tmp_path / "empty"})
    )


def test_a_url_of_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet")
    for url in (f"file://{path}", f"file://localhost{path}"):
        message = refused(config(tmp_path, {"path": url}))
        advised = re.search("write it as a plain path: `([^`]+)`", message)
        assert advised, message
        works(config(tmp_path, {"path": advised[1]}))


def test_a_url_of_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "spark" / "part-0.parquet")
    monkeypatch.chdir(tmp_path)
    message = refused(config(tmp_path, {"path": "file://spark/part-0.parquet"}))
    assert message.endswith("write it as a plain path: `spark/part-0.parquet`")
    works(config(tmp_path, {"path": "spark/part-0.parquet"}))


def test_a_pair_without_its_bin(tmp_path: Path) -> None:
    write_megatron(tmp_path / "meg1", ROWS)
    (tmp_path / "meg1.bin").rename(tmp_path / "aside")
    for path in ("meg1", "meg1.bin", "meg1.idx", "meg1.*"):
        message = refused(config(tmp_path, {"path": tmp_path / path}))
        assert f"{tmp_path}/meg1.bin" in message
        assert "restore the .bin beside the .idx" in message
        assert "did you mean" not in message
    (tmp_path / "aside").rename(tmp_path / "meg1.bin")
    works(config(tmp_path, {"path": tmp_path / "meg1"}))


def test_a_pair_without_its_idx(tmp_path: Path) -> None:
    write_megatron(tmp_path / "meg1", ROWS)
    (tmp_path / "meg1.idx").rename(tmp_path / "aside")
    given = config(tmp_path, {"path": tmp_path / "meg1"})
    message = refused(given)
    assert f"{tmp_path}/meg1 stands for two files, and {tmp_path}/meg1.idx does not exist: restore the .idx" in message
    source = {"path": setting(message, "path"), "format": setting(message, "format")}
    works(config(tmp_path, source | {"format_options": {"dtype": "uint16"}}, run="raw"))
    (tmp_path / "aside").rename(tmp_path / "meg1.idx")
    works(given)


def test_only_files_that_may_be_data_are_suggested(tmp_path: Path) -> None:
    for name in ("book.yaml", "book.json", "book.yml"):
        touch(tmp_path / name)
    for given in ({}, {"format": "arrow"}):
        assert refused(config(tmp_path, {"path": tmp_path / "book.arow", **given})).endswith(
            "book.arow matches no file"
        )
    write(tmp_path / "boook.arrow")
    for given in ({}, {"format": "arrow"}):
        message = refused(config(tmp_path, {"path": tmp_path / "book.arow", **given}))
        assert message.endswith(f"did you mean '{tmp_path}/boook.arrow'?")


def test_a_slip_in_a_name(tmp_path: Path) -> None:
    write(tmp_path / "books.parquet")
    message = refused(config(tmp_path, {"path": tmp_path / "boks.parquet"}))
    advised = re.search(r"did you mean '(.*)'\?", message)
    assert advised, message
    works(config(tmp_path, {"path": advised[1]}))


def test_what_cannot_be_read_is_skipped(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet")
    (tmp_path / "b.parquet").symlink_to("gone")
    given = config(tmp_path, {"path": tmp_path / "*.parquet"})
    message = refused(given)
    skipping = given | {"on_unreadable": setting(message, "on_unreadable")}
    works(skipping)
    assert build(skipping).index.skipped == (f"source 's0': {tmp_path}/b.parquet: a symbolic link to nothing: gone",)
    assert megablend.describe(skipping)["index"]["sources"][0]["skipped"] == [
        f"{tmp_path}/b.parquet: a symbolic link to nothing: gone"
    ]
    assert "remove dangling links" in message
    (tmp_path / "b.parquet").unlink()
    works(given)


# Columns and types: the message names a column, a type or a program.


def test_an_arrow_stream(tmp_path: Path) -> None:
    path, table = tmp_path / "it's.arrow", pa.table({"ids": ROWS})
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=50)
    works(config(tmp_path, {"path": path}))
    message = refused(config(tmp_path, {"path": path, "format": "arrow"}))
    remedy = re.search("set `format: ([a-z-]+)` for its source", message)
    assert remedy, message
    works(config(tmp_path, {"path": path, "format": remedy[1]}))


def test_an_arrow_file_is_no_stream(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow")
    message = refused(config(tmp_path, {"path": path, "format": "arrow-stream"}))
    assert "is an Arrow file, not an Arrow stream" in message
    works(config(tmp_path, {"path": path, "format": setting(message, "format")}))


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("kind", [pa.uint64(), pa.list_(pa.int32()), pa.list_(pa.uint64())])
def test_lists_that_are_no_tokens_beside_text(tmp_path: Path, kind: pa.DataType, suffix: str) -> None:
    text = pa.array(["x"] * len(ROWS))
    rows: Any = [[row] for row in ROWS] if pa.types.is_list(kind) else ROWS
    path = write(tmp_path / f"a.{suffix}", pa.list_(kind), name="u64", rows=rows, text=text)
    for more in ({}, {"count": pa.array([1] * len(ROWS))}):
        write(path, pa.list_(kind), name="u64", rows=rows, text=text, **more)
        message = refused(config(tmp_path, {"path": path}))
        assert "tokenize the text" not in message
        assert re.search("column 'u64' (has type list<.*>|is a list of lists)", message), message
        assert ("write one list per row" in message) == pa.types.is_list(kind)
        assert ("write it as int64 or uint32" in message) == ("uint64" in str(kind))
        write(path, pa.list_(pa.uint32() if "uint64" in str(kind) else pa.int32()), name="u64", text=text, **more)
        works(config(tmp_path, {"path": path}, run=f"with-{len(more)}"))


def test_lists_of_lists_of_text_are_no_tokens(tmp_path: Path) -> None:
    for suffix in ("parquet", "arrow"):
        path = write(tmp_path / f"a.{suffix}", pa.list_(pa.list_(pa.string())), name="words", rows=[[["x"]]])  # type: ignore[list-item]
        assert refused(config(tmp_path, {"path": path})).endswith("tokenize the text first")


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_unsigned_64_bit_integers(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"a.{suffix}", pa.list_(pa.uint64()))
    given = config(tmp_path, {"path": path, "column": "ids"})
    message = refused(given)
    advised = re.search("uint64>?; write it as (int64) or (uint32)", message)
    assert advised, message
    for kind in advised.groups():
        write(path, pa.list_(getattr(pa, kind)()))
        works(given | {"run": kind})


def test_a_column_that_has_to_be_named(tmp_path: Path) -> None:
    texts = {"text": pa.array(["x"] * len(ROWS)), "token_count": pa.array([1] * len(ROWS))}
    path = write(tmp_path / "a.parquet", pa.list_(pa.int32()), others=pa.array(ROWS), **texts)
    given = config(tmp_path, {"path": path})
    message = refused(given)
    assert "single integers, which may be counts or ids: token_count" in message
    works(config(tmp_path, {"path": path, "column": setting(message, "column")}))


def test_files_with_different_columns(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", name="input_ids")
    write(tmp_path / "b.arrow", name="tokens").rename(tmp_path / "b.unused")
    other = write(tmp_path / "b.parquet", name="tokens", input_ids=pa.array(ROWS, pa.list_(pa.int32())))
    works(config(tmp_path, {"path": tmp_path / "*.parquet"}))  # both have input_ids
    write(other, name="tokens")
    given = config(tmp_path, {"path": tmp_path / "*.parquet"}, run="next")
    message = refused(given)
    assert f"are in column 'input_ids' of {tmp_path}/a.parquet, but in 'tokens' of {other}: list them as sep" in message
    paths = ({"path": tmp_path / name, "weight": 1} for name in ("a.parquet", "b.parquet"))
    works(config(tmp_path, *paths, run="next"))
    assert message.endswith("or set `column:` to a column that each of them has")
    write(tmp_path / "a.parquet", name="input_ids", both=pa.array(ROWS))
    write(other, name="tokens", both=pa.array(ROWS))
    assert refused(given | {"run": "both"}) == message
    works(config(tmp_path, {"path": tmp_path / "*.parquet", "column": "both"}, run="both"))


# Lengths and shares: the number that is said fits all sources at once.


def length_in(kind: str) -> Config:
    lengths: dict[str, Config] = {"samples": {}, "tokens": {"tokens": 160}, "epochs": {"epochs": 0.05}}
    return lengths[kind]


@pytest.mark.parametrize("unit", ["samples", "tokens", "epochs"])
def test_more_samples_for_all_sources_at_once(tmp_path: Path, unit: str) -> None:
    path = write(tmp_path / "a.parquet")
    weights = [1, 0.01, 0.003, 0.0007]
    given = config(tmp_path, *({"path": path, "weight": weight} for weight in weights), **length_in(unit))
    if unit != "samples":
        del given["samples"]
    message = refused(given)
    assert "All sources get at least one from" in message
    works(given | {unit: setting(message, unit)})  # a number at once, not one after the other


@pytest.mark.parametrize("unit", ["samples", "tokens", "epochs"])
def test_fewer_samples_for_all_caps_at_once(tmp_path: Path, unit: str) -> None:
    path = write(tmp_path / "a.parquet")
    caps = [10, 2, 1.5, 1]
    sources = [{"path": path, "weight": 1, "max_epochs": cap} for cap in caps]
    given = config(tmp_path, *sources) | {"samples": 1_000_000}
    if unit != "samples":
        del given["samples"]
        given[unit] = {"tokens": 8_000_000, "epochs": 300}[unit]
    message = refused(given)
    key = "tokens" if unit == "tokens" else "samples"
    mended = {name: value for name, value in given.items() if name not in ("samples", "tokens", "epochs")}
    works(mended | {key: setting(message, key)})
    first = json.loads(json.dumps(mended | {"samples": 4000, "run": "caps"}, default=str))
    for source in first["sources"]:  # each cap by itself, as its own message says
        if "epochs" not in source:
            try:
                build(first)
            except MegablendError as error:
                name = re.search("source '(s.)'", str(error))
                assert name
                next(each for each in first["sources"] if each["name"] == name[1])["max_epochs"] = setting(
                    str(error), "max_epochs"
                )
    works(first)


def test_where_no_length_fits_that_is_said(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet")
    sources = {"path": path, "weight": 1, "max_epochs": 1}, {"path": path, "weight": 0.00001}
    message = refused(config(tmp_path, *sources))
    assert "No length fits: all sources get at least one from 100,001 samples on, but the caps allow" in message
    tiny = {"path": path, "weight": "1e-18"}
    message = refused(config(tmp_path, {"path": path, "weight": 1}, tiny))
    assert "but a plan can have at most" in message
    assert "set `" not in message
    works(config(tmp_path, sources[0], sources[1] | {"weight": 0.1}))
    works(config(tmp_path, sources[0], sources[1] | {"weight": 0}, run="other"))


@pytest.mark.parametrize(
    ("settings", "source", "key"),
    [({"tokens": 3}, {}, "tokens"), ({"epochs": "0.000001"}, {}, "epochs")],
)
def test_a_run_of_no_sample(tmp_path: Path, settings: Config, source: Config, key: str) -> None:
    given = config(tmp_path, {"path": write(tmp_path / "a.parquet"), **source}, **settings)
    del given["samples"]
    works(given | {key: setting(refused(given), key)})


@pytest.mark.parametrize("share", [{"tokens": 3}, {"epochs": "0.0001"}])
def test_a_source_of_no_sample(tmp_path: Path, share: Config) -> None:
    path, (unit,) = write(tmp_path / "a.parquet"), share
    given = config(tmp_path, {"path": path, unit: 1000 if unit == "tokens" else 1}, {"path": path, **share})
    del given["samples"]
    message = refused(given)
    for value in (setting(message, unit), 0):
        assert f"`{unit}: {value}`" in message
        given["sources"][1][unit] = value
        works(given | {"run": f"run{value}"})


def test_a_source_without_tokens(tmp_path: Path) -> None:
    empty = write(tmp_path / "empty.parquet", rows=[[], []])
    path = write(tmp_path / "a.parquet")
    message = refused(config(tmp_path, {"path": empty}))
    assert "add files with tokens to it" in message
    assert "leave it out" not in message, "the only source cannot be left out"
    works(config(tmp_path, {"path": [empty, path]}))
    both = config(tmp_path, {"path": path, "weight": 1}, {"path": empty, "weight": 1}, run="both")
    both["sources"][1]["weight"] = setting(refused(both), "weight")
    works(both)


# Settings: the message names a value.


def test_masks_without_an_end_of_document(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet")
    given = config(tmp_path, {"path": path}, reset_position_ids=True)
    message = refused(given)
    assert (
        "eod_token: missing; reset_position_ids needs to know the end-of-document token: set `eod_token` to" in message
    )
    works(given | {"eod_token": 1})
    sources = ({"path": path, "weight": 1, "append_eod": token} for token in (1, 2))
    given = config(tmp_path, *sources, eod_mask_loss=True, reset_attention_mask=True, run="other")
    message = refused(given)
    assert "reset_attention_mask and eod_mask_loss need to know" in message
    assert "the sources append different ones (1, 2): set `eod_token`" in message
    works(given | {"eod_token": 2})


SAID = [
    # (settings, what is said, a value that it allows)
    ({"samples": -5}, "samples: found -5, expected more than 0", 1),
    ({"sequence_length": -5}, "sequence_length: found -5, expected more than 0", 8),
    ({"lanes": 0}, "lanes: found 0, expected 1 or more", 1),
    ({"lanes": 2.5}, "lanes: found 2.5, expected a whole number", 2),
    ({"seed": -1}, "seed: found -1, expected 0 or more", 0),
    ({"direct_io": "maybe"}, "direct_io: found 'maybe', expected true or false", False),
    (
        {"run": "a b"},
        "run: found 'a b', expected at most 100 letters, digits, `.`, `_` and `-`, the first a letter",
        "a-b",
    ),
    ({"on_unreadable": "skp"}, "found 'skp', expected 'error' or 'skip'; did you mean 'skip'?", "skip"),
]


@pytest.mark.parametrize(("settings", "says", "value"), SAID, ids=[says for _, says, _ in SAID])
def test_settings(tmp_path: Path, settings: Config, says: str, value: Any) -> None:
    given = config(tmp_path, {"path": write(tmp_path / "a.parquet")})
    assert says in refused(given | settings)
    works(given | dict.fromkeys(settings, value))


@pytest.mark.parametrize("source", ["a.parquet", 5, None, {"name": "a b", "path": "x"}, {"name": 5, "path": "x"}])
def test_sources_are_told_of_in_plain_words(tmp_path: Path, source: Any) -> None:
    message = refused(config(tmp_path) | {"sources": [source]})
    assert "expected" in message
    assert not re.search(r"instance of|\^|\[\^|valid (dictionary|string|integer)|pattern|Input", message), message


# Runs that keep an index.


@pytest.mark.parametrize("kind", ["parquet", "arrow", "bin"])
def test_a_changed_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "data" / f"a.{kind}"

    def make(rows: list[list[int]]) -> None:
        path.parent.mkdir(exist_ok=True)
        write_megatron(path, rows) if kind == "bin" else write(path, rows=rows)

    make(ROWS)
    given = config(tmp_path, {"path": path})
    works(given)
    shutil.copytree(path.parent, tmp_path / "kept")
    make([[7] * 50] * 30)
    message = refused(given)  # build, and read: the run keeps its index, so that building does not help
    assert (
        "restore the original file; or give the run another name (`run:`) and run `megablend build CONFIG`" in message
    )
    works(given | {"run": "other"})
    for file in (tmp_path / "kept").iterdir():
        file.replace(path.parent / file.name)
    works(given)


def test_a_run_that_is_planned_again(tmp_path: Path) -> None:
    given, path = config(tmp_path, {"path": str(write(tmp_path / "a.parquet"))}), tmp_path / "run.json"
    works(given)
    for change in ({"samples": 10}, {"seed": 2}):
        message = refused(given | change)
        assert "give the new one another name (`run:`)" in message
        works(given | change | {"run": f"other-{len(change)}-{next(iter(change))}"})
        works(given)  # "restore the config"
        path.write_text(json.dumps(given | change))
        advised = re.search("let the next build plan it again \\(`megablend ([^`]+)`\\)", message)
        assert advised, message
        done = CliRunner().invoke(cli, [str(path) if word == "CONFIG" else word for word in advised[1].split()])
        assert done.exit_code == 0, done.output
        given |= change
        works(given)
    done = CliRunner().invoke(cli, ["runs", "reset", given["cache"]])
    assert "found a cache without the name of a run, expected both; `megablend runs list` lists" in str(done.exception)


def test_an_index_that_is_gone(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet")
    given = config(tmp_path, {"path": path})
    works(given)
    shutil.rmtree(tmp_path / "cache" / "generations")
    with pytest.raises(MegablendError, match="`megablend build CONFIG` rebuilds it if the data is unchanged"):
        megablend.open(given)
    works(given)
    shutil.rmtree(tmp_path / "cache" / "generations")
    write(path, rows=[[7] * 50] * 30)
    message = refused(given)
    assert "this index does not exist\nrun 'default' keeps the index" in message
    assert (
        "restore them as they were, or that index from a backup, and build again; or give the run another name"
        in message
    )
    works(given | {"run": "other"})
    write(path)
    works(given)
