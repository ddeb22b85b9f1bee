"""Braces and queries of URLs, against what a shell makes of them, written by hand."""

from __future__ import annotations

import pytest

from megablend.errors import ConfigError
from megablend.storage.objects.urls import expand_braces, split_query

EXPANDED = {
    "h/x": ["h/x"],
    "h/{0..2}": ["h/0", "h/1", "h/2"],
    "h/{2..0}": ["h/2", "h/1", "h/0"],
    "h/{08..11}": ["h/08", "h/09", "h/10", "h/11"],
    "h/{8..011}": ["h/008", "h/009", "h/010", "h/011"],
    "h/{3..3}": ["h/3"],
    "h/{a,b}{0..1}": ["h/a0", "h/a1", "h/b0", "h/b1"],
    "h/{a,}.x": ["h/a.x", "h/.x"],
    "h/{one}": ["h/{one}"],
    "h/{a,b}?q={c,d}": ["h/a?q={c,d}", "h/b?q={c,d}"],
}


@pytest.mark.parametrize("url", EXPANDED)
def test_braces(url: str) -> None:
    assert expand_braces(url) == EXPANDED[url]


def test_as_many_as_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megablend.storage.objects.urls.MAX_URLS", 10)
    assert len(expand_braces("h/{1..10}")) == len(expand_braces("h/{0..4}{a,b}")) == 10
    with pytest.raises(ConfigError, match=r"^\{0\.\.10\}: stands for more than 10 numbers$"):
        expand_braces("h/{0..10}")
    with pytest.raises(
        ConfigError,
        match=r"^h/\{0\.\.5\}\{a,b\}: its braces stand for 12 URLs, expected at most 10$",
    ):
        expand_braces("h/{0..5}{a,b}")


def test_queries_are_of_web_servers_alone() -> None:
    assert split_query("https://h/x?a=b#c") == ("https://h/x", "a=b")
    assert split_query("s3://b/x?a=b#c") == ("s3://b/x?a=b#c", "")
