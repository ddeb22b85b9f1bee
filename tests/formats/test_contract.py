"""The contract of formats, for each of the project's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from megablend.errors import ConfigError
from megablend.formats import FORMATS, format_of
from megablend.testing.documents import Documents
from megablend.testing.formats import FormatContract
from tests.formats.writers import ALL_KINDS, BLOCK_BYTES, OPTIONS, Kind
from tests.storages import STORAGE


class TestFormats(FormatContract):
    block_bytes = BLOCK_BYTES

    @pytest.fixture(autouse=True, params=ALL_KINDS, ids=lambda name: f"[{name}]")
    def _chosen(self, request: pytest.FixtureRequest) -> None:
        self.kind: Kind = ALL_KINDS[request.param]
        self.format = FORMATS[self.kind.format]
        self.suffix = self.kind.suffix
        self.column = self.kind.column
        self.options = dict(OPTIONS.get(self.suffix, ()))
        self.separator = self.kind.separator
        self.lengths_are_stored = self.kind.lengths_known
        # There are no marks between the tokens of a .bin
        self.blocks_are_marked = self.column is not None

    def write(self, path: Path, documents: Documents) -> None:
        self.kind.write(path, documents)

    def test_the_content_decides_between_formats_of_one_suffix(self, tmp_path: Path) -> None:
        path = self.write_mixed(tmp_path)
        assert format_of(str(path), STORAGE) is self.format

    def test_a_column_of_another_type_is_refused(self, tmp_path: Path) -> None:
        path = self.write_mixed(tmp_path)
        if self.column is not None:
            with pytest.raises(ConfigError, match=r"column 'text' .*expected integers"):
                self.index(path, column="text")

    def test_a_column_that_does_not_exist_is_refused(self, tmp_path: Path) -> None:
        message = r"have no columns; remove column: idz"
        if self.column is not None:
            message = r"no column 'idz'; did you mean 'ids'"
        with pytest.raises(ConfigError, match=message):
            self.index(self.write_mixed(tmp_path), column="idz")


def test_formats_are_found_by_name(tmp_path: Path) -> None:
    assert list(FORMATS) == ["parquet", "arrow", "arrow-stream", "megatron", "raw"]
    for each in FORMATS.values():
        for suffix in set(each.suffixes) - ({".arrow"} if each.name == "arrow-stream" else set()):
            assert format_of(f"data/*{suffix}", storage=STORAGE) is each
            assert format_of(f"data/X{suffix.upper()}", storage=STORAGE) is each
    prefix = tmp_path / "x_text_document"
    for suffix in (".bin", ".idx"):
        with pytest.raises(
            ConfigError,
            match=r"unknown kind of file.*known suffix \(\.parquet.*prefix of a \.bin/\.idx pair",
        ):
            format_of(str(prefix), storage=STORAGE)
        Path(f"{prefix}{suffix}").touch()
    assert format_of(str(prefix), storage=STORAGE) is FORMATS["megatron"]
    assert format_of(f"{tmp_path}/*_document", storage=STORAGE) is FORMATS["megatron"]
    Path(f"{prefix}.idx").unlink()
    with pytest.raises(
        ConfigError,
        match=r"\.idx does not exist, but the other file of the pair does: .* `format: raw`",
    ):
        format_of(str(prefix), storage=STORAGE)
