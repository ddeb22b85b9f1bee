"""The page's structure: complete, self-contained, named for screen readers, and harmless whatever sources are called."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megablend.errors import ConfigError
from megablend.inspect.html import write_html
from megablend.inspect.html.charts import DRAWN
from megablend.inspect.html.page import make_page
from tests.inspect.html.pages import HOSTILE, run

VOID = {"meta", "input", "br", "path", "use", "rect"}


class Page(HTMLParser):
    """Elements of a page, with their attributes and the text inside."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: dict[int, str] = {}
        self._open: list[tuple[str, int]] = []
        self.feed(text)
        self.close()
        assert not self._open, "an element is not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append((tag, len(self.elements) - 1))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        for _, number in self._open:
            self.texts[number] = self.texts.get(number, "") + data

    def all(self, tag: str) -> list[tuple[dict[str, str], str]]:
        return [
            (attrs, self.texts.get(i, ""))
            for i, (name, attrs) in enumerate(self.elements)
            if name == tag
        ]


def test_all_sources_are_in_the_table_without_a_plotting_library() -> None:
    described = run(300)
    page = Page(make_page(described, {}))
    names = [text for attrs, text in page.all("th") if attrs.get("scope") == "row"]
    assert names == [source.name for source in described.splits["train"].sources]
    assert names[0] == HOSTILE
    facts = dict(
        zip((text for _, text in page.all("dt")), (text for _, text in page.all("dd")), strict=True)
    )
    assert facts["Stages end at sample"] == "12,000, 30,000"
    assert facts["Memory of a rank"] == "at least 1.0 MiB, of 1.0 GiB that the config allows"
    assert facts["Skipped range 1"] == "samples 8 to 16; 64 tokens are not read"
    assert any(described.warnings[0] in text for _, text in page.all("li"))


def test_it_is_for_keyboards_and_screen_readers() -> None:
    page = Page(make_page(run(3), {}))
    (html, _) = page.all("html")[0]
    (viewport, _) = page.all("meta")[2]
    assert html["lang"] == "en"
    assert "width=device-width" in viewport["content"]
    ids = {attrs["id"] for _, attrs in page.elements if "id" in attrs}
    labels = {attrs["for"] for attrs, _ in page.all("label")}
    assert all(attrs["id"] in labels for attrs, _ in page.all("input"))
    assert all(attrs["href"].removeprefix("#") in ids for attrs, _ in page.all("a"))
    scrolled = [attrs for attrs, _ in page.all("div") if attrs.get("class") == "scroll"]
    assert all(attrs["tabindex"] == "0" and attrs["aria-label"] for attrs in scrolled)
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert [text for _, text in page.all("caption")] == ["All 3 sources of train"]


def test_charts_are_named_and_bounded(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    described = run(DRAWN + 50)
    write_html(described, tmp_path / "run.html")
    text = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert len(text) < 5_000_000
    page = Page(text)
    drawings = page.all("svg")
    assert len(drawings) == len(page.all("figure")) == 6
    ids = Counter(attrs["id"] for _, attrs in page.elements if "id" in attrs)
    assert max(ids.values()) == 1
    for attrs, _ in drawings:
        assert attrs["role"] == "img"
        assert all(ids[name] for name in attrs["aria-labelledby"].split())
    drawn = {text.strip() for _, text in page.all("text")}
    assert HOSTILE in drawn  # as text, not as mathematics or elements
    assert {f"{DRAWN + 50 - 10} others", "source-2"} <= drawn
    assert f"source-{DRAWN + 49}" not in drawn  # read least
    assert not page.all("b")
    outside = [
        value
        for _, attrs in page.elements
        for name, value in attrs.items()
        if name in ("src", "href", "xlink:href")
    ]
    assert all(value.startswith("#") for value in outside)
    (policy,) = [attrs["content"] for attrs, _ in page.all("meta") if "http-equiv" in attrs]
    assert policy.startswith("default-src 'none';")


def test_the_same_description_gives_the_same_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("a", "b"):
        write_html(run(5), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        ConfigError, match=r"^charts need matplotlib: pip install 'megablend\[html\]'$"
    ):
        write_html(run(3), tmp_path / "run.html")
    assert not list(tmp_path.iterdir())


def test_only_files_are_replaced(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="specify the name of a regular file to write"):
        write_html(run(1), tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


def test_pages_with_little_in_them(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    empty: dict[str, Any] = {
        "warnings": (),
        "skips": (),
        "memory_per_rank": None,
    }
    write_html(run(1, **empty), tmp_path / "one.html")
    assert "Warnings" not in (tmp_path / "one.html").read_text(encoding="utf-8")
