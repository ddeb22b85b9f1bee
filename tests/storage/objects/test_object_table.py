"""Tables of objects, against names and metadata one by one."""

from __future__ import annotations

import asyncio
import fnmatch
import random
import re
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from itertools import compress
from typing import Any

import pyarrow as pa
import pytest

from megablend.errors import ConfigError
from megablend.storage.file_table import list_texts
from megablend.storage.object_options import ObjectOptions
from megablend.storage.objects import bucket_lister
from megablend.storage.objects.listing import find_objects, matches_pattern
from megablend.storage.objects.object_table import (
    join_tables,
    list_matching,
    list_versions,
    make_table,
)
from megablend.storage.objects.object_version import make_version
from megablend.storage.objects.store import ObjectStorage
from megablend.storage.store_options import parse_options
from tests.storage.faulty import FaultySource

ETAGS = [None, "", '"ab"', "ab", 'W/"ab"', ' "ab" ', '"W/ab"', '""', '"\u00e9"', "modified-5"]


def make_arrow(rows: Sequence[dict[str, Any]], part: int = 5) -> pa.Table:
    """A table such as obstore's, in batches of a few rows that begin within their memory."""
    schema = pa.schema(
        [
            ("path", pa.string()),
            ("last_modified", pa.timestamp("us", "UTC")),
            ("size", pa.uint64()),
            ("e_tag", pa.string()),
            ("version", pa.string()),
        ]
    )
    table = pa.Table.from_pylist(list(rows), schema).to_batches()
    batches = [each.slice(i, part) for each in table for i in range(0, len(each), part)]
    return pa.Table.from_batches(batches, schema)


def make_row(
    key: str, etag: str | None = None, size: int = 1, seconds: float = 0
) -> dict[str, Any]:
    modified = datetime.fromtimestamp(seconds, timezone.utc)
    return {"path": key, "last_modified": modified, "size": size, "e_tag": etag, "version": None}


@pytest.mark.parametrize("seed", range(10))
def test_states_are_those_of_single_objects(seed: int) -> None:
    draw = random.Random(seed)
    rows = [
        make_row(
            "".join(draw.choices("ab/.\u00e9\U0001f600 *", k=draw.randrange(1, 9))),
            draw.choice(ETAGS),
            draw.choice([0, 1, 2**62]),
            draw.choice([-5.5, 0.9, 1e9 + 0.999999]),
        )
        for _ in range(5 * seed)
    ]
    table = join_tables(
        [make_table(make_arrow(rows[i : i + 12]), "s3://b", "**") for i in range(0, len(rows), 12)]
    )
    versions = [make_version(each) for each in rows]
    paths = [f"s3://b/{each['path']}" for each in rows]
    assert list_texts(table["location"]) == paths
    assert list_versions(table) == versions
    files = list_matching(table)
    found = table["matches"].to_pylist()
    assert list_texts(files["location"]) == list(compress(paths, found))
    versions = list(compress(versions, found))
    assert files["size"].to_pylist() == [each.size for each in versions]
    assert list_texts(files["etag"]) == [each.stat.etag for each in versions]


def matches_parts(names: Sequence[str], parts: Sequence[str]) -> bool:
    """Whether the names of a path match the parts of a pattern: the twin of `matches_pattern`."""
    if not parts:
        return not names
    if parts[0] != "**":
        return (
            bool(names) and matches_part(names[0], parts[0]) and matches_parts(names[1:], parts[1:])
        )
    if len(parts) == 1:
        return bool(names) and not any_hidden(names)
    return any(
        matches_parts(names[i:], parts[1:]) and not any_hidden(names[:i]) for i in range(len(names))
    )


def matches_part(name: str, part: str) -> bool:
    if name == part:
        return True
    if name.startswith(".") and not part.startswith("."):
        return False
    return re.match(fnmatch.translate(part), name) is not None


def any_hidden(names: Sequence[str]) -> bool:
    return any(name.startswith(".") for name in names)


def draw_path(draw: random.Random, letters: str, part: str) -> str:
    parts = [
        part
        if part and draw.random() < 0.3
        else "".join(draw.choices(letters, k=draw.randrange(1, 6)))
        for _ in range(draw.randrange(1, 5))
    ]
    return "/".join(parts)


@pytest.mark.parametrize("seed", range(24))
def test_any_pattern(seed: int) -> None:
    draw = random.Random(seed)
    pattern = draw_path(draw, "ab.*?[]!-^\\&~|+$( {}\n#\u00e9", "**")
    letters = "".join({*pattern} - {"/"}) + "ab.\u00e9\U0001f600\x7f"
    keys = [draw_path(draw, letters, "") for _ in range(200)]
    # Most random keys match nothing: some are made of the pattern
    for _ in range(200):
        filled = re.sub(r"\*\*?", lambda _: draw_path(draw, letters, ""), pattern)
        keys.append(re.sub(r"\[.*?\]|\?", lambda _: draw.choice(letters), filled))
    keys.append(pattern)
    table = make_table(make_arrow([make_row(key) for key in keys]), "s3://b", pattern)
    found = table["matches"].to_pylist()
    expected = [matches_parts(key.split("/"), pattern.split("/")) for key in keys]
    wrong = [key for key, a, b in zip(keys, found, expected, strict=True) if a != b]
    assert not wrong, (pattern, wrong)
    assert [matches_pattern(key, pattern) for key in keys] == expected
    assert any(found)


def test_folders_that_are_listed() -> None:
    folders = {"": ["a", "b", ".c"], "a": ["a/x", "a/y"], "b": ["b/x"]}

    async def list_folder(folder: str) -> Sequence[str]:
        listed.append(folder)
        return folders.get(folder, [])

    async def list_all(folder: str) -> None:
        listed.append(f"{folder}/**")

    for pattern, expected, found in (
        ("*", [""], ["a", "b"]),
        ("*/x", ["", "a", "b"], ["a/x", "b/x"]),
        ("*/x/*", ["", "a/x", "b/x"], []),
        ("a/x/**/y", ["a/x/**"], []),
        ("*/**", ["", "a/**", "b/**"], []),
        (".?/**", ["", ".c/**"], []),
        ("a//*", [], []),
    ):
        listed: list[str] = []
        assert asyncio.run(find_objects(pattern, list_folder, list_all)) == found
        assert sorted(listed) == sorted(expected)


@pytest.mark.usefixtures("obstore")
def test_of_a_key_that_equals_the_pattern_no_other_is_found() -> None:
    with FaultySource({f"b/d/{key}": b"1" for key in ("a1", "a[12]", "a2", "b")}) as source:
        storage = ObjectStorage(
            parse_options({"s3://b": {"endpoint": source.url, "anonymous": True}})
        )
        for pattern, paths in (
            ("d/a[12]", ["s3://b/d/a[12]"]),
            ("d/a?", ["s3://b/d/a1", "s3://b/d/a2"]),
        ):
            assert storage.glob(f"s3://b/{pattern}") == paths
            table = storage.find_table(f"s3://b/{pattern}")
            assert table is not None
            assert list_texts(table["location"]) == paths


@pytest.mark.usefixtures("obstore")
def test_a_fault_of_a_conversion_is_not_taken_for_one_of_the_source(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise pa.ArrowInvalid("broken")

    monkeypatch.setattr(bucket_lister, "make_table", fail)
    with FaultySource({"b/d/x": b"1"}) as source:
        storage = ObjectStorage(
            parse_options({"s3://b": {"endpoint": source.url, "anonymous": True}})
        )
        for pattern in ("*", "**"):
            requests = source.requests
            with pytest.raises(pa.ArrowInvalid, match="broken"):
                storage.find(f"s3://b/d/{pattern}")
            assert source.requests == requests + 1


@pytest.mark.usefixtures("obstore")
def test_without_what_listings_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "arro3.core", None)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    with pytest.raises(
        ConfigError,
        match=r"^s3://b/\*: listing object stores needs arro3-core: install megablend\[objects\]",
    ):
        ObjectStorage(ObjectOptions()).find("s3://b/*")
