"""The config: what is taken, and a one-line complaint for everything else."""

import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from megablend.config import load_config
from megablend.config.complaints import join_keys
from megablend.errors import ConfigError

YAML = """\
cache: cache
run: demo
sequence_length: 2048
seed: 1234
samples: 9000              # of train
split: 95,5,0
order: block
lanes: 8
shuffle_window: 64
sources:
  - {name: stdlib, path: data/stdlib/*.parquet, column: input_ids, weight: 0.5, append_eod: 0}
  - {name: docs, path: data/docs_text_document, weight: 0.3, max_epochs: 4}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "demo.yaml"
    path.write_text(text)
    return path


def test_the_shape_that_is_documented(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, YAML))
    assert config.cache == str(tmp_path / "cache")
    assert config.shares == (Fraction(19, 20), Fraction(1, 20), Fraction(0))
    stdlib, docs = config.sources["train"]
    assert stdlib.path == (str(tmp_path / "data/stdlib/*.parquet"),)
    assert (stdlib.weight, docs.weight, docs.max_epochs) == (
        Fraction(1, 2),
        Fraction(3, 10),
        Fraction(4),
    )
    assert (stdlib.append_eod, docs.append_eod) == (0, None)


def test_json_and_a_dict_are_the_same_config(tmp_path: Path) -> None:
    data: dict[str, Any] = {
        "cache": "c",
        "sequence_length": 8,
        "samples": 5,
        "sources": [{"name": "a", "path": "/data/a.arrow"}],
    }
    path = tmp_path / "run.json"
    path.write_text(json.dumps(data))
    from_dict = load_config(data)
    assert from_dict.cache == str(Path.cwd() / "c")
    assert load_config(path).model_dump() == from_dict.model_dump() | {"cache": str(tmp_path / "c")}
    assert [load_config(given).sources["train"][0].place for given in (path, data)] == [
        f"{path}:1: sources[0]",
        "config: sources[0]",
    ]


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("0.1", Fraction(1, 10)),
        ("1e-9", Fraction(1, 10**9)),
        ("1.0e-9", Fraction(1, 10**9)),
        ("3", Fraction(3)),
        ("1_000", 1000),
    ],
)
def test_numbers_are_kept_as_written(tmp_path: Path, written: str, value: Fraction) -> None:
    config = load_config(write(tmp_path, YAML.replace("weight: 0.5", f"weight: {written}")))
    assert config.sources["train"][0].weight == value


def test_counts_may_be_written_short(tmp_path: Path) -> None:
    assert (
        load_config(write(tmp_path, YAML.replace("samples: 9000", "tokens: 1e12"))).tokens == 10**12
    )


def test_a_list_for_each_split(tmp_path: Path) -> None:
    text = (
        YAML[: YAML.index("split")]
        + "sources:\n  train: [{name: web, path: a.arrow}]\n  valid: [{name: web, path: b.arrow}]\n"
    )
    config = load_config(write(tmp_path, text))
    assert list(config.all_sources) == ["train/web", "valid/web"]
    assert list(config.sources_of("test")) == []


BAD = [
    # (replaced, by, line, key, what the complaint says)
    ("weight: 0.5", "wieght: 0.5", 11, "sources[0].wieght", "unknown key; did you mean 'weight'?"),
    ("seed: 1234", "sed: 1234", 4, "sed", "unknown key; did you mean 'seed'?"),
    ("seed: 1234", "seed: many", 4, "seed", "found 'many'"),
    (
        "seed: 1234",
        f"seed: {'many' * 50}",
        4,
        "seed",
        f"found '{'many' * 19}man..., expected a whole number",
    ),
    ("weight: 0.5", "weight: -1", 11, "sources[0].weight", "found -1, expected 0 or more"),
    ("weight: 0.5", "weight: .nan", 11, "sources[0].weight", "found nan, expected a finite number"),
    ("weight: 0.5", "weight: .inf", 11, "sources[0].weight", "found inf, expected a finite number"),
    (
        "weight: 0.5",
        "weight: half",
        11,
        "sources[0].weight",
        "found 'half', expected a finite number",
    ),
    (
        "weight: 0.5",
        "weight: true",
        11,
        "sources[0].weight",
        "found True, expected a finite number",
    ),
    (
        "weight: 0.5",
        "tokens: 1e9",
        12,
        "sources[1]",
        "mixed units ('stdlib' tokens, 'docs' weight)",
    ),
    (
        "weight: 0.5",
        "weight: 0.5, tokens: 5",
        11,
        "sources[0]",
        "source 'stdlib' has weight and tokens",
    ),
    (
        "weight: 0.5, ",
        "",
        11,
        "sources[0]",
        "'stdlib' has no share; expected exactly one of weight, tokens, samples, epochs",
    ),
    ("weight: 0.5", "weight: 0.5, weight: 2", 11, "weight", "duplicate key; keep one"),
    (
        "max_epochs: 4",
        "max_epochs: 0",
        12,
        "sources[1].max_epochs",
        "found 0, expected more than 0",
    ),
    (
        "append_eod: 0",
        "append_eod: -1",
        11,
        "sources[0].append_eod",
        "found -1, expected a token id",
    ),
    ("name: docs", "name: stdlib", 10, "sources", "two sources of train are named 'stdlib'"),
    ("samples: 9000", "samples: 9000\ntokens: 5", 6, "tokens", "already set by samples"),
    ("samples: 9000", "samples: 0", 5, "samples", "found 0, expected more than 0"),
    ("samples: 9000", "samples: 1.5", 5, "samples", "found 1.5, expected a whole number"),
    (
        "order: block",
        "order: blcok",
        7,
        "order",
        "found 'blcok', expected 'block', 'document' or 'sequential'; did you mean 'block'?",
    ),
    ("samples: 9000", "samples: -5", 5, "samples", "found -5, expected more than 0"),
    ("split: 95,5,0", "split: 95,x", 6, "split", "found 'x', expected a finite number"),
    ("split: 95,5,0", "split: 0,0,0", 6, "split", "not all 0"),
    ("split: 95,5,0", "split: 1,2,3,4", 6, "split", "up to three numbers"),
    ("lanes: 8", "lanes: 0", 8, "lanes", "found 0, expected 1 or more"),
    (
        "max_epochs: 4",
        "extra_columns: mask",
        12,
        "sources[1].extra_columns",
        "found 'mask', expected a list",
    ),
    ("cache: cache", "cache: ''", 1, "cache", "found '', expected a path"),
    (
        "data/docs_text",
        "file:///data/docs",
        12,
        "sources[1].path",
        "write it as a plain path: `/data/docs_document`",
    ),
    (
        "cache: cache",
        "cache: http://host/c",
        1,
        "cache",
        "web servers are read-only; expected a folder, or a prefix such as",
    ),
    (
        "data/docs_text",
        "hf://user/docs",
        12,
        "sources[1].path",
        "hf:// is not supported: download the dataset once",
    ),
    ("run: demo", "run: ../demo", 2, "run", "found '../demo'"),
    (
        "samples: 9000",
        "tokens: 50B",
        5,
        "tokens",
        "found '50B', expected a finite number such as 50e9 or 1_000 (0, or from 1e-100 to 1e100)",
    ),
    (
        "samples: 9000",
        "tokens: /shared/tokens",
        5,
        "tokens",
        "1e100); the folder for token files is `token_files`",
    ),
    (
        "samples: 9000",
        "samples: 1,000,000",
        5,
        "samples",
        "found '1,000,000', expected a finite number",
    ),
    (
        "seed: 1234",
        "train_iters: 5",
        4,
        "train_iters",
        "set the length of the run with `samples`: steps x global batch",
    ),
    ("max_epochs: 4", "text_column: text", 12, "sources[1].text_column", "did you mean 'column'?"),
    (
        "seed: 1234",
        "batch_size: 8",
        4,
        "batch_size",
        "unknown key; batches are not part of the data: pass `micro_batch_size=",
    ),
    (
        "seed: 1234",
        "global_batch_size: 8",
        4,
        "global_batch_size",
        "the training loop sets it (micro batch x data-parallel size",
    ),
    (
        "max_epochs: 4",
        "text: text",
        None,
        "tokenizer",
        "missing; source 'docs' is text: give the path of a",
    ),
    (
        "max_epochs: 4",
        "tokenizer: gpt2",
        12,
        "sources[1].tokenizer",
        "all text sources share the top-level `tokenizer`",
    ),
    (
        "max_epochs: 4",
        "on_bad_document: skip",
        12,
        "sources[1].on_bad_document",
        "unknown key; it belongs at the top level, and applies to all text sources",
    ),
    ("max_epochs: 4", "key: id", 12, "sources[1]", "so key does not apply; remove key, or set"),
    (
        "max_epochs: 4",
        "text: a, column: b",
        12,
        "sources[1]",
        "source 'docs' is tokenised from text, so column does not apply; remove column",
    ),
    (
        "max_epochs: 4",
        "text: a, key: a.b",
        12,
        "sources[1]",
        "'a' and 'a.b', one of which contains the other",
    ),
    (
        "max_epochs: 4",
        "text: a, bos: true, add_special_tokens: true",
        12,
        "sources[1]",
        "sets both bos and add_special_tokens, which may add the same token; keep only one",
    ),
    ("seed: 1234", "max_bad: -1", 4, "max_bad", "found -1, expected 0 or more"),
    (
        "seed: 1234",
        "shuffle: true",
        4,
        "shuffle",
        "runs are always shuffled, unless `order: sequential`",
    ),
    ("seed: 1234", "colour: red", 4, "colour", "unknown key; docs/configuration.md lists the keys"),
    ("run: demo", f"run: {'x' * 101}", 2, "run", "expected at most 100 letters, digits"),
    (
        "weight: 0.5",
        "weight: 1e999999999",
        11,
        "sources[0].weight",
        "found '1e999999999', expected a finite number",
    ),
    (
        "weight: 0.5",
        "weight: 1e-999999999",
        11,
        "sources[0].weight",
        "found '1e-999999999', expected a finite number",
    ),
    ("samples: 9000", "samples: 1e30", 5, "samples", "found '1e30', expected at most 2^62"),
    (
        "samples: 9000",
        "samples: 9\ntest_samples: 5",
        6,
        "test_samples",
        "there is no test split; give it a share in `split`",
    ),
    (
        "seed: 1234",
        "eod_mask_loss: true",
        None,
        "eod_token",
        "eod_mask_loss needs to know the end-of-document token, and the sources append different ones (0, none)",
    ),
]


def test_only_the_first_problems_of_many_are_listed(tmp_path: Path) -> None:
    config = {"cache": "c", "sequence_length": 8, "samples": 8, "sources": []} | {
        f"key{i}": i for i in range(100_000)
    }
    with pytest.raises(ConfigError, match=r": 99,98\d more problems; fix these first") as caught:
        load_config(config)
    assert len(str(caught.value)) < 4000


@pytest.mark.parametrize(
    ("old", "new", "line", "key", "says"),
    BAD,
    ids=[f"{key}:{new[:20]}" for _, new, _, key, _ in BAD],
)
def test_complaints_are_one_line_with_the_place(
    tmp_path: Path, old: str, new: str, line: int | None, key: str, says: str
) -> None:
    path = write(tmp_path, YAML.replace(old, new, 1))
    place = f"{path}:{line}: {key}: " if line else f"{path}: {key}: "
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        load_config(path)
    assert str(caught.value).startswith(place)
    assert "\n" not in str(caught.value)


def test_a_source_of_a_split_is_named_with_its_line(tmp_path: Path) -> None:
    text = (
        YAML[: YAML.index("split")]
        + "sources:\n  train:\n    - {name: web, path: a.arrow}\n  valid:\n    - {name: a, path: a.arrow, weight: 1}\n"
        + "    - {name: b, path: b.arrow, tokens: 1}\nvalid_samples: 9\n"
    )
    path = write(tmp_path, text)
    line = 1 + path.read_text().splitlines().index("    - {name: b, path: b.arrow, tokens: 1}")
    with pytest.raises(
        ConfigError,
        match=rf"demo\.yaml:{line}: sources\.valid\[1\]: mixed units \('a' weight, 'b' tokens",
    ):
        load_config(path)


def test_all_weights_zero(tmp_path: Path) -> None:
    path = write(
        tmp_path, YAML.replace("weight: 0.5", "weight: 0").replace("weight: 0.3", "weight: 0.0")
    )
    with pytest.raises(
        ConfigError,
        match="sources: `weight` is 0 for every source of train; expected at least one above 0",
    ):
        load_config(path)


def test_weights_without_a_length(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match="weights do not say how many samples the run has: add samples, tokens or epochs",
    ):
        load_config(write(tmp_path, YAML.replace("samples: 9000", "")))


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        (
            "  web: {path: a, weight: 1}\n  code: {path: b, weight: 2}\n",
            "'web', 'code', expected a list of sources; .* `- name: web`",
        ),
        (
            "  path: a\n  weight: 1\n",
            "'path', 'weight', expected a list of sources; .* `- path: ...`",
        ),
        ("  a: x\n  b: x\n  c: x\n  d: x\n", "'a', 'b', 'c', ..., expected a list"),
    ],
)
def test_sources_as_a_mapping(tmp_path: Path, sources: str, expected: str) -> None:
    """One line that says how to write a list, not one for each key."""
    with pytest.raises(ConfigError, match=f"^[^\n]*:6: sources: found {expected}[^\n]*$"):
        load_config(write(tmp_path, YAML[: YAML.index("split")] + "sources:\n" + sources))


def test_splits_that_are_not_there(tmp_path: Path) -> None:
    head = YAML[: YAML.index("split")]
    with pytest.raises(
        ConfigError, match=r"12: sources\.validation: found .* did you mean 'valid'\?$"
    ):
        load_config(
            write(
                tmp_path,
                head + "sources:\n  train: [{name: a, path: a}]\n\n\n\n\n  validation: []\n",
            )
        )
    with pytest.raises(ConfigError, match="valid_samples: there is no valid"):
        load_config(
            write(
                tmp_path,
                head + "valid_samples: 5\nsources: {train: [{name: a, path: a}], valid: []}\n",
            )
        )


def test_a_cache_of_an_object_store(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="--cache: s3://bucket: names a whole bucket; expected a folder"
    ):
        load_config(write(tmp_path, YAML), cache="s3://bucket")
    with pytest.raises(ConfigError, match="--cache: s3://u:80/c: found 'u:80' as the bucket"):
        load_config(write(tmp_path, YAML), cache="s3://u:80/c")
    for key in ("a//b", "../x", "a/.", "a\tb"):
        with pytest.raises(
            ConfigError,
            match=r"--cache: s3://bucket/\S+: its key (has an empty|contains).*; expected a folder, or a prefix",
        ):
            load_config(write(tmp_path, YAML), cache=f"s3://bucket/{key}")
    loaded = load_config(write(tmp_path, YAML), cache="s3://bucket/caches/c/")
    assert loaded.cache == loaded.cache_store.location == "s3://bucket/caches/c"


def test_paths_may_be_paths(tmp_path: Path) -> None:
    source: dict[str, Any] = {"name": "a", "path": tmp_path / "*.arrow"}
    several = {"name": "b", "path": [tmp_path / "b.arrow", "c.arrow"]}
    data = {
        "cache": tmp_path,
        "sequence_length": 8,
        "samples": 5,
        "sources": {"train": [source], "valid": [several]},
    }
    config = load_config(data)
    assert config.cache == str(tmp_path)
    assert config.sources["train"][0].path == (f"{tmp_path}/*.arrow",)
    assert config.sources["valid"][0].path == (f"{tmp_path}/b.arrow", str(Path.cwd() / "c.arrow"))


def test_json_with_tabs(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    data = {
        "cache": "c",
        "sequence_length": 8,
        "samples": 5,
        "sources": [{"name": "a", "path": "a.arrow"}],
    }
    path.write_text(json.dumps(data, indent="\t"))
    assert load_config(path).sequence_length == 8


def test_json_with_pairs_of_escapes(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    names = ["😀.arrow", 'é\U0010ffff\n"x".arrow', "\\ud83d\\ude00.arrow"]
    source = {"name": "a", "path": names}
    data = {"cache": "c", "sequence_length": 8, "samples": 5, "sources": [source]}
    path.write_text(json.dumps(data))
    found = load_config(path).sources["train"][0].path
    assert found == tuple(f"{tmp_path}/{name}" for name in names)


@pytest.mark.parametrize("key", ["samples", "seed", "lanes"])
def test_a_number_too_long_to_be_written(tmp_path: Path, key: str) -> None:
    path = tmp_path / "run.yaml"
    number = f"-0x{'f' * 9000}"
    path.write_text(
        f"cache: c\nsequence_length: 8\n{key}: {number}\nsources: [{{name: a, path: b}}]\n"
    )
    with pytest.raises(ConfigError, match=rf"run\.yaml:3: {key}: "):
        load_config(path)


def test_json_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text('{"cache": ')
    with pytest.raises(ConfigError, match=r"run\.json:2: not valid JSON: "):
        load_config(path)


def test_sources_of_a_split_are_a_list() -> None:
    with pytest.raises(ConfigError, match=r"config: sources\.valid: found \{.*\}, expected a list"):
        load_config(
            MINIMAL
            | {"sources": {"train": MINIMAL["sources"], "valid": {"name": "b", "path": "b.arrow"}}}
        )


def test_a_path_with_a_nul() -> None:
    with pytest.raises(
        ConfigError,
        match=r"config: sources\[0\]\.path: found 'a\\x00b', which contains a NUL character; remove it",
    ):
        load_config(MINIMAL | {"sources": [{"name": "a", "path": "a\0b"}]})


def test_an_alias_of_itself(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.yaml:3: not valid YAML: \*a refers to itself"):
        load_config(write(tmp_path, "cache: c\nsequence_length: 5\nsources: &a [*a]\n"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "found nothing, expected keys"),
        ("- a", "found list, expected keys"),
        ("a: [", "not valid YAML"),
        ("a: b: c", "2?1: not valid YAML"),
        ("sources: {}\ncache: c\nsequence_length: 5", "found no source for train"),
    ],
)
def test_what_is_no_config(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(write(tmp_path, text))


def test_a_config_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot read the config: No such file"):
        load_config(tmp_path / "nowhere.yaml")


def test_binary_config(tmp_path: Path) -> None:
    path = tmp_path / "demo.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load_config(path)


MINIMAL = {
    "cache": "c",
    "sequence_length": 8,
    "samples": 5,
    "sources": [{"name": "a", "path": "/data/a.arrow"}],
}


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("512MiB", 512 << 20),
        ("1.5 GB", 1_500_000_000),
        (4096, 4096),
        ("2e6", 2_000_000),
        ("1KiB", 1024),
    ],
)
def test_memory_is_a_size(written: object, size: int) -> None:
    assert load_config(MINIMAL | {"memory": written}).memory == size


@pytest.mark.parametrize("written", ["much", "5 apples", "-1MiB", True, "0"])
def test_memory_that_is_no_size(written: object) -> None:
    with pytest.raises(
        ConfigError, match=r"memory: found .*, expected (a size such as 512MiB|more than 0)"
    ):
        load_config(MINIMAL | {"memory": written})


@pytest.mark.parametrize("value", [None, 5, True, "text", ["a"]])
@pytest.mark.parametrize(
    ("at", "expected"),
    [
        (("warnings",), "expected keys such as max_epochs and min_source_samples"),
        (("storage",), "expected URL prefixes, each with its settings"),
        (("storage", "s3://b/"), "expected settings such as `endpoint: https://...`"),
        (("sources", 0), "expected keys such as name, path and weight"),
        (("sources", 0, "format_options"), "expected keys with values"),
        (("stages", 0), "expected keys such as samples, lanes and sources"),
        (
            ("stages", 0, "sources"),
            "expected the changes for each source, as in `sources: {web: {weight: 2}}`",
        ),
        (("stages", 0, "sources", "web"), "expected keys such as weight and max_epochs"),
    ],
)
def test_what_keys_are_expected_is_said(
    at: tuple[str | int, ...], expected: str, value: object
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(put({"stages": [{"samples": 64, "sources": {}}], "storage": {}}, at, value))
    found = "a list" if value == ["a"] and at[-1] == "sources" else repr(value)
    assert str(refused.value).startswith(
        f"config: {join_keys([key for key in at if key != 's3://b/'])}: "
    )
    assert str(refused.value).endswith(f"found {found}, {expected}")


@pytest.mark.parametrize(
    ("at", "value", "said"),
    [
        (
            ("warnings", "max_epoch"),
            3,
            "warnings.max_epoch: unknown key; did you mean 'max_epochs'?",
        ),
        (
            ("warnings", "x"),
            3,
            "warnings.x: unknown key; known keys: max_epochs, min_source_samples, max_read_amplification",
        ),
        (
            ("sources", 0, "format_options", "dtype"),
            {"x": 1},
            "sources[0].format_options.dtype: found {'x': 1}, expected text, a number, true, false or null",
        ),
        (("sources",), {"train": 5}, "sources: found 5, expected a list"),
        (("sources",), {"train": "text", "valid": None}, "sources: found 'text', expected a list"),
    ],
)
def test_keys_and_values_at_their_place(
    at: tuple[str | int, ...], value: object, said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(put({"warnings": {}}, at, value))
    assert str(refused.value).splitlines()[0] == f"config: {said}"


@pytest.mark.parametrize("key", ["cache", "local_cache", "vocab_size"])
def test_a_path_that_cannot_be_is_told_with_its_key(tmp_path: Path, key: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(put({}, (key,), "file:///x")))
    with pytest.raises(
        ConfigError, match=rf"config\.json:1: {key}: found 'file:///x'; write it as"
    ):
        load_config(path)


def put(settings: dict[str, Any], at: tuple[str | int, ...], value: object) -> dict[str, Any]:
    """A config with these settings and a value at this place."""
    source = {"name": "web", "path": "/w.arrow", "weight": 1, "format_options": {}}
    config: Any = {"cache": "c", "sequence_length": 8, "sources": [source], **settings}
    if "stages" not in settings:
        config["samples"] = 9
    inner = config
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    return dict(config)


def test_a_cache_in_an_object_store_whose_slash_pathlib_took_is_no_folder() -> None:
    config = {
        "cache": Path("s3://bucket/cache"),
        "sequence_length": 8,
        "samples": 8,
        "sources": [{"name": "a", "path": "a.parquet", "weight": 1}],
    }
    with pytest.raises(ConfigError, match=r"cache: found 's3:/bucket/cache', expected s3://bucket"):
        load_config(config)


@pytest.mark.parametrize("weight", [1e-300, "1e-300", 1e300])
def test_the_message_on_a_number_out_of_range_has_the_range(weight: float | str) -> None:
    config = {
        "cache": "cache",
        "sequence_length": 8,
        "samples": 8,
        "sources": [{"name": "a", "path": "a.parquet", "weight": weight}],
    }
    with pytest.raises(
        ConfigError, match=r"expected a finite number .* \(0, or from 1e-100 to 1e100\)"
    ):
        load_config(config)
