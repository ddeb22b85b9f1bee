"""Tokens of gigatoken are those of `tokenizers`, or it is not used."""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megablend.errors import ConfigError
from megablend.text import engine, prove
from megablend.text.engine import Engine, GigatokenEngine, Tokens, find_added, surround
from megablend.text.tokenizer import TokenizerFile, is_listed, load_tokenizer
from tests.text.tokenizers_of_kinds import END, FAST, KINDS, corpus, definition, write_tokenizer

pytest.importorskip("gigatoken", reason="pip install 'megablend[text]'")


def load(
    folder: Path, kind: str, change: Callable[[dict[str, Any]], object] | None = None
) -> TokenizerFile:
    write_tokenizer(folder, kind)
    if change is not None:
        data = json.loads(definition(kind))
        change(data)
        (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    return load_tokenizer(str(folder))


def test_a_model_file_that_is_json_is_a_tokenizer(tmp_path: Path) -> None:
    expected = load(tmp_path, FAST[0])
    renamed = tmp_path / "tokenizer.model"
    (tmp_path / "tokenizer.json").rename(renamed)
    assert load_tokenizer(str(renamed)).digest == expected.digest
    renamed.write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02")
    says = "not a tokenizer.json .*a SentencePiece or tiktoken .model must be converted: use the tokenizer.json next to it"
    with pytest.raises(ConfigError, match=says):
        load_tokenizer(str(renamed))


def marks(number: int) -> list[str]:
    """Strings of marks, decompositions and code points that no version of Unicode has assigned."""
    chosen = random.Random(7)
    kinds = [unicodedata.category(chr(code)) for code in range(0x32000)]
    codes = [code for code, kind in enumerate(kinds) if kind in ("Mn", "Mc")]
    # Unassigned ones beside marks are those that later versions assign to marks
    codes += [c for c, kind in enumerate(kinds) if kind == "Cn" and "Mn" in kinds[c - 16 : c + 16]]
    found = []
    for _ in range(number):
        base = [chosen.choice("ae> Aㅏ각Ω") for _ in range(3)]
        text = "".join(base + [chr(chosen.choice(codes)) for _ in range(chosen.randrange(1, 5))])
        forms = (text, unicodedata.normalize("NFC", text), unicodedata.normalize("NFD", text))
        found.append(chosen.choice(forms))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_which_structures_are_listed(tmp_path: Path, kind: str) -> None:
    assert load(tmp_path, kind).is_listed == (kind in FAST)


@pytest.mark.parametrize("kind", FAST)
def test_tokens_are_equal(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load(tmp_path, kind)
    fast = GigatokenEngine(tokenizer)
    reference = Engine(tokenizer)
    texts = [*corpus()[::3], *marks(3000), "", f"a{END}é\u0338", f">\u0338{END}\u0338"]
    found = fast.encode(texts)
    at = prove.first_difference(found, reference.encode(texts))
    assert at is None, texts[at or 0]
    # Against the library itself, one by one
    for i in range(0, 300, 7):
        start = int(found.counts[:i].sum())
        ids = reference._model.encode(texts[i], add_special_tokens=False).ids
        assert found.ids[start : start + found.counts[i]].tolist() == ids
    monkeypatch.setattr(prove, "CODE_POINTS", range(0, 0x32000, 97))
    monkeypatch.setattr(prove, "NUM_STRINGS", 500)
    assert prove.find_difference(fast, reference, tokenizer) is None


@pytest.mark.parametrize("kind", FAST)
def test_long_texts_with_unassigned_code_points_are_tokenised_in_pieces(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load(tmp_path, kind)
    fast = GigatokenEngine(tokenizer)
    if not fast._is_byte_level:
        pytest.skip("gigatoken tokenises all of its texts")
    chosen = random.Random(3)
    words = [
        "a",
        "Word",
        "12",
        "...",
        "。",
        "中文",
        "か",
        "한",
        "é",
        "e\u0301",
        "'s",
        END,
        "\u0378",
        *marks(50),
    ]
    blanks = ["", " ", "  ", "\n", "\n", "\n", "\r\n", "\n\n", " \n", "\n ", "\t", "\u00a0"]
    texts = ["\u0378" + "\n".join(corpus()[:50]), "\u0378", "\u0378\na"]
    for _ in range(300):
        pairs = ((chosen.choice(words), chosen.choice(blanks)) for _ in range(60))
        texts.append("\u0378" + "".join(piece for pair in pairs for piece in pair))
    expected = Engine(tokenizer).encode(texts)
    monkeypatch.setattr(engine, "_BATCH_CHARACTERS", 3)
    assert sum(len(list(fast._cut(text))) for text in texts) > 5 * len(texts)
    found = fast.encode(texts)
    at = prove.first_difference(found, expected)
    assert at is None, texts[at or 0]


def test_long_texts_are_not_cut_if_a_blank_is_put_before_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load(
        tmp_path, "gpt2", lambda data: data["pre_tokenizer"].update(add_prefix_space=True)
    )
    assert tokenizer.is_listed
    fast = GigatokenEngine(tokenizer)
    texts = ["the\u0378\nthe", "the\nthe"]
    expected = Engine(tokenizer).encode(texts)
    monkeypatch.setattr(engine, "_BATCH_CHARACTERS", 1)
    assert prove.first_difference(fast.encode(texts), expected) is None


def test_what_gigatoken_caches_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = GigatokenEngine(load(tmp_path, "gpt2"))
    expected = fast.encode(corpus())
    first = fast._fast
    assert fast.encode(corpus()).ids.tolist() == expected.ids.tolist()
    assert fast._fast is first
    monkeypatch.setattr(engine, "MAX_CACHE_BYTES", -(1 << 40))
    monkeypatch.setattr(fast, "_is_limited", False)  # as of 0.10
    assert fast.encode(corpus()).ids.tolist() == expected.ids.tolist()
    assert fast._fast is not first


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAST)
def test_all_probes_are_equal(tmp_path: Path, kind: str) -> None:
    tokenizer = load(tmp_path, kind)
    fast = GigatokenEngine(tokenizer)
    reference = Engine(tokenizer)
    assert prove.find_difference(fast, reference, tokenizer) is None
    texts = marks(200_000)
    assert prove.first_difference(fast.encode(texts), reference.encode(texts)) is None


def _set(*way: str | int, value: object) -> Callable[[dict[str, Any]], object]:
    def change(data: Any) -> None:
        for key in way[:-1]:
            data = data[key]
        data[way[-1]] = value

    return change


def _split_and(*steps: dict[str, Any]) -> Callable[[dict[str, Any]], object]:
    def change(data: dict[str, Any]) -> None:
        split, level = data["pre_tokenizer"]["pretokenizers"]
        named = {"split": split, "level": level}
        listed = [named.get(step["type"], step) for step in steps]
        data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": listed}

    return change


SPLIT = {"type": "split"}
LEVEL = {"type": "level"}
SILENT: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "no pre-tokenizer": ("gpt2", _set("pre_tokenizer", value=None)),
    "ByteLevel without its expression": ("gpt2", _set("pre_tokenizer", "use_regex", value=False)),
    "Digits after Split": (
        "llama3",
        _split_and(SPLIT, {"type": "Digits", "individual_digits": True}, LEVEL),
    ),
    "Split, and the expression of ByteLevel": (
        "llama3",
        _set("pre_tokenizer", "pretokenizers", 1, "use_regex", value=True),
    ),
    "Whitespace before Split": ("llama3", _split_and({"type": "Whitespace"}, SPLIT, LEVEL)),
    "Removed": ("llama3", _set("pre_tokenizer", "pretokenizers", 0, "behavior", value="Removed")),
    "inverted": ("llama3", _set("pre_tokenizer", "pretokenizers", 0, "invert", value=True)),
    "dropout": ("gpt2", _set("model", "dropout", value=0.1)),
    "single_word": ("gpt2", _set("added_tokens", 0, "single_word", value=True)),
    "lstrip": ("gpt2", _set("added_tokens", 0, "lstrip", value=True)),
    "normalized added token with NFC": ("qwen2", _set("added_tokens", 0, "normalized", value=True)),
    "NFKC": ("qwen2", _set("normalizer", value={"type": "NFKC"})),
    "Lowercase": ("gpt2", _set("normalizer", value={"type": "Lowercase"})),
    "prefix of parts of words": ("gpt2", _set("model", "continuing_subword_prefix", value="##")),
}


@pytest.mark.parametrize("name", SILENT)
def test_what_gigatoken_reads_wrong_without_an_error_is_not_listed(
    tmp_path: Path, name: str
) -> None:
    kind, change = SILENT[name]
    assert not load(tmp_path, kind, change).is_listed


@pytest.mark.parametrize(
    "name",
    ["no pre-tokenizer", "ByteLevel without its expression", "Removed", "Digits after Split"],
)
def test_the_probes_find_it_too(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, change = SILENT[name]
    tokenizer = load(tmp_path, kind, change)
    monkeypatch.setattr(prove, "CODE_POINTS", range(0, 0x32000, 997))
    fast = GigatokenEngine(tokenizer)
    assert prove.find_difference(fast, Engine(tokenizer), tokenizer) is not None


def test_what_removes_nothing_is_listed(tmp_path: Path) -> None:
    """Copies of OpenAI's tokenizers remove what their expression does not match: there is nothing."""

    def change(data: dict[str, Any]) -> None:
        data["pre_tokenizer"]["pretokenizers"][0] |= {"behavior": "Removed", "invert": True}

    tokenizer = load(tmp_path, "o200k", change)
    assert tokenizer.is_listed
    texts = [*corpus()[::5], *marks(300)]
    found = GigatokenEngine(tokenizer).encode(texts)
    assert prove.first_difference(found, Engine(tokenizer).encode(texts)) is None


def test_code_points_that_a_newer_unicode_has_are_left_to_tokenizers(tmp_path: Path) -> None:
    """U+11DE0 is a digit for gigatoken and not for `tokenizers`, as Llama 3's vocabulary shows: it has a token that begins
    with a blank. Of a small vocabulary none does, unless it is added."""

    def change(data: dict[str, Any]) -> None:
        model = data["model"]
        ids = [*model["vocab"].values(), *(each["id"] for each in data["added_tokens"])]
        model["vocab"]["Ġð"] = max(ids) + 1
        model["merges"].insert(0, ["Ġ", "ð"])

    tokenizer = load(tmp_path, "llama3", change)
    texts = ["plain", " \U00011de0\U00011de0 ", "中文 é", "1\ua7d4\n\ua7d4b"]
    expected = Engine(tokenizer).encode(texts)
    assert prove.first_difference(GigatokenEngine(tokenizer).encode(texts), expected) is None


def test_truncation_and_padding_are_left_out(tmp_path: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        data["truncation"] = {
            "direction": "Right",
            "max_length": 3,
            "strategy": "LongestFirst",
            "stride": 0,
        }

    whole = load(tmp_path / "a", "gpt2")
    cut = load(tmp_path / "b", "gpt2", change)
    assert cut.digest == whole.digest
    text = "a text of more than three tokens"
    for each in (Engine(cut), GigatokenEngine(cut)):
        assert each.encode([text]).ids.tolist() == Engine(whole).encode([text]).ids.tolist()


def test_gigatokens_own_normalisation_is_not_used(tmp_path: Path) -> None:
    """Its Unicode is another version's: with it, some of these strings differ."""
    import gigatoken

    tokenizer = load(tmp_path, "qwen2")
    texts = marks(20_000)
    own = gigatoken.Tokenizer.from_json(tokenizer.definition).encode_batch(texts, parallel=False)
    reference = Engine(tokenizer).encode(texts)
    assert [i for each in own for i in each.tolist()] != reference.ids.tolist()
    assert prove.first_difference(GigatokenEngine(tokenizer).encode(texts), reference) is None


@pytest.mark.parametrize("wrong", range(6))
def test_the_first_difference(wrong: int) -> None:
    expected = [[1, 2], [], [3], [4, 5, 6], [7], [8, 9]]
    for change in ([], [99], [*expected[wrong], 99]):
        found = [*expected[:wrong], change, *expected[wrong + 1 :]]
        if change != expected[wrong]:
            assert prove.first_difference(as_tokens(found), as_tokens(expected)) == wrong
    assert prove.first_difference(as_tokens(expected), as_tokens(expected)) is None


def as_tokens(texts: list[list[int]]) -> Tokens:
    flat = [i for text in texts for i in text]
    return Tokens(np.array(flat, np.int32), np.array([len(text) for text in texts], np.int64))


def test_documents_are_chosen_by_the_seed() -> None:
    texts = ["x" * i for i in range(1, 400)]
    chosen = prove.choose_checked(texts, 5, 16)
    assert chosen == prove.choose_checked(texts, 5, 16) != prove.choose_checked(texts, 6, 16)
    assert len(chosen) == 16
    assert chosen[0] == 0
    long = prove.choose_checked(["x" * 1000] * 100_000, 5, 0)
    assert len(long) == 100


def test_special_tokens_around_a_document(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, processors

    write_tokenizer(tmp_path, "gpt2")
    model = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    end = model.token_to_id(END)
    model.post_processor = processors.TemplateProcessing(
        single=f"{END} {END} $A {END}", special_tokens=[(END, end)]
    )
    model.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    texts = ["one text", "", "another"]
    plain = Engine(tokenizer).encode(texts)
    found = surround(plain, *find_added(tokenizer, bos=False, special=True))
    expected = [model.encode(text).ids for text in texts]
    assert found.ids.tolist() == [i for each in expected for i in each]
    assert found.counts.tolist() == list(map(len, expected))
    begun = surround(plain, *find_added(tokenizer, bos=True, special=False))
    assert begun.counts.tolist() == (plain.counts + 1).tolist()
    assert begun.ids[0] == end
    assert surround(plain, *find_added(tokenizer, bos=False, special=False)) is plain


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": 3}'])
def test_what_is_no_tokenizer(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(
        ConfigError, match=r"tokenizer.json: is not a tokenizer.json .*; write one with"
    ):
        load_tokenizer(str(tmp_path))


def test_what_tokenizers_refuses(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, "gpt2", _set("pre_tokenizer", "type", value="Other"))
    with pytest.raises(ConfigError, match=r"tokenizer.json: cannot be read by tokenizers [0-9.]+ "):
        Engine(tokenizer)


def test_gemma_and_metaspace_are_listed() -> None:
    model = {"type": "BPE", "byte_fallback": True, "vocab": {}, "merges": []}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    gemma = {
        "type": "Split",
        "pattern": {"String": " "},
        "behavior": "MergedWithPrevious",
        "invert": False,
    }
    assert is_listed({"model": model, "normalizer": replace, "pre_tokenizer": gemma})
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    assert is_listed({"model": model, "normalizer": None, "pre_tokenizer": space})
    assert not is_listed({"model": model, "normalizer": None, "pre_tokenizer": None})
    assert not is_listed({"model": model, "normalizer": {"type": "NFKC"}, "pre_tokenizer": space})
