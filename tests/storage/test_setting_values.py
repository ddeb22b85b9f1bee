"""Values of settings, in every way that they may be written."""

from __future__ import annotations

import pytest

from megablend.storage.setting_values import parse_size
from megablend.storage.url_checks import split_address


@pytest.mark.parametrize(
    ("written", "size"),
    [
        (1, 1),
        (4e9, 4_000_000_000),
        ("512MiB", 512 << 20),
        (" 1.5 gb ", 1_500_000_000),
        ("2KiB", 2048),
        ("2K", 2000),
        ("2Ki", 2048),
        ("7B", 7),
        ("1_000", 1000),
        ("1e3k", 1_000_000),
        (".5 TiB", 1 << 39),
        ("9007199254740993", (1 << 53) + 1),
    ],
)
def test_sizes(written: object, size: int) -> None:
    assert parse_size(written) == size


@pytest.mark.parametrize("written", ["", "B", "5i", "5iB", "-1", "1e", "1e101", None, True, [1]])
def test_wrong_sizes(written: object) -> None:
    with pytest.raises(ValueError, match=r"found .*, expected a size such as 512MiB"):
        parse_size(written, minimum=0)


def test_a_size_of_nothing() -> None:
    assert parse_size(0, minimum=0) == 0
    with pytest.raises(ValueError, match="found 0, expected more than 0"):
        parse_size(0)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a", ("a", None)),
        ("a.b-c:1", ("a.b-c", 1)),
        ("[::1]", ("[::1]", None)),
        ("[::1]:65535", ("[::1]", 65535)),
        ("::1", None),
        ("a:0", None),
        ("a:65536", None),
        ("a:", None),
        (":1", None),
        ("a:\u0661", None),
        ("http://a:1", None),
        ("u@a:1", None),
        ("a:1\n", None),
        ("", None),
    ],
)
def test_addresses(text: str, parts: object) -> None:
    assert split_address(text) == parts
