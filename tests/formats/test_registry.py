"""Formats of other packages, and formats that a source names."""

from __future__ import annotations

import importlib.metadata
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from unittest import mock

import pytest

import megablend
from megablend.config.read_spec import OptionValue, ReadSpec
from megablend.errors import ConfigError, PlanError
from megablend.formats import FORMATS, find_format, format_of, get_format
from megablend.formats.arrow.reader import ArrowFormat
from megablend.formats.base import FileIndex, Format
from megablend.formats.registry import list_names, list_suffixes
from megablend.storage.base import Storage
from tests.runs import documents, make_config, write_source
from tests.storages import STORAGE


class Tokens(ArrowFormat):
    """Arrow files by another suffix, with an option."""

    name = "tokens"
    suffixes: Sequence[str] = (".tokens",)

    def check_options(self, options: Mapping[str, OptionValue]) -> None:
        if unknown := set(options) - {"column"}:
            raise ValueError(f"found option {min(unknown)!r}, expected column")

    def index(self, path: str, read: ReadSpec, *, storage: Storage) -> FileIndex:
        assert read.format == "tokens"
        return super().index(path, ReadSpec(column=read.option("column")), storage=storage)


TOKENS: Format = Tokens()


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package whose entry point names `TOKENS`, and broken ones."""
    group = "megablend.formats"
    entries = importlib.metadata.EntryPoints(
        importlib.metadata.EntryPoint(name, value, group)
        for name, value in {
            "tokens": f"{__name__}:TOKENS",
            "broken": "no_such_module:FORMAT",
            "misnamed": f"{__name__}:TOKENS",
            "underived": f"{__name__}:Tokens",
        }.items()
    )
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda **chosen: entries.select(**chosen)
    )
    with mock.patch.dict(FORMATS):
        yield


def test_a_format_of_another_package_is_found_by_name(packages: None) -> None:
    assert find_format("tokens") is get_format("tokens") is TOKENS
    assert find_format("token") is None
    assert list_names() == [
        "parquet",
        "arrow",
        "arrow-stream",
        "megatron",
        "raw",
        "tokens",
        "broken",
        "misnamed",
        "underived",
    ]
    with pytest.raises(
        ConfigError,
        match=r"unknown format 'token'; did you mean 'tokens'\? known: parquet, arrow, ",
    ):
        get_format("token")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("broken", "ModuleNotFoundError"),
        ("misnamed", "its name is 'tokens'"),
        ("underived", "subclass of BaseFormat"),
    ],
)
def test_a_format_that_cannot_be_loaded_is_named(packages: None, name: str, problem: str) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"format '{name}': '.*' cannot be loaded \(.*{problem}.*\); fix the package",
    ):
        get_format(name)


def test_a_format_of_another_package_is_found_by_its_suffix(
    packages: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    only = importlib.metadata.EntryPoints(
        [importlib.metadata.EntryPoint("tokens", f"{__name__}:TOKENS", "megablend.formats")]
    )
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **chosen: only.select(**chosen))
    assert format_of("data/x.tokens", STORAGE) is TOKENS
    assert ".tokens" in list_suffixes()


def renamed(source: dict[str, object], folder: Path, suffix: str) -> dict[str, object]:
    """A source of Arrow files, whose files have another suffix now."""
    shutil.copytree(Path(str(source["path"])).parent, folder)
    for path in folder.iterdir():
        path.rename(path.with_suffix(suffix))
    return {**source, "path": f"{folder}/*{suffix}"}


def test_a_run_over_another_packages_format_has_the_same_samples(
    tmp_path: Path, packages: None
) -> None:
    source = write_source(tmp_path, 0, "arrow", documents(0, 60, 20, seed=1)) | {"weight": 1}
    column = source.pop("column", None)
    plain = make_config(tmp_path, [source], samples=12, cache=str(tmp_path / "plain"))
    given = renamed(source, tmp_path / "renamed", ".tokens") | {"format": "tokens"}
    options = {} if column is None else {"column": column}
    other = make_config(
        tmp_path, [given | {"format_options": options}], samples=12, cache=str(tmp_path / "other")
    )
    megablend.build(plain), megablend.build(other)
    a = megablend.open(plain)
    b = megablend.open(other)
    assert all(a[k]["tokens"].equal(b[k]["tokens"]) for k in range(12))
    assert megablend.describe(other).to_dict()["index"]["sources"][0]["format"] == "tokens"
    assert megablend.verify(other["cache"], data=True).problems == ()
    with pytest.raises(
        ConfigError,
        match=r"source 's0': format_options of tokens: found option 'rows', expected column",
    ):
        megablend.build(
            make_config(tmp_path, [given | {"format_options": {"rows": 3}}], samples=12)
        )


def test_a_source_names_its_format(tmp_path: Path) -> None:
    source = write_source(tmp_path, 0, "arrow", documents(0, 60, 20, seed=1)) | {"weight": 1}
    given = renamed(source, tmp_path / "renamed", ".data")
    with pytest.raises(
        ConfigError,
        match=r"unknown kind of file; set `format` to one of parquet, arrow, arrow-stream, megatron",
    ):
        megablend.build(make_config(tmp_path, [given], samples=12))
    config = make_config(tmp_path, [given | {"format": "arrow"}], samples=12)
    megablend.build(config)
    plain = make_config(tmp_path, [source], samples=12, cache=str(tmp_path / "plain"))
    megablend.build(plain)
    assert all(
        megablend.open(plain)[k]["tokens"].equal(megablend.open(config)[k]["tokens"])
        for k in range(12)
    )
    with pytest.raises(
        PlanError, match=r"source 's0' has format 'arrow'; the config has 'parquet'"
    ):
        megablend.open(make_config(tmp_path, [given | {"format": "parquet"}], samples=12))
    with pytest.raises(
        ConfigError, match=r"source 's0': unknown format 'arow'; did you mean 'arrow'\?"
    ):
        megablend.build(make_config(tmp_path, [given | {"format": "arow"}], samples=12))
    with pytest.raises(
        ConfigError,
        match=r"format_options of arrow: found option 'rows', but this format has no options",
    ):
        megablend.build(
            make_config(
                tmp_path, [given | {"format": "arrow", "format_options": {"rows": 3}}], samples=12
            )
        )
