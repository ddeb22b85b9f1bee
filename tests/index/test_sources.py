from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from index_data import spec, write

from megablend.errors import ConfigError
from megablend.index.sources import list_source, source_root


@pytest.mark.parametrize(
    ("patterns", "root"),
    [
        (["/data/a.arrow"], "/data"),
        (["/data/*.arrow"], "/data"),
        (["/data/x*/b/c.arrow"], "/data"),
        (["/data/**/c?.arrow", "/data/deep/er/*.arrow"], "/data"),
        (["/data/one/a.arrow", "/data/two/a.arrow"], "/data"),
    ],
)
def test_the_root_is_what_patterns_share_before_a_wildcard(patterns: list[str], root: str) -> None:
    assert source_root(patterns) == root


def test_names_are_relative_and_sorted(tmp_path: Path) -> None:
    for name in ("x/b.arrow", "x/a.arrow", "c.arrow"):
        write(tmp_path / name, 1)
    listing = list_source(spec(tmp_path, "**/*.arrow"))
    assert [file.name for file in listing.files] == ["c.arrow", "x/a.arrow", "x/b.arrow"]
    assert (listing.root, listing.format) == (str(tmp_path), "arrow")


@pytest.mark.parametrize("pattern", ["nothing*.arrow", "nothing.arrow", "no/where/*.arrow", "prefix_text_document"])
def test_a_pattern_that_matches_nothing_names_source_and_pattern(tmp_path: Path, pattern: str) -> None:
    write(tmp_path / "a.arrow", 1)
    with pytest.raises(ConfigError, match=rf"source 'books': .*/{pattern.replace('*', '.')} matches no file"):
        list_source(spec(tmp_path, pattern, name="books"))


def test_a_slip_in_a_name_is_answered_with_the_nearest(tmp_path: Path) -> None:
    path = write(tmp_path / "books.arrow", 1)
    with pytest.raises(ConfigError, match=f"did you mean {path}"):
        list_source(spec(tmp_path, "bokos.arrow"))


def test_a_folder_is_answered_with_its_files(tmp_path: Path) -> None:
    write(tmp_path / "books" / "a.arrow", 1)
    with pytest.raises(
        ConfigError, match=rf"source 'source': {tmp_path}/books is a folder; .* {tmp_path}/books/\*\.arrow"
    ):
        list_source(spec(tmp_path, "books"))


def test_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.arrow", 1).rename(tmp_path / "\udcff.arrow")
    with pytest.raises(ConfigError, match=r"udcff.arrow': its name has characters .* rename it"):
        list_source(spec(tmp_path))


def test_mixed_formats_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", 1)
    shutil.copy(path, tmp_path / "b.parquet")
    with pytest.raises(ConfigError, match=r"source 'source': mixes formats: arrow \(.*a.arrow\), parquet"):
        list_source(spec(tmp_path, "*"))


def test_an_unknown_kind_of_file_names_the_source(tmp_path: Path) -> None:
    (tmp_path / "notes.doc").write_text("")
    with pytest.raises(ConfigError, match=r"source 'source': .*notes.doc"):
        list_source(spec(tmp_path, "*"))


@pytest.mark.parametrize("pattern", ["x", "x.bin", "x.idx", "x.*", "?", "[x]"])
def test_a_megatron_prefix_stands_for_its_two_files(tmp_path: Path, pattern: str) -> None:
    for suffix in (".bin", ".idx"):
        (tmp_path / f"x{suffix}").write_bytes(b"1234")
    listing = list_source(spec(tmp_path, pattern))
    (file,) = listing.files
    assert (file.name, file.path, listing.format) == ("x.bin", str(tmp_path / "x.bin"), "megatron")
    (tmp_path / "x.idx").write_bytes(b"12345")
    assert list_source(spec(tmp_path, pattern)).files[0].etag != file.etag


def test_a_megatron_prefix_may_hold_what_looks_like_a_wildcard(tmp_path: Path) -> None:
    for suffix in (".bin", ".idx"):
        (tmp_path / f"x[1]{suffix}").write_bytes(b"1234")
    (file,) = list_source(spec(tmp_path, "x[1]")).files
    assert file.name == "x[1].bin"
