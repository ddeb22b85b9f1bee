from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets.utils import get_blend_from_list

from megablend.errors import ConfigError
from megablend.megatron.request.flags import blend_from_words, read_blends, read_words
from tests.examples import examples

PREFIXES = st.lists(st.sampled_from(["/a", " /b ", "c_text", "d.e/f"]), min_size=1, max_size=6)
WEIGHTS = st.sampled_from(["1", "0.3", "1e-9", "70", "0", "-1", "inf"])


@examples(100)
@given(PREFIXES, st.booleans(), st.data())
def test_reads_what_megatron_reads(
    prefixes: list[str], weighted: bool, data: st.DataObject
) -> None:
    words = [
        word
        for prefix in prefixes
        for word in ([data.draw(WEIGHTS), prefix] if weighted else [prefix])
    ]
    blend = blend_from_words(words, place="--data-path")
    expected = get_blend_from_list(words)
    assert expected == (
        list(blend.prefixes),
        None if blend.weights is None else list(blend.weights),
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], r"--data-path: a blend has no prefixes"),
        (["30", "a", "b"], r"word 3 of 3 is 'b'; expected a weight"),
        (["30", "a", "70"], r"word 4 of 3 is the end; expected a weight before each prefix"),
        (["a", "30", "b", "70"], r"word 1 of 4 is 'a'"),
        (["30", "a", "b", "c"], r"word 3 of 4 is 'b'"),
        (["30", "70"], r"word 2 of 2 is '70'"),
        (["a.bin"], r"a\.bin: Megatron adds \.bin and \.idx itself"),
        (["msc://profile/a"], r"msc://profile/a: msc:// is not supported: use the bucket's s3://"),
        (["hf://user/data"], r"hf://user/data: hf:// is not supported: download the dataset once"),
    ],
)
def test_lists_that_megatron_would_misread_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        blend_from_words(words, place="--data-path")


def test_a_blend_holds_as_many_datasets_as_16_bits_number() -> None:
    assert len(blend_from_words(["a"] * 32_766, place="x").prefixes) == 32_766
    with pytest.raises(
        ConfigError,
        match=r"32,767 prefixes, but Megatron allows at most 32,766",
    ):
        blend_from_words(["a"] * 32_767, place="x")


def test_words_and_blends_from_files(tmp_path: Path) -> None:
    file = tmp_path / "words"
    file.write_text("0.3 /a\n 0.7\t/b\n")
    assert read_words(str(file)) == ["0.3", "/a", "0.7", "/b"]
    file.write_text(json.dumps({"train": ["1", "/a", 2, "/b"], "valid": "/c /d", "test": None}))
    train, valid, test = read_blends(str(file))
    assert train is not None
    assert valid is not None
    assert test is None
    assert (train.prefixes, train.weights) == (("/a", "/b"), (1.0, 2.0))
    assert (valid.prefixes, valid.weights) == (("/c", "/d"), None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"invalid JSON"),
        ("[]", r"expected an object with the keys train, valid and test"),
        ('{"train": [], "valid": null}', r"expected an object with the keys"),
        ('{"train": 3, "valid": null, "test": null}', r"train: found 3; expected a list of words"),
        ('{"train": ["a", "1"], "valid": null, "test": null}', r"train: word 1 of 2 is 'a'"),
    ],
)
def test_files_of_blends_that_are_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "blends.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_blends(str(file))
    with pytest.raises(ConfigError, match=r"nowhere: cannot be read"):
        read_words(str(tmp_path / "nowhere"))
