"""The files of sources, and their paths in the dataset."""

from __future__ import annotations

import random
import re
from pathlib import Path
from urllib.parse import unquote

import pytest

from megablend.errors import ConfigError
from megablend.mirror.catalog.source_files import check_name, list_files
from megablend.mirror.node.source_reads import SourceReader, make_key
from megablend.storage.base import FileStat, Storage
from megablend.storage.by_scheme import make_storage
from megablend.storage.find import Found
from megablend.storage.location import escape_wildcards, hint_on_bucket
from megablend.storage.mirror_options import parse_mirror
from megablend.storage.object_options import ObjectOptions
from megablend.storage.store_options import parse_options
from megablend.storage.wrapper import WrapperStorage
from tests.mirror.manifests import make_manifest
from tests.storage.faulty import FaultySource


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a@b", "a\n", "a\x7f", "a\x85", "x" * 101])
def test_names_that_cannot_be(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a valid dataset name\nchoose 1 to 100 bytes"):
        check_name(name)


def refuse_nothing(_: str) -> None:
    """Anything may be read."""


def find_paths(*sources: object) -> list[str]:
    return [each.path for each in list_files(make_storage(), [*map(str, sources)], refuse_nothing)]


def test_paths_begin_after_what_the_pattern_names(tmp_path: Path) -> None:
    for name in ("m/1/a.bin", "m/1/b.bin", "m/2/a.bin", "m/c.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    assert find_paths(tmp_path / "m/*/*.bin") == ["1/a.bin", "1/b.bin", "2/a.bin"]
    assert find_paths(tmp_path / "m/1/a.bin") == ["a.bin"]
    every = ["1/a.bin", "1/b.bin", "2/a.bin", "c.txt"]
    assert find_paths(tmp_path / "m") == every
    assert find_paths(f"{tmp_path}/m/") == every
    assert find_paths(tmp_path / "m/1/*", tmp_path / "m/1/a.bin") == ["a.bin", "b.bin"]
    with pytest.raises(
        ConfigError, match=r"would have the same path in the dataset as .*1/a.bin, 'a.bin'"
    ):
        find_paths(tmp_path / "m/1/a.bin", tmp_path / "m/2/a.bin")
    with pytest.raises(ConfigError, match=r"nothing\*: matches no files\ncheck the"):
        find_paths(tmp_path / "m/*", tmp_path / "nothing*")


def test_files_that_two_patterns_match_are_listed_once(tmp_path: Path) -> None:
    names = [f"{i:05}.bin" for i in range(2_000)]
    for name in names:
        (tmp_path / name).write_text(name)
    assert find_paths(tmp_path / "*.bin", tmp_path / "*") == names


def test_files_that_are_listed_one_by_one_keep_their_paths(tmp_path: Path) -> None:
    for name in ("1/a.bin", "2/a.bin", "2/b[1].bin"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    files = list_files(make_storage(), [f"{tmp_path}/*/*"], refuse_nothing)
    paths = {each.key.location: each.path for each in files}
    sources = [*map(escape_wildcards, paths)]
    again = list_files(make_storage(), sources, refuse_nothing, paths)
    assert list(again) == list(files)


def test_a_file_and_a_folder_of_the_same_name(tmp_path: Path) -> None:
    for name in ("m/a", "n/a/b"):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(name)
    with pytest.raises(
        ConfigError,
        match=r"n/a/b: would be below '.*a' in the dataset, where another file has that path\ngive one",
    ):
        find_paths(tmp_path / "m", tmp_path / "n")


def test_a_path_with_a_control_character(tmp_path: Path) -> None:
    (tmp_path / "a\nb").write_text("x")
    with pytest.raises(
        ConfigError,
        match="would have the path 'a\\\\nb' in the dataset, which is not valid\nrename it",
    ):
        find_paths(tmp_path / "*")


@pytest.mark.usefixtures("obstore")
def test_files_of_a_web_server_have_the_paths_of_its_folders() -> None:
    """Relative to the folder that all share, decoded; and nothing but their state is asked for."""
    names = ["m/one/config.json", "m/two/config.json", "m/with%20space/%C3%BC%2B1.bin"]
    with FaultySource({unquote(name): bytes(100_000) for name in names}) as source:
        urls = [f"{source.url}/{name}" for name in names]
        assert find_paths(*urls) == ["one/config.json", "two/config.json", "with space/ü+1.bin"]
        assert find_paths(urls[0]) == ["config.json"]
        assert source.bytes <= 4 * 1
        with pytest.raises(ConfigError, match="web servers do not list their files"):
            find_paths(f"{source.url}/m/")


@pytest.mark.parametrize("host", ["[::ffff:127.0.0.1]", "[::1]", "[fe80::1]", "127.0.0.1"])
def test_nothing_is_asked_of_a_server_before_it_is_allowed(host: str, tmp_path: Path) -> None:
    options = parse_mirror({"folder": str(tmp_path)})
    reader = SourceReader(options, ObjectOptions())
    url = f"http://{host}:9/x"
    with pytest.raises(
        ConfigError, match="has a loopback, link-local or local host, which no prefix names"
    ):
        list_files(_NoStorage(), [url], reader.check_allowed)


class _Listed(FaultySource):
    """Lists some objects without an etag, or with a weak one, and some in the folder that they are in."""

    def _list(self, bucket: str, prefix: str, delimiter: str) -> bytes:
        body = super()._list(bucket, prefix, delimiter)
        body = re.sub(rb"<ETag>&quot;0[^<]*</ETag>", b"", body)
        return re.sub(rb"<ETag>(&quot;1[^<]*)</ETag>", rb"<ETag>W/\1</ETag>", body)


class _EntriesOnly(WrapperStorage):
    """Lists no tables."""

    def find_table(self, _: str) -> None:
        return None


def draw_keys(draw: random.Random) -> list[str]:
    """Keys with equal beginnings, markers of folders among them, of which no file lies below another."""
    letters = 'ab-.0\u00e9\U0001f600"\\ *['
    keys = set[str]()
    for _ in range(draw.randrange(60)):
        names = [
            "".join(draw.choices(letters, k=draw.randrange(1, 4)))
            for _ in range(draw.randrange(1, 4))
        ]
        if {".", ".."} & set(names):
            continue
        key = "/".join(names)
        if not any(each.startswith(f"{key}/") or key.startswith(f"{each}/") for each in keys):
            keys.add(key)
    markers = {f"{key.rpartition('/')[0]}/" for key in keys if "/" in key and draw.random() < 0.2}
    return draw.sample(sorted(keys | markers), len(keys | markers))


@pytest.mark.usefixtures("obstore")
@pytest.mark.parametrize("seed", range(12))
def test_objects_of_a_listing_and_one_by_one(seed: int) -> None:
    """Field by field, and byte for byte: of any patterns, in one and in two buckets."""
    draw = random.Random(seed)
    files = {
        f"{bucket}/{top}{key}": b""
        if key.endswith("/")
        else bytes(draw.choice([0, 1, draw.randrange(300)]))
        for bucket, top in (("one", "d/"), ("one", "e/"), ("two", ""))
        for key in draw_keys(draw)
    }
    files |= {"one/d/x": b"1", "one/e/y": b"2", "two/x": b"3", "two/z": b"4"}
    with _Listed(files) as source:
        options = {"endpoint": source.url, "anonymous": True, "versions": draw.random() < 0.2}
        storage = make_storage(objects=parse_options({"s3://one": options, "s3://two": options}))
        sources = [
            "s3://one/d/**",
            "s3://one/d/*",
            "s3://one/**/*",
            "s3://one/*/[!x]*",
            "s3://two/**",
            "s3://two/?",
            "s3://one/d/",
        ]
        for chosen in [
            *([each] for each in sources),
            ["s3://one/d/**", "s3://one/d/[a-z]*", "s3://one/d/x"],
        ]:
            try:
                expected = list_files(_EntriesOnly(storage), chosen, refuse_nothing)
            except ConfigError as error:
                with pytest.raises(ConfigError, match=re.escape(str(error))):
                    list_files(storage, chosen, refuse_nothing)
                continue
            found = list_files(storage, chosen, refuse_nothing)
            assert list(found) == list(expected)
            assert found.revision == expected.revision == make_manifest(expected).revision
            view = storage.for_reading()
            states = {path: view.stat(path) for each in chosen for path in view.glob(each)}
            assert {file.key for file in found} >= {make_key(*each) for each in states.items()}


class _EmptyStorage(WrapperStorage):
    """A bucket, or an endpoint without it, in which nothing is found."""

    def find(self, _: str) -> Found:
        return Found([], {}, ())

    def find_table(self, _: str) -> None:
        return None

    def for_reading(self) -> Storage:
        return self


def test_where_a_bucket_has_nothing_its_endpoint_is_named() -> None:
    empty = _EmptyStorage(make_storage())
    with pytest.raises(ConfigError, match=r"matches no files\n.*check the bucket, and `endpoint`"):
        list_files(empty, ["s3://bucket/a/*"], refuse_nothing)
    assert hint_on_bucket("AZ://c/*")
    assert not hint_on_bucket("https://h/*") + hint_on_bucket("/a/*")


class _NoStorage(WrapperStorage):
    """Is asked nothing."""

    def __init__(self) -> None:
        super().__init__(make_storage())

    def find(self, pattern: str) -> Found:
        raise AssertionError(pattern)

    def stat(self, path: str) -> FileStat:
        raise AssertionError(path)

    def for_reading(self) -> Storage:
        return self

    def for_checking(self) -> Storage:
        return self
