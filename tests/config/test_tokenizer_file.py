"""The tokenizer that a config names, and the token that ends documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megablend.config import load_config
from megablend.config.tokenizer_file import find_tokenizer, read_ids, read_vocab_size
from megablend.errors import ConfigError

TOKENIZER = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 7, "content": "</s>"}]}


def write(folder: Path, **named: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    if named:
        (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


def config(tmp_path: Path, **keys: Any) -> dict[str, Any]:
    source = {"name": "web", "path": "/data/*.jsonl", "text": "text", "weight": 1}
    return {
        "cache": str(tmp_path / "cache"),
        "sequence_length": 8,
        "samples": 8,
        "tokenizer": str(tmp_path / "t"),
        "sources": [source | keys],
    }


def test_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "t")
    file = folder / "tokenizer.json"
    assert find_tokenizer(str(folder)) == find_tokenizer(str(file)) == file
    assert find_tokenizer("t", tmp_path) == file
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    model = tmp_path / "hf/hub/models--meta--llama"
    old = write(model / "snapshots/bbb") / "tokenizer.json"
    assert find_tokenizer("meta/llama") == old
    new = write(model / "snapshots/aaa") / "tokenizer.json"
    (model / "refs").mkdir()
    (model / "refs/main").write_text("aaa\n")
    assert find_tokenizer("meta/llama") == new
    with pytest.raises(
        ConfigError,
        match=r"found 'other/model', but there is no file .*nor a model in .*hf download other/model",
    ):
        find_tokenizer("other/model")
    with pytest.raises(ConfigError, match=r"\(`hf download other/model tokenizer.json`\)$"):
        find_tokenizer("hf://other/model")
    for no_name in ("/nope/model", "../model", "s3://bucket/a/model"):
        with pytest.raises(ConfigError, match=r"give the path of a tokenizer.json$"):
            find_tokenizer(no_name)


@pytest.mark.parametrize("named", ["</s>", {"content": "</s>"}])
def test_eos_is_the_token_that_the_folder_names(tmp_path: Path, named: object) -> None:
    write(tmp_path / "t", eos_token=named)
    (source,) = load_config(config(tmp_path, eos=True)).sources["train"]
    assert source.append_eod == 7


@pytest.mark.parametrize(("text", "number"), [("</s>", 7), ("b", 1)])
def test_append_eod_may_be_the_text_of_a_token(tmp_path: Path, text: str, number: int) -> None:
    write(tmp_path / "t")
    (source,) = load_config(config(tmp_path, append_eod=text)).sources["train"]
    assert source.append_eod == number


def test_an_added_token_counts_and_not_the_entry_of_the_vocabulary(tmp_path: Path) -> None:
    path = write(tmp_path / "t") / "tokenizer.json"
    path.write_text(json.dumps(TOKENIZER | {"model": {"vocab": {"</s>": 9, "a": 0}}}))
    (source,) = load_config(config(tmp_path, append_eod="</s>")).sources["train"]
    assert source.append_eod == read_ids(path)["</s>"] == 7  # as tokenizers' `token_to_id`
    assert read_vocab_size(path) == 10


def test_what_is_wrong_with_the_token(tmp_path: Path) -> None:
    write(tmp_path / "t")
    for keys, says in (
        (
            {"append_eod": "<x>"},
            r"has no token '<x>'; expected a token in its vocabulary, such as '</s>', 'a', 'b'",
        ),
        ({"eos": True}, r"no eos_token is set in tokenizer_config.json or .*append_eod"),
        ({"eos": True, "append_eod": 3}, r"eos and append_eod both set the token"),
    ):
        with pytest.raises(ConfigError, match=says):
            load_config(config(tmp_path, **keys))


def test_where_tokens_are(tmp_path: Path) -> None:
    write(tmp_path / "t")
    (source,) = load_config(config(tmp_path)).sources["train"]
    assert source.token_paths == (f"{tmp_path}/cache/tokens/*",)
    given = config(tmp_path) | {"token_files": "s3://bucket/tokens"}
    (source,) = load_config(given).sources["train"]
    assert source.token_paths == ("s3://bucket/tokens/*",)


@pytest.mark.parametrize(
    ("tokenizer", "ids"),
    [
        (TOKENIZER, {"a": 0, "b": 1, "</s>": 7}),
        ({"model": {"vocab": {"a": 0, "b": 7}}}, {"a": 0, "b": 7}),
        (
            {"model": {"vocab": [["a", -1.0], ["b", -2.0]]}, "added_tokens": []},
            {"a": 0, "b": 1},
        ),
    ],
)
def test_the_ids_of_all_tokens(
    tmp_path: Path, tokenizer: dict[str, Any], ids: dict[str, int]
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(tokenizer))
    assert read_ids(path) == ids


def test_a_tokenizer_of_the_library(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{i}": i for i in range(50)}, unk_token="w0")
    )
    words.add_special_tokens(["<s>"])
    words.save(str(tmp_path / "t.json"))
    assert read_ids(tmp_path / "t.json") == words.get_vocab()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "cannot read the tokenizer"),
        ("[" * 9999, "cannot read the tokenizer"),
        ("[]", "found list, expected the object"),
        ("{}", "is not a tokenizer"),
        ('{"model": {"vocab": {}}}', "is not a tokenizer"),
        ('{"model": {"vocab": {"a": "b"}}}', "the largest token id is 'b'"),
        ('{"model": {"vocab": {"a": -1}}}', "the largest token id is -1"),
        ('{"model": {"vocab": [[]]}}', "is not a tokenizer"),
        ('{"model": {"vocab": 5}}', "is not a tokenizer"),
        ('{"model": {"vocab": {"a": 1}}, "added_tokens": [5]}', "is not a tokenizer"),
    ],
)
def test_what_is_no_tokenizer(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"t\.json: .*{says}.*`tokenizer.save`"):
        read_ids(tmp_path / "t.json")
    with pytest.raises(ConfigError, match=r"cannot read the tokenizer: No such file"):
        read_ids(tmp_path / "nowhere.json")
