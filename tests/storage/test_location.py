"""Locations: plain paths as pathlib has them, those with a scheme as they are written."""

from __future__ import annotations

import fnmatch
import itertools
from pathlib import PurePath

import pytest

from megablend.storage import location


@pytest.mark.parametrize(
    ("given", "scheme"),
    [
        ("/a", ""),
        ("a", ""),
        ("s3:a", ""),
        ("/a://b", ""),
        ("a/b://c", ""),
        ("S3://b/k", "s3"),
        ("zip://", "zip"),
        ("://x", ""),
    ],
)
def test_schemes(given: str, scheme: str) -> None:
    assert location.find_scheme(given) == scheme


@pytest.mark.parametrize(
    ("folder", "name", "joined"),
    [
        ("/data", "x/a.bin", "/data/x/a.bin"),
        ("/data//y/", "a", "/data/y/a"),
        ("/", "a", "/a"),
        ("/data", "../a", "/data/../a"),
        ("/data", "/other", "/other"),
        ("s3://b", "x/a.bin", "s3://b/x/a.bin"),
        ("s3://b/x/", "a", "s3://b/x/a"),
        ("s3://b/x", "../a//b", "s3://b/x/../a//b"),
        ("s3://", "b/a", "s3://b/a"),
    ],
)
def test_join(folder: str, name: str, joined: str) -> None:
    assert location.join(folder, name) == joined


@pytest.mark.parametrize(
    ("given", "parent", "name"),
    [
        ("/data/a.bin", "/data", "a.bin"),
        ("/a", "/", "a"),
        ("/", "/", ""),
        ("a", ".", "a"),
        ("s3://b/x/a.bin", "s3://b/x", "a.bin"),
        ("s3://b/a", "s3://b", "a"),
        ("s3://b", "s3://", "b"),
        ("s3://", "s3://", ""),
        ("s3://b/x//a", "s3://b/x/", "a"),
    ],
)
def test_parent_and_name(given: str, parent: str, name: str) -> None:
    assert (location.get_parent(given), location.get_name(given)) == (parent, name)


@pytest.mark.parametrize(
    ("given", "folder", "name"),
    [
        ("/data/x/a", "/data", "x/a"),
        ("/data/x/../a", "/data", "a"),
        ("/other/a", "/data", "../other/a"),
        ("/database/a", "/data", "../database/a"),
        ("/a", "/", "a"),
        ("s3://b/x/a", "s3://b", "x/a"),
        ("s3://b/x//a", "s3://b/x", "/a"),
        ("s3://b/a", "s3://", "b/a"),
    ],
)
def test_relative(given: str, folder: str, name: str) -> None:
    assert location.make_relative(given, folder) == name


def test_a_location_elsewhere_has_no_relative_name() -> None:
    with pytest.raises(ValueError, match="s3://bb/a is not in s3://b"):
        location.make_relative("s3://bb/a", "s3://b")


@pytest.mark.parametrize(
    ("given", "absolute"),
    [
        ("a/b", "/base/a/b"),
        ("./a", "/base/a"),
        ("/a", "/a"),
        ("s3://b/a", "s3://b/a"),
        ("x:/a", "/base/x:/a"),
    ],
)
def test_absolute(given: str, absolute: str) -> None:
    assert location.make_absolute(given, "/base") == absolute


@pytest.mark.parametrize(
    ("patterns", "root"),
    [
        (["/data/a.arrow"], "/data"),
        (["/data/*.arrow"], "/data"),
        (["/data/x*/b/c.arrow"], "/data"),
        (["/data/**/c?.arrow", "/data/deep/er/*.arrow"], "/data"),
        (["/data/one/a.arrow", "/data/two/a.arrow"], "/data"),
        (["/a.arrow"], "/"),
        (["s3://b/x/*.arrow"], "s3://b/x"),
        (["s3://b/x*/y/a.arrow"], "s3://b"),
        (["s3://b/x/a", "s3://b/xy/a"], "s3://b"),
        (["s3://b/x/a", "s3://c/x/a"], "s3://"),
        (["s3://b*/a"], "s3://"),
    ],
)
def test_the_root_is_what_patterns_share_before_a_wildcard(patterns: list[str], root: str) -> None:
    assert location.find_root(patterns) == root


def test_patterns_of_several_schemes_have_no_root() -> None:
    with pytest.raises(
        ValueError,
        match=r"different storage systems \(plain paths, s3://\); use a separate source for each",
    ):
        location.find_root(["s3://b/a", "/data/a"])


@pytest.mark.parametrize(
    ("given", "other"), [("/data/x[1]", "/data/x1"), ("s3://b/x[1]*", "s3://b/x1y")]
)
def test_escaped_wildcards_match_themselves_alone(given: str, other: str) -> None:
    assert fnmatch.fnmatchcase(other, given)
    assert location.has_wildcard(given)
    escaped = location.escape_wildcards(given)
    assert [fnmatch.fnmatchcase(each, escaped) for each in (given, other)] == [True, False]


PARTS = ["a", "b.c", ".", "..", "", ".d", "e f", "..."]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_plain_paths_are_normalised_as_pathlib_does(length: int) -> None:
    """Also those whose text is recognised as normal, and not parsed."""
    for parts in itertools.product(PARTS, repeat=length):
        for start in ("/", "", "//"):
            path = start + "/".join(parts)
            assert location.get_parent(path) == str(PurePath(path).parent)
            for folder in ("/x", "/x/", "/", "y", "", "/x/./y"):
                assert location.join(folder, path) == str(PurePath(folder, path))
