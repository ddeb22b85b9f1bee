"""From samples to lines of text, and from lines to samples."""

from __future__ import annotations

import json
import os
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megablend.errors import ConfigError
from megablend.inspect.find import find
from megablend.inspect.show import show
from megablend.inspect.text_places import TextPlaces
from megablend.operations.build import build
from megablend.operations.session import Session
from megablend.storage.base import Storage
from megablend.storage.object_options import ObjectOptions
from megablend.storage.objects.prefix import ObjectPrefix
from megablend.text import source
from megablend.text.places import find_document, locate_rows, reader_of_footers
from megablend.text.token_file import read_footer
from megablend.text.token_names import group_by_folder
from tests.cli.commands import run
from tests.text.conftest import SMALL
from tests.text.test_build import make_config
from tests.text.test_lines import write
from tests.text.tokenizers_of_kinds import corpus

pytestmark = pytest.mark.usefixtures("small_parts")


def write_kind(
    folder: Path, kind: str, num: int = 150, length: int = 700
) -> dict[int, tuple[int, str]]:
    """A file of text with blank lines, empty texts and bad ones: the byte (or row) and the text of each line (or row)."""
    folder.mkdir(parents=True)
    texts: list[str | None] = [text[:length] for text in islice(cycle(corpus()), num)]
    texts[3] = ""
    texts[70] = None
    places = dict[int, tuple[int, str]]()
    if kind in ("parquet", "arrow"):
        table = pa.table({"id": [f"k{i}" for i in range(num)], "text": texts})
        if kind == "parquet":
            pq.write_table(table, folder / "a.parquet", row_group_size=20)
        else:
            with pa.ipc.new_file(str(folder / "a.arrow"), table.schema) as writer:
                writer.write_table(table, max_chunksize=20)
        return {i: (i, text) for i, text in enumerate(texts) if text is not None}
    data = b""
    line = 1
    for i, text in enumerate(texts):
        if i % 11 == 5:
            data += b"\n"
            line += 1
        if text is not None:
            places[line] = len(data), text
        data += json.dumps({"id": f"k{i}", "text": text}).encode() + b"\n"
        line += 1
    write(folder / f"a.{kind}", data)
    return places


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "arrow"])
@pytest.mark.parametrize("eos", [False, True])
def test_show_and_find_agree_with_the_text(tmp_path: Path, kind: str, eos: bool) -> None:
    from tokenizers import Tokenizer

    places = write_kind(tmp_path / "data", kind)
    config = make_config(
        tmp_path, eos=eos, on_bad_document="skip", max_bad=0.5, samples=None, epochs=1
    )
    config = {key: each for key, each in config.items() if each is not None}
    num_samples = build(config).ledger.ends[-1]
    model = Tokenizer.from_file(f"{config['tokenizer']}/tokenizer.json")
    text_file = str(tmp_path / f"data/a.{kind}")
    shown = dict[int, set[int]]()
    for k in range(num_samples):
        sample = show(config, k)
        whole = model.decode(list(sample.tokens), skip_special_tokens=True)
        for piece in sample.pieces:
            for place in piece.texts:
                assert place.text == text_file
                assert places[place.line][0] == place.offset
                assert place.key is not None
                shown.setdefault(place.line, set()).add(k)
        starts = [*sample.document_starts[1:], len(sample.tokens)]
        listed = [place for piece in sample.pieces for place in piece.texts]
        first = model.decode(list(sample.tokens[: starts[0]]), skip_special_tokens=True)
        assert first.strip("\ufffd") in places[listed[0].line][1]
        assert whole
    with_tokens = {line for line, (_, text) in places.items() if text}
    assert shown.keys() <= with_tokens
    assert len(shown) > 0.8 * len(with_tokens)
    for line in sorted(with_tokens)[::9]:
        offset, _ = places[line]
        by_line = find(config, text_file, line=line)
        (found,) = by_line.found
        expected = {each.sample for each in found.samples}
        assert shown.get(line, set()) == expected
        assert find(config, f"a.{kind}", byte=offset).found == by_line.found
    unit = "row" if kind in ("parquet", "arrow") else "line"
    with pytest.raises(ConfigError, match=f"there is no document at {unit} 100000"):
        find(config, text_file, line=100_000)
    with pytest.raises(ConfigError, match="0 text files in the index match this name"):
        find(config, "b.jsonl", line=1)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_byte_of_a_line_without_a_document_is_in_none(tmp_path: Path, suffix: str) -> None:
    rows = [b'{"text": "one"}', b"", b"{bad", b'{"text": "two"}', b"  ", b'{"text": null}']
    (tmp_path / "data").mkdir()
    write(tmp_path / f"data/a.jsonl{suffix}", b"\n".join([*rows, b""]))
    config = make_config(tmp_path, on_bad_document="skip", max_bad=0.9, sequence_length=1)
    build(config)
    at = 0
    for row in rows:
        for byte in {at, at + len(row)}:  # the line's end is its last byte
            if row in (rows[0], rows[3]):
                assert find(config, "a.jsonl" + suffix, byte=byte).found
            else:
                with pytest.raises(ConfigError, match=f"there is no document at byte {byte}"):
                    find(config, "a.jsonl" + suffix, byte=byte)
        at += len(row) + 1


def test_by_key_and_by_the_command(tmp_path: Path) -> None:
    places = write_kind(tmp_path / "data", "jsonl")
    config = make_config(tmp_path, on_bad_document="skip", max_bad=0.5)
    build(config)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    said = run("show", path, "--sample", 5)
    assert said.returncode == 0, said.stderr
    assert f"text: {tmp_path}/data/a.jsonl, line " in said.stdout
    assert ", key k" in said.stdout
    line = sorted(places)[20]
    by_key: Any = find(config, "a.jsonl", key="k20")
    assert by_key.found == find(config, "a.jsonl", line=line).found
    assert run("find", path, "a.jsonl", "--key", "k20").returncode == 0
    for place in ("a.jsonl", f"{tmp_path}/data/a.jsonl:{line}"):
        without = run("find", path, place)
        assert "which can only be searched by document; give --line" in without.stderr
    for two in ({"line": line, "byte": 0}, {"row": 0, "key": "k20"}):
        with pytest.raises(
            ConfigError, match="found 2 of row, line, byte and key, expected at most one"
        ):
            find(config, "a.jsonl", **two)
    missing = run("find", path, "a.jsonl", "--key", "none")
    assert missing.returncode == 2
    assert "there is no document at key 'none'" in missing.stderr
    assert "give only one of" in run("find", path, "a.jsonl", "--key", "x", "--line", 3).stderr
    blank = run("find", path, "a.jsonl", "--line", 6)
    assert "there is no document at line 6: the line is blank" in blank.stderr


def test_a_key_that_several_documents_have(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    rows = [json.dumps({"id": i % 299, "text": "many words " * 30}) + "\n" for i in range(300)]
    (tmp_path / "data/a.jsonl").write_text("".join(rows))  # in several parts
    config = make_config(tmp_path)
    build(config)
    last = len("".join(rows[:-1]))
    expected = rf"2 documents have the key '0' \(the first at byte 0, {last}\)"
    with pytest.raises(ConfigError, match=expected):
        find(config, "a.jsonl", key="0")
    assert find(config, "a.jsonl", byte=last).found == find(config, "a.jsonl", line=300).found


DOCUMENTS = int(os.environ.get("MEGABLEND_TEST_TEXT_DOCUMENTS", "10000"))
"""Documents of the long test."""
KINDS = ("jsonl", "jsonl.gz", "jsonl.zst", "parquet", "arrow")


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_every_document_of_some(tmp_path: Path, kind: str) -> None:
    check_documents(tmp_path, kind, 300, "", 1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["folder", "bucket"])
def test_every_document_of_many(
    tmp_path: Path,
    kind: str,
    where: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source, "PART_BYTES", 20 * SMALL)
    if where == "folder":
        check_documents(tmp_path, kind, DOCUMENTS, "", 1)
    else:
        request.getfixturevalue("obstore")
        remote = request.getfixturevalue("remote_moto")
        check_documents(tmp_path, kind, DOCUMENTS, remote, 10)


def check_documents(tmp_path: Path, kind: str, num: int, remote: str, step: int) -> None:
    """All documents are shown, with their places, keys and texts; each, or one of `step`, is found by its line, its byte
    and its key. `remote`: a bucket's prefix that text and tokens are in."""
    from tokenizers import Tokenizer

    places = write_kind(tmp_path / "data", kind, num, 150)
    folder = str(tmp_path / "data")
    config = make_config(
        tmp_path, eos=True, on_bad_document="skip", max_bad=0.01, sequence_length=2048
    )
    config |= {"epochs": 1}
    del config["samples"]
    if remote:
        ObjectPrefix(remote, ObjectOptions()).write(f"data/a.{kind}", tmp_path / f"data/a.{kind}")
        folder = f"{remote}/data"
        config |= {
            "cache": f"{remote}/cache",
            "sources": [config["sources"][0] | {"path": f"{folder}/*"}],
        }
    num_samples = build(config).ledger.ends[-1]
    model = Tokenizer.from_file(f"{config['tokenizer']}/tokenizer.json")
    text_file = f"{folder}/a.{kind}"
    documents = {line: f"k{i}" for i, line in enumerate(_number_lines(num, kind))}
    shown = set[int]()
    for k in range(num_samples):
        sample = show(config, k)
        stops = [*sample.document_starts[1:], len(sample.tokens)]
        listed = [place for piece in sample.pieces for place in piece.texts]
        for start, stop, place in zip(sample.document_starts, stops, listed, strict=True):
            offset, text = places[place.line]
            key = documents[place.line]
            assert (place.text, place.offset, place.key) == (text_file, offset, key)
            read = model.decode(list(sample.tokens[start:stop]), skip_special_tokens=True)
            assert read.strip("\ufffd") in text
            shown.add(place.line)
    left = {line: text for line, (_, text) in places.items() if text and line not in shown}
    assert shown <= places.keys()
    # The rest of the epoch is less than a sample
    assert sum(len(model.encode(text).ids) + 1 for text in left.values()) < 2048
    opened = Session(config).open()
    texts = TextPlaces(opened)
    storage = opened.store.storage
    token_files = group_by_folder(texts.paths)
    for line in sorted(places)[::step]:
        offset, _ = places[line]
        path, row = find_document(text_file, texts.paths, storage, line=line)
        assert find_document(text_file, texts.paths, storage, byte=offset) == (path, row)
        assert find_document(text_file, texts.paths, storage, key=documents[line]) == (path, row)
        (found,) = locate_rows(
            path, [row], next(iter(token_files.values())), storage, reader_of_footers(storage)
        )
        assert (found.line, found.offset, found.key) == (line, offset, documents[line])


def test_each_footer_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_kind(tmp_path / "data", "jsonl")
    config = make_config(tmp_path, on_bad_document="skip", max_bad=0.5, sequence_length=4096)
    build(config)
    opened = Session(config).open()
    texts = TextPlaces(opened)
    read = list[str]()

    def count(storage: Storage, path: str) -> dict[str, Any]:
        read.append(path)
        return read_footer(storage, path)

    monkeypatch.setattr("megablend.text.places.read_footer", count)
    for number, path in enumerate(texts.paths):
        block = opened.store.snapshot.files.entry(number).first_block
        assert texts.list_documents(path, block, 0, 1)
    assert len(read) > 2
    assert sorted(read) == sorted(set(read))


def _number_lines(num: int, kind: str) -> list[int]:
    """The line, or row, of each document that `write_kind` writes."""
    if kind in ("parquet", "arrow"):
        return list(range(num))
    blank = 0
    lines = []
    for i in range(num):
        blank += i % 11 == 5
        lines.append(1 + i + blank)
    return lines
