"""The settings of a mirror: what they may be, what a node may fetch."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from megablend.storage.mirror_options import MirrorOptions, parse_mirror
from megablend.storage.object_options import make_files_absolute
from megablend.storage.options_parser import parse_options


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (7, r"mirror: found 7, expected a folder, or settings with `folder`"),
        ({}, "mirror: has no `folder`"),
        ({"folder": ""}, "mirror: folder: found '', expected text"),
        ({"folder": None}, "mirror: folder: found None, expected text"),
        ({"folder": "m", "sise": "1TB"}, "mirror: sise: unknown setting; did you mean 'size'"),
        (
            {"folder": "m", "size": "big"},
            "mirror: size: found 'big', expected a size such as 500GB",
        ),
        ({"folder": "m", "size": -1}, "mirror: size: found -1, expected a size"),
        ({"folder": "m", "size": True}, "mirror: size: found True, expected a size"),
        ({"folder": "m", "patience": 0}, "mirror: patience: found 0, expected a number above 0"),
        ({"folder": "m", "prefixes": "s3://"}, "mirror: prefixes: found 's3://', expected a list"),
        ({"folder": "m", "prefixes": []}, "mirror: prefixes: found .*, expected a list"),
    ],
)
def test_wrong_settings_are_named(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_options({"mirror": given})


def test_sizes_paths_and_the_rest_of_storage() -> None:
    given = {
        "mirror": {
            "folder": "m",
            "size": "1.5 TB",
            "reserve": "10GiB",
            "prefixes": ["s3://b/", "data"],
            "group": None,
        },
        "s3://b/": {"region": "eu-west-1"},
    }
    options = make_files_absolute(parse_options(given), Path("/base"))
    expected = MirrorOptions(
        folder="/base/m",
        size=1_500_000_000_000,
        reserve=10 << 30,
        prefixes=("s3://b/", "/base/data"),
    )
    assert options.mirror == expected
    assert options.find("s3://b/x").region == "eu-west-1"
    assert pickle.loads(pickle.dumps(options)) == options
    assert parse_mirror(expected.as_json()) == expected
    assert parse_options({"mirror": "/m"}).mirror == MirrorOptions(folder="/m")
    assert parse_options({"mirror": None}).mirror is None


@pytest.mark.parametrize(
    ("prefixes", "location", "is_allowed"),
    [
        (None, "s3://bucket/key", True),
        (None, "https://host/x", True),
        (None, "http://169.254.169.254/latest/meta-data/", False),
        (None, "http://127.0.0.1:8000/x", False),
        (None, "http://[::1]/x", False),
        (None, "http://[::ffff:127.0.0.1]/x", False),
        (None, "http://localhost./x", False),
        (None, "http://127.1/x", False),
        (None, "http://2130706433/x", False),
        (None, "http://0x7f000001/x", False),
        (None, "http://metadata.google.internal/x", False),
        (None, "/etc/shadow", False),
        (None, "https://host/x?sig=1", False),
        (("http://127.0.0.1:8000/",), "http://127.0.0.1:8000/x", True),
        (("http://127.0.0.1:8000/",), "http://127.0.0.1:8001/x", False),
        (("s3://bucket/team/",), "s3://bucket/team/../other", False),
        (("s3://bucket/team/",), "s3://bucket/team2/x", False),
        (("s3://bucket/team",), "s3://bucket/team2/x", False),
        (("s3://bucket/team",), "s3://bucket/team/x", True),
        (("/usr",), "/usr/../etc/shadow", False),
    ],
)
def test_a_node_fetches_below_its_prefixes_only(
    prefixes: tuple[str, ...] | None, location: str, is_allowed: bool
) -> None:
    options = (
        MirrorOptions(folder="/m")
        if prefixes is None
        else MirrorOptions(folder="/m", prefixes=prefixes)
    )
    assert options.allows(location) is is_allowed


def test_links_out_of_a_mounted_folder_are_not_followed(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "x").write_text("x")
    (tmp_path / "secret").write_text("x")
    (inside / "link").symlink_to(tmp_path / "secret")
    options = MirrorOptions(folder="/m", prefixes=(str(inside),))
    assert options.allows(str(inside / "x"))
    assert not options.allows(str(inside / "link"))
