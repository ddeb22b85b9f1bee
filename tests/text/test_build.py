"""Builds of text: an ordinary run over token files that are made once."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import megablend
from megablend.distributed.base import SingleProcess
from megablend.errors import CacheError, ChangedFileError, ConfigError, DataError
from megablend.inspect.describe import describe
from megablend.operations.build import build
from megablend.operations.build_results import BuildResult
from megablend.operations.check import check
from megablend.operations.session import Session
from megablend.operations.source_specs import list_specs
from megablend.reader.dataset import Dataset
from megablend.storage.by_scheme import make_storage
from megablend.storage.wrapper import WrapperStorage
from megablend.text import prove, token_file, work
from megablend.text import tokenise as tokenise_module
from megablend.text.engine import Engine, GigatokenEngine, Tokens
from megablend.text.token_file import read_footer
from megablend.text.tokenizer import load_tokenizer
from tests.cli.commands import run
from tests.storage.changing_inodes import change_inodes
from tests.text.test_lines import write
from tests.text.tokenizers_of_kinds import END, corpus, write_tokenizer

STORAGE = make_storage()


pytestmark = pytest.mark.usefixtures("small_parts")


def write_text(folder: Path, num_files: int = 3, suffix: str = "", num: int = 300) -> list[str]:
    """Files of JSON Lines, and their texts in order."""
    folder.mkdir(parents=True)
    texts = corpus()[:num]
    cut = -(-len(texts) // num_files)
    for i in range(num_files):
        part = texts[i * cut : (i + 1) * cut]
        lines = [json.dumps({"id": f"{i}/{j}", "text": text}) + "\n" for j, text in enumerate(part)]
        write(folder / f"{i:04d}.jsonl{suffix}", "".join(lines).encode())
    return list(texts)


def make_config(tmp_path: Path, kind: str = "gpt2", **keys: Any) -> dict[str, Any]:
    write_tokenizer(tmp_path / kind, kind)
    source = {"name": "web", "path": f"{tmp_path}/data/*", "text": "text", "key": "id", "weight": 1}
    top = {
        key: keys.pop(key)
        for key in list(keys)
        if key not in ("eos", "bos", "append_eod", "text", "add_special_tokens")
    }
    return {
        "cache": str(tmp_path / "cache"),
        "sequence_length": 64,
        "samples": 200,
        "tokenizer": str(tmp_path / kind),
        "sources": [source | keys],
        **top,
    }


def token_files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*.parquet"))
        if path.is_file()
    }


def read_tokens(folder: Path) -> list[list[int]]:
    found = []
    for name in token_files(folder):
        found += pq.read_table(folder / name, columns=["tokens"]).column(0).to_pylist()
    return found


def expected_tokens(config: dict[str, Any], texts: list[str]) -> list[list[int]]:
    from tokenizers import Tokenizer

    model = Tokenizer.from_file(f"{config['tokenizer']}/tokenizer.json")
    return [model.encode(text, add_special_tokens=False).ids for text in texts]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", ["gpt2", "unigram"])
def test_tokens_are_those_of_the_text(tmp_path: Path, suffix: str, kind: str) -> None:
    texts = write_text(tmp_path / "data", suffix=suffix)
    config = make_config(tmp_path, kind, append_eod=END)
    built = build(config)
    expected = expected_tokens(config, texts)
    assert read_tokens(tmp_path / "cache/tokens") == expected
    assert built.index.num_files == len(token_files(tmp_path / "cache/tokens")) > 10
    # The run reads them, each document followed by the end
    end = json.loads((tmp_path / kind / "tokenizer.json").read_text())["added_tokens"][-1]["id"]
    opened = Session(config).open()
    assert opened.data.tokens == [sum(map(len, expected)) + sum(map(bool, expected))]
    seen = np.concatenate([Dataset(opened).sample(i).tokens for i in range(200)])
    assert end in seen


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_text_in_tables(tmp_path: Path, name: str) -> None:
    texts = list(corpus()[:200])
    (tmp_path / "data").mkdir()
    table = pa.table({"id": range(len(texts)), "text": texts})
    if name.endswith("parquet"):
        pq.write_table(table, tmp_path / "data" / name, row_group_size=10)
    else:
        with pa.ipc.new_file(str(tmp_path / "data" / name), table.schema) as writer:
            writer.write_table(table)
    config = make_config(tmp_path)
    build(config)
    assert read_tokens(tmp_path / "cache/tokens") == expected_tokens(config, texts)


def test_the_samples_are_those_of_the_same_tokens_made_by_hand(tmp_path: Path) -> None:
    texts = write_text(tmp_path / "data")
    config = make_config(tmp_path, eos=True)
    build(config)
    end = Session(config).config.all_sources["web"].append_eod
    hand = tmp_path / "hand"
    for name in token_files(tmp_path / "cache/tokens"):
        (hand / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tmp_path / "cache/tokens" / name, hand / name)
    source = {
        "name": "web",
        "path": f"{hand}/**/*.parquet",
        "column": "tokens",
        "append_eod": end,
        "weight": 1,
    }
    other = {key: each for key, each in config.items() if key != "tokenizer"}
    other |= {"cache": str(tmp_path / "other"), "sources": [source]}
    build(other)
    one = Dataset(Session(config).open())
    two = Dataset(Session(other).open())
    for k in range(len(one)):
        assert one.sample(k).tokens.tolist() == two.sample(k).tokens.tolist()
    assert texts


class CountingStorage(WrapperStorage):
    """Counts reads of each file."""

    reads: ClassVar[Counter[str]] = Counter()

    def read(self, path: str, offset: int, size: int) -> bytes:
        self.reads[path] += 1
        return super().read(path, offset, size)

    def fetch(self, path: str, *args: Any) -> Any:
        self.reads[path] += 1
        return super().fetch(path, *args)


def count_texts() -> dict[str, int]:
    found = {
        path: n
        for path, n in CountingStorage.reads.items()
        if ".jsonl" in path and "/tokens/" not in path
    }
    CountingStorage.reads.clear()
    return found


def rebuild(config: dict[str, Any], **changes: Any) -> BuildResult:
    return build(config | changes, storage=CountingStorage(STORAGE), processes=1)


@pytest.mark.parametrize("num_files", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_only_new_text_is_read(tmp_path: Path, num_files: int) -> None:
    write_text(tmp_path / "data", num_files=num_files, num=num_files)
    config = make_config(tmp_path)
    rebuild(config)
    assert len(count_texts()) == num_files
    before = token_files(tmp_path / "cache/tokens")
    rebuild(config)
    assert count_texts() == {}
    new = tmp_path / "data" / "zz.jsonl"
    new.write_text('{"text": "one more file"}\n')
    rebuild(config, run="second")
    assert list(count_texts()) == [str(new)]
    after = token_files(tmp_path / "cache/tokens")
    assert len(after) == len(before) + 1
    assert after.items() >= before.items()


def test_copied_and_touched_text_is_hashed_and_not_tokenised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text(tmp_path / "data", num_files=3)
    config = make_config(tmp_path)
    rebuild(config)
    before = read_tokens(tmp_path / "cache/tokens")
    shutil.copy(tmp_path / "data/0001.jsonl", tmp_path / "data/copy.jsonl")
    (tmp_path / "data/0000.jsonl").touch()
    count_texts()

    def refuse(*_: object) -> Tokens:
        raise AssertionError("tokenised again")

    monkeypatch.setattr(Engine, "encode", refuse)
    built = rebuild(config, run="second")
    assert set(count_texts()) == {f"{tmp_path}/data/copy.jsonl", f"{tmp_path}/data/0000.jsonl"}
    per_file = len(list((tmp_path / "cache/tokens").glob("*/0001.jsonl/*.parquet")))
    assert len(list((tmp_path / "cache/tokens").glob("*/copy.jsonl/*.parquet"))) == per_file > 1
    assert len(read_tokens(tmp_path / "cache/tokens")) == len(before) + 100
    assert built.index.num_files
    rebuild(config, run="second")
    assert count_texts() == {}


def test_without_its_record_nothing_is_tokenised_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text(tmp_path / "data")
    config = make_config(tmp_path)
    rebuild(config)
    (record,) = (tmp_path / "cache/tokens").glob("*/.text-*.json")
    whole = record.read_bytes()
    monkeypatch.setattr(Engine, "encode", None)
    for damaged in (None, b"", b"{}", b"[3]", whole[:-5], b'{"files": {"a": {"size": 3}}}'):
        record.unlink()
        if damaged is not None:
            record.write_bytes(damaged)
        count_texts()
        rebuild(config)
        assert count_texts() == {}
        assert record.read_bytes() == whole


def test_a_token_file_that_was_removed_is_made_again(tmp_path: Path) -> None:
    write_text(tmp_path / "data")
    config = make_config(tmp_path)
    rebuild(config)
    tokens = tmp_path / "cache/tokens"
    before = token_files(tokens)
    (tokens / list(before)[5]).unlink()
    count_texts()
    rebuild(config | {"run": "two"})
    assert len(count_texts()) == 1
    assert token_files(tokens) == before


def test_lost_token_files_of_touched_text_are_read_on_under_another_name(tmp_path: Path) -> None:
    """Their footers differ, which the run refuses; the samples are the same, as docs/text.md says."""
    write_text(tmp_path / "data", num_files=2, num=60)
    config = make_config(tmp_path)
    build(config)
    before = Dataset(Session(config).open())
    expected = [before.sample(k).tokens.tolist() for k in range(40, 60)]
    shutil.rmtree(tmp_path / "cache/tokens")
    for path in (tmp_path / "data").iterdir():
        path.touch()
    assert "when it was indexed; restore the original file, or give the run another name" in str(
        build(config).problems
    )
    renamed = config | {"run": "second"}
    assert not build(renamed).problems
    resumed = megablend.open(renamed, consumed_samples=40)
    assert resumed.consumed_samples == 40
    assert [resumed.sample(k).tokens.tolist() for k in range(40, 60)] == expected


def test_files_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "data")
    config = make_config(tmp_path)
    allowed = type(STORAGE).is_readable

    def is_readable(self: Any, path: str) -> bool:
        return "0001" not in path and allowed(self, path)

    monkeypatch.setattr(type(STORAGE), "is_readable", is_readable)
    with pytest.raises(DataError, match=r"0001.jsonl: cannot be read: Permission denied"):
        build(config)
    assert "0001.jsonl" in build(config | {"on_unreadable": "skip"}).index.skipped[0]


def test_text_that_gets_other_inodes_has_not_changed_and_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text(tmp_path / "data", 2)
    inodes = change_inodes(monkeypatch)
    config = make_config(tmp_path)
    rebuild(config)
    assert next(inodes) > 4
    count_texts()
    rebuild(config)
    assert count_texts() == {}
    (record,) = (tmp_path / "cache/tokens").glob("*/.text-*.json")
    record.unlink()
    rebuild(config)
    assert count_texts() == {}


def test_a_cache_whose_name_is_a_pattern(tmp_path: Path) -> None:
    write_text(tmp_path / "data")
    config = make_config(tmp_path, cache=str(tmp_path / "c[1]*"))
    build(config)
    assert len(token_files(tmp_path / "c[1]*/tokens")) > 5
    assert Dataset(Session(config).open()).sample(3).tokens.any()
    assert build(config).index.reused


def test_two_tokenizers_side_by_side(tmp_path: Path) -> None:
    texts = write_text(tmp_path / "data")
    one = make_config(tmp_path, "gpt2")
    two = make_config(tmp_path, "unigram", run="two")
    build(one)
    first = token_files(tmp_path / "cache/tokens")
    build(two)
    assert token_files(tmp_path / "cache/tokens").items() >= first.items()
    assert Session(one).open().data.tokens == [sum(map(len, expected_tokens(one, texts)))]
    assert Session(two).open().data.tokens == [sum(map(len, expected_tokens(two, texts)))]
    digests = [load_tokenizer(each["tokenizer"]).digest for each in (one, two)]
    with pytest.raises(
        ConfigError,
        match=f"has digest {digests[1]}, but the run was started with tokens made by tokenizer {digests[0]}",
    ):
        build(one | {"tokenizer": two["tokenizer"]})
    (warning,) = check(one | {"tokenizer": two["tokenizer"]}).warnings
    assert warning.startswith(
        f"source 'web' was tokenised with another tokenizer (digest {digests[0]}) than "
    )
    assert warning.endswith("or give the run another name (`run:`)")
    assert check(one).warnings == ()


def test_a_run_is_checked_without_its_tokenizer(tmp_path: Path) -> None:
    write_text(tmp_path / "data")
    config = make_config(tmp_path)
    build(config)
    (tmp_path / "gpt2/tokenizer.json").unlink()
    checked = check(config)
    assert checked.problems == ()
    (warning,) = checked.warnings
    assert warning.startswith(f"tokenizer: found '{tmp_path}/gpt2', but ")


def test_settings_that_changed_under_a_run_are_named(tmp_path: Path) -> None:
    """Rather than the text, which has not changed."""
    write_text(tmp_path / "data")
    config = make_config(tmp_path)
    build(config)
    with pytest.raises(
        ConfigError, match=r"'web': `key` is None, but .* made with 'id'; set it back"
    ):
        build(config | {"sources": [config["sources"][0] | {"key": None}]})
    with pytest.raises(ConfigError, match="'web': `max_document` is 5000, but "):
        build(config | {"max_document": 5000})


def test_text_that_changed_under_a_run_is_an_error(tmp_path: Path) -> None:
    write_text(tmp_path / "data")
    config = make_config(tmp_path)
    build(config)
    path = tmp_path / "data/0001.jsonl"
    with path.open("a") as file:
        file.write('{"text": "grown"}\n')
    with pytest.raises(ChangedFileError, match=r"0001.jsonl: changed after the run"):
        build(config)
    assert build(config | {"run": "another"}).index.changed == ()


def test_more_processes_and_ranks_make_the_same_bytes(tmp_path: Path) -> None:
    write_text(tmp_path / "data", num_files=4)
    config = make_config(tmp_path)
    found = []
    for processes in (1, 3):
        build(config | {"cache": str(tmp_path / f"cache{processes}")}, processes=processes)
        found.append(token_files(tmp_path / f"cache{processes}/tokens"))
    assert found[0] == found[1]
    assert len(found[0]) > 10


@pytest.mark.parametrize("bad", ['{"text": null}', '{"text": "a', '{"other": "a"}'])
def test_a_bad_document_is_an_error_that_names_its_line(tmp_path: Path, bad: str) -> None:
    write_text(tmp_path / "data", num_files=1)
    path = tmp_path / "data/0000.jsonl"
    lines = path.read_text().splitlines()
    lines[150] = bad
    path.write_text("\n".join(lines) + "\n")
    at = len("\n".join(lines[:150]).encode()) + 1
    with pytest.raises(
        DataError, match=rf"0000.jsonl at byte {at}: line 151: .*on_bad_document: skip"
    ):
        build(make_config(tmp_path), processes=1)


def test_processes_do_not_run_files_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = write_text(tmp_path / "data")
    for module in ("select", "random", "tokenizers"):
        (tmp_path / f"{module}.py").write_text("raise SystemExit('run')")
    monkeypatch.chdir(tmp_path)
    config = make_config(tmp_path)
    build(config, processes=2)
    assert read_tokens(tmp_path / "cache/tokens") == expected_tokens(config, texts)


def test_bad_documents_are_left_out_and_counted(tmp_path: Path) -> None:
    texts = write_text(tmp_path / "data", num_files=2)
    path = tmp_path / "data/0001.jsonl"
    begin = path.stat().st_size
    with path.open("a") as file:
        file.write('{"text": null}\n' * 100_000 + "nonsense\n" * 7 + '{"text": "last"}\n')
    config = make_config(tmp_path, on_bad_document="skip", max_bad=0.999)
    built = build(config, processes=2)
    assert read_tokens(tmp_path / "cache/tokens") == expected_tokens(config, [*texts, "last"])
    (note,) = built.index.notes
    first = f"{path} at byte {begin} has null in 'text', not a string"
    kinds = f"100,000 of kind 'no text' (the first: {first}), 7 of kind 'not JSON' (the first"
    assert f"skipped bad documents: {kinds}" in note
    bad = describe(config).to_dict()["bad_documents"]
    counts = [(each["source"], each["kind"], each["count"]) for each in bad]
    assert counts == [("web", "no text", 100_000), ("web", "not JSON", 7)]
    assert [len(each["first"]) for each in bad] == [5, 5]
    places = [f"{path} at byte {begin + i * 15} " for i in range(5)]
    assert [each.partition("has")[0] for each in bad[0]["first"]] == places
    config_file = tmp_path / "config.json"
    config_file.write_text(json.dumps(config))
    said = run("describe", config_file).stdout
    assert f"source 'web': 100,000 documents were left out (no text): {first}; " in said
    with pytest.raises(
        DataError,
        match=r"'web' has 100,007 bad documents out of 100,308 .*expected at most 0.1 % of them",
    ):
        build(config | {"max_bad": 0.001})
    with pytest.raises(
        DataError, match=r"'web' has 100,007 bad documents out of 100,308 .*expected at most 0 % of"
    ):
        build(config | {"on_bad_document": "error"})


@pytest.mark.parametrize(("num_bad", "is_allowed"), [(29, True), (30, False)])
def test_the_share_of_bad_documents_is_exact(
    tmp_path: Path, num_bad: int, is_allowed: bool
) -> None:
    """29 of 100 are as many as 0.29 allows, and 0.29 * 100 is less than 29."""
    (tmp_path / "data").mkdir()
    lines = ['{"text": "good"}'] * (100 - num_bad) + ["bad"] * num_bad
    (tmp_path / "data/a.jsonl").write_text("\n".join(lines))
    config = make_config(tmp_path, on_bad_document="skip", max_bad=0.29)
    if is_allowed:
        assert build(config, processes=1).index.notes
    else:
        with pytest.raises(DataError, match=f"has {num_bad} bad documents out of 100"):
            build(config, processes=1)


def test_unreadable_files_are_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text(tmp_path / "data", num_files=3, suffix=".gz")
    path = tmp_path / "data/0001.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-100])
    config = make_config(tmp_path)
    with pytest.raises(DataError, match=r"0001.jsonl.gz .*cannot be decompressed"):
        build(config)
    built = build(config | {"on_unreadable": "skip"})
    assert "0001.jsonl.gz" in built.index.skipped[0]
    assert len(list((tmp_path / "cache/tokens").glob("*/*.gz"))) >= 2
    # That is known until the file changes
    with monkeypatch.context() as patched:
        patched.setattr(tokenise_module, "_tokenise_pending", None)
        again = build(config | {"on_unreadable": "skip"})
        assert "0001.jsonl.gz" in again.index.skipped[0]
        session = Session(config | {"on_unreadable": "skip"})
        assert len(list_specs(session.config, session.storage)[0].paths) >= 2
    with pytest.raises(DataError, match=r"0001.jsonl.gz .*cannot be decompressed"):
        build(config)
    write_text(tmp_path / "new", num_files=3, suffix=".gz")
    (tmp_path / "new/0001.jsonl.gz").rename(path)
    assert not build(config).index.skipped


def test_special_tokens_in_text_are_counted(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.jsonl").write_text(
        f'{{"text": "a{END}b"}}\n{{"text": "c"}}\n{{"text": "{END}{END}"}}\n'
    )
    built = build(make_config(tmp_path))
    assert "2 documents contain the text of a special token" in built.index.notes[0]


def test_gigatoken_is_used_once_it_is_proved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gigatoken")
    texts = write_text(tmp_path / "data")
    config = make_config(tmp_path)
    monkeypatch.setattr(prove, "MIN_PROVED_BYTES", 0)
    proofs = []
    monkeypatch.setattr(prove, "_prove", lambda *args: proofs.append(args))
    build(config, processes=2)
    tokens = tmp_path / "cache/tokens"
    assert read_tokens(tokens) == expected_tokens(config, texts)
    for name in token_files(tokens):
        footer = read_footer(STORAGE, str(tokens / name))
        assert footer["engine"] == "gigatoken"
        assert set(footer["versions"]) == {"gigatoken", "tokenizers"}
    (tmp_path / "data/new.jsonl").write_text('{"text": "new"}\n')
    build(config | {"run": "two"})
    assert len(proofs) == 1


def test_a_tokenizer_for_which_it_differs_falls_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gigatoken")
    texts = write_text(tmp_path / "data")
    config = make_config(tmp_path)
    monkeypatch.setattr(prove, "MIN_PROVED_BYTES", 0)
    monkeypatch.setattr(prove, "_prove", lambda *_: "é")
    (note,) = build(config).index.notes
    assert "does not give the same tokens" in note
    assert "30 times" in note
    assert read_tokens(tmp_path / "cache/tokens") == expected_tokens(config, texts)


def test_a_part_in_which_it_differs_is_tokenised_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gigatoken")
    texts = write_text(tmp_path / "data", num_files=1)
    config = make_config(tmp_path)
    monkeypatch.setattr(prove, "MIN_PROVED_BYTES", 0)
    monkeypatch.setattr(prove, "_prove", lambda *_: None)
    encode = GigatokenEngine.encode
    wrong = texts[100]

    def encode_wrong(self: GigatokenEngine, given: list[str]) -> Tokens:
        found = encode(self, given)
        if wrong in given:
            found.ids[0] += 1
        return found

    monkeypatch.setattr(GigatokenEngine, "encode", encode_wrong)
    (note,) = build(config, processes=1).index.notes
    assert "and tokenizers give different tokens for the document at byte" in note
    tokens = tmp_path / "cache/tokens"
    assert read_tokens(tokens) == expected_tokens(config, texts)
    engines = Counter(
        read_footer(STORAGE, str(tokens / name))["engine"] for name in token_files(tokens)
    )
    assert engines["tokenizers"] == 1
    assert engines["gigatoken"] > 5


@pytest.mark.parametrize("is_wrong", [False, True])
def test_of_long_documents_the_beginnings_are_tokenised_by_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_wrong: bool
) -> None:
    """`tokenizers` takes 117 bytes of memory for each byte of a document, gigatoken 14."""
    pytest.importorskip("gigatoken")
    texts = write_text(tmp_path / "data")
    config = make_config(tmp_path)
    monkeypatch.setattr(prove, "MIN_PROVED_BYTES", 0)
    monkeypatch.setattr(prove, "_prove", lambda *_: None)
    monkeypatch.setattr(work, "MAX_CHECKED", 100)
    lengths = list[int]()
    encode = Engine.encode
    encode_fast = GigatokenEngine.encode

    def count_lengths(self: Engine, given: list[str]) -> Tokens:
        lengths.extend(map(len, given))
        return encode(self, given)

    def encode_cut_wrong(self: GigatokenEngine, given: list[str]) -> Tokens:
        found = encode_fast(self, given)
        if is_wrong and len(given[-1]) == 100:
            found.ids[-1] += 1
        return found

    monkeypatch.setattr(Engine, "encode", count_lengths)
    monkeypatch.setattr(GigatokenEngine, "encode", encode_cut_wrong)
    notes = build(config, processes=1).index.notes
    assert read_tokens(tmp_path / "cache/tokens") == expected_tokens(config, texts)
    assert bool(notes) == is_wrong
    assert (max(lengths) == 100) == (not is_wrong)


def test_a_full_disk_leaves_nothing_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text(tmp_path / "data")
    config = make_config(tmp_path)
    close = token_file.TokenFileWriter.close
    calls = []

    def fail_later(self: Any, footer: Any) -> None:
        calls.append(footer)
        if len(calls) == 4:
            raise OSError(28, "No space left on device")
        close(self, footer)

    monkeypatch.setattr(token_file.TokenFileWriter, "close", fail_later)
    with pytest.raises(CacheError, match=r"cannot write tokens \(No space"):
        build(config, processes=1)
    tokens = tmp_path / "cache/tokens"
    assert len(token_files(tokens)) == 3
    assert not [path for path in tokens.rglob("*") if path.name.startswith(".tmp-")]
    build(config, processes=1)
    build(config | {"cache": str(tmp_path / "other")}, processes=1)
    assert token_files(tokens) == token_files(tmp_path / "other/tokens")


def test_text_that_is_not_tokenised_yet_is_told(tmp_path: Path) -> None:
    from megablend.operations.source_specs import list_specs

    write_text(tmp_path / "data")
    config = make_config(tmp_path)
    session = Session(config)
    with pytest.raises(
        CacheError, match=r"3 of 3 text files are not tokenised \(the first is .*0000.jsonl"
    ):
        list_specs(session.config, session.storage)
    build(config)
    (spec,) = list_specs(session.config, session.storage)
    assert len(spec.paths) == len(token_files(tmp_path / "cache/tokens"))


def test_one_process_is_one_rank() -> None:
    assert tokenise_module._count_processes(SingleProcess()) >= 1
