from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
from megatron.core.tokenizers.text.text_tokenizer import MegatronTokenizerText

from megablend.errors import ConfigError
from megablend.megatron.request.tokenizer import build_identifiers, identifiers_of, read_identifiers

FOUND = {"class": "m.T", "tokenizer_path": ["ü"], "b": "1", "a": "2"}


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(FOUND),
        json.dumps({"class": "GPTDataset", "dataset_path": "/a", "tokenizer": FOUND}, indent=4),
        json.dumps(
            {
                "class": "BlendedDataset",
                "datasets": [{"dataset_path": "/a", "tokenizer": FOUND}],
                "size": 1,
            }
        ),
    ],
)
def test_identifiers_from_descriptions_keep_their_order(text: str, tmp_path: Path) -> None:
    file = tmp_path / "description.txt"
    file.write_text(text)
    assert list(read_identifiers(str(file)).items()) == list(FOUND.items())
    assert read_identifiers(text) == FOUND


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", r"the tokenizer's identifiers: expected JSON"),
        ("nowhere.txt", r"nowhere\.txt: expected JSON, or a JSON file"),
        ('{"datasets": []}', r"expected an object with a `class`"),
        ('{"class": "GPTDataset", "dataset_path": "/a"}', r"found None"),
    ],
)
def test_what_holds_no_identifiers(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_identifiers(given)


def test_a_tokenizer_without_identifiers() -> None:
    with pytest.raises(ConfigError, match=r"the tokenizer object has no unique_identifiers"):
        identifiers_of(object())


FLAGS: dict[str, Any] = {
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 1000,
    "tokenizer_metadata": None,
    "null_tokenizer_pad_id": -1,
}


def test_the_installed_core_builds_a_tokenizer() -> None:
    found = build_identifiers(FLAGS)
    assert found.pop("class").startswith("megatron.core.tokenizers.text.")
    # The last one from 0.18
    expected = {"tokenizer_path": None, "vocab_size": "1000", "pad_id": "-1"}
    assert found == {name: expected[name] for name in found}
    assert len(found) >= 2
    says = (
        r"--tokenizer-type NullTokenizer: megatron-core cannot build it \(TypeError.*\); check its flags, or give "
        r"--tokenizer-id"
    )
    with pytest.raises(ConfigError, match=says):
        build_identifiers({**FLAGS, "vocab_size": None})


def test_without_megatron_core_identifiers_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    load = builtins.__import__

    def absent(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("megatron"):
            raise ImportError(f"No module named {name!r}")
        return load(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", absent)
    says = r"--tokenizer-type needs megatron-core .*; install it, or give --tokenizer-identifiers"
    with pytest.raises(ConfigError, match=says):
        build_identifiers(FLAGS)
    assert read_identifiers(json.dumps(FOUND)) == FOUND
    monkeypatch.undo()  # as if it were installed
    assert build_identifiers(FLAGS)


def test_legacy_tokenizers_are_not_taken_for_new_ones() -> None:
    with pytest.raises(ConfigError, match=r"--legacy-tokenizer: .*give --tokenizer-identifiers"):
        build_identifiers({**FLAGS, "legacy_tokenizer": True})


@pytest.mark.parametrize(("words", "expected"), [((), "None"), (("<a>", "<b>"), "['<a>', '<b>']")])
def test_special_tokens_are_printed_as_megatron_prints_them(
    words: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a tokenizer whose library is not installed: only its model is not read."""
    monkeypatch.setattr(MegatronTokenizerText, "_restore_model", lambda self, **options: None)
    flags = {
        **FLAGS,
        "tokenizer_type": "GPTSentencePieceTokenizer",
        "tokenizer_model": "/m",
        "chat_template": None,
        "tokenizer_special_tokens": words,
    }
    found = build_identifiers({**flags, "tokenizer_sentencepiece_legacy": False})
    assert found["special_tokens"] == expected
    assert found["tokenizer_path"] == "/m"
