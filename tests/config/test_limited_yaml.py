"""A few bytes of YAML can ask for a deep stack (libyaml's own composer overflows the machine's) or for all memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megablend.config import load_config
from megablend.config.limited_yaml import LOADER, MAX_DEPTH, MAX_REPEATED, parse_document
from megablend.errors import ConfigError

START = "cache: c\nsequence_length: 5\n"


def bomb(first: str, line: str, lines: int) -> str:
    """Each line repeats the one before ten times."""
    rest = [
        line.format(name=chr(98 + i), refs=", ".join([f"*{chr(97 + i)}"] * 10))
        for i in range(lines)
    ]
    return "\n".join([f"a: &a {first}", *rest])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: " + "[" * 1_000_000, f"nested more than {MAX_DEPTH} deep"),
        ("a: " + "[" * 3000 + "]" * 3000, f"nested more than {MAX_DEPTH} deep"),
        ("- " * 100_000, f"nested more than {MAX_DEPTH} deep"),
        ("{a: " * 100 + "1" + "}" * 100, f"nested more than {MAX_DEPTH} deep"),
        (
            bomb("[1, 2]", "{name}: &{name} [{refs}]", 12),
            f"aliases expand to more than {MAX_REPEATED:,} values",
        ),
        (
            bomb("{k: 1}", "{name}: &{name} {{<<: [{refs}]}}", 12),
            f"aliases expand to more than {MAX_REPEATED:,} values",
        ),
        ("a: &a [1, *a]", r"\*a refers to itself"),
        ("a: &a {b: *a}", r"\*a refers to itself"),
        ("a: *nothing", r"\*nothing refers to itself, or to an anchor that does not exist"),
        ("a: !!timestamp abc", "does not match its tag"),
        ("a: !!bool abc", "does not match its tag"),
        ("? [a]\n: b", "unhashable key"),
        ("a: !!python/object/apply:os.system [x]", "could not determine a constructor"),
        ("a: " + "9" * 100_000, r"the limit \(4300\b"),
    ],
    ids=lambda value: value[:12],
)
def test_hostile_yaml_is_refused_at_once(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "demo.yaml").write_text(text)
    with pytest.raises(
        ConfigError, match=rf"^{tmp_path}/demo\.yaml(:\d+)?: not valid YAML: .*{says}"
    ):
        load_config(tmp_path / "demo.yaml")


def test_deep_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "demo.json").write_text('{"a": ' * 5000 + "1" + "}" * 5000)
    with pytest.raises(
        ConfigError, match=rf"demo\.json:1: not valid JSON: .*more than {MAX_DEPTH} deep"
    ):
        load_config(tmp_path / "demo.json")


def test_a_config_too_large(tmp_path: Path) -> None:
    with (tmp_path / "demo.yaml").open("wb") as file:
        file.truncate((64 << 20) + 1)
    says = r"demo\.yaml: cannot read the config: larger than the limit of 67,108,864 bytes"
    with pytest.raises(ConfigError, match=says):
        load_config(tmp_path / "demo.yaml")


def test_anchors_and_merges_serve(tmp_path: Path) -> None:
    text = f"{START}samples: 3\nsources:\n- &one {{name: a, path: a.arrow, weight: 1}}\n- <<: *one\n  name: b\n"
    (tmp_path / "demo.yaml").write_text(text)
    one, two = load_config(tmp_path / "demo.yaml").all_sources.values()
    assert (one.name, two.name) == ("a", "b")
    assert (one.path, one.weight) == (two.path, two.weight)


def test_as_deep_as_may_be() -> None:
    text = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert str(parse_document(text).data) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing",
        "a: 1\nb: [1, 2.5, ~, yes, 'yes', \"1\", 0x1f, 1e3, 1_000, 2020-01-02]\nc: {d: [], e: {}}\n",
        "- a: [x, y]\n  b: |\n    lines\n    of text\n- 3\n- - 4\n  - 5\n",
        "1: a\n2.5: b\ntrue: c\n~: d\n'4': e",
        '{"a": [1, {"b": null}], "c": "\\u00e9"}',
        "a: &x {k: 1}\nb: *x\nc: {<<: *x, l: 2}\n",
        "a: &x [1]\nb: [*x, *x]\n",
        "a: !!str 12\nb: !!set {c}\n",
        "'=': 1\n",
        "a: =\n",
        "a: <<\n",
    ],
)
def test_values_are_those_of_pyyaml(text: str) -> None:
    try:
        expected = yaml.load(text, Loader=LOADER)
    except yaml.YAMLError as error:
        with pytest.raises(type(error)):
            parse_document(text)
        return
    document = parse_document(text)
    assert repr(document.data) == repr(expected)
    assert document.duplicates == []


@pytest.mark.parametrize("unusual", ["", "z: &x 1\ny: *x\n"], ids=["one pass", "by PyYAML"])
def test_lines_and_duplicates(unusual: str) -> None:
    text = f"a: 1\nb:\n- c: 2\n  d: 3\n  c: 4\n- [5,\n  6]\na: 7\n{unusual}"
    document = parse_document(text)
    assert sorted(document.duplicates) == [("a", 8), ("c", 5)]
    lines = document.lines
    assert isinstance(lines, dict)
    assert (lines["a"], lines["b"][0]) == ((0, None), 1)
    assert lines["b"][1] == [(2, {"c": (2, None), "d": (3, None)}), (5, [(5, None), (6, None)])]


@pytest.mark.parametrize("unusual", ["", "z: &x 1\ny: *x\n"], ids=["one pass", "by PyYAML"])
def test_numbers_that_are_not_decimal_are_refused(unusual: str) -> None:
    for text, number in {"0400": 256, "-017": -15, "1:30": 90, "0": 0, "400": 400}.items():
        document = f"{unusual}a: [{text}]\n"
        if text == str(number):
            assert parse_document(document).data["a"] == [number]
            continue
        with pytest.raises(yaml.YAMLError, match=f"YAML reads {text} as the number {number}"):
            parse_document(document)
    for text in ("'0400'", "0x1f", "0o17", "0.5", "08", "01.5", "1:x", "2026-01-02", "a:0400"):
        document = f"{unusual}a: [{text}]\n"
        assert parse_document(document).data["a"] == yaml.safe_load(f"[{text}]")


def test_several_documents_are_refused() -> None:
    with pytest.raises(yaml.YAMLError, match="expected a single document"):
        parse_document("a: 1\n---\nb: 2\n")
