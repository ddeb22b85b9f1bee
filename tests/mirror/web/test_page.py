"""The page of a node for browsers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megablend.mirror.web.page import format_page
from tests.mirror.catalog.test_datasets import MB, MIXED, keys, make_files
from tests.mirror.web.test_files import web

__all__ = ["keys"]
EVIL = "<script>alert(1)</script>\"'&"
STATUS: dict[str, Any] = {
    "pid": 77,
    "version": "0.2.0",
    "folder": f"/mirror/{EVIL}",
    "service": True,
    "started": 1_764_132_000.0,
    "clients": 2,
    "held_bytes": 1_500_000_000,
    "files": 1234,
    "evicted_bytes": 0,
    "source_bytes": 5,
    "peer_bytes": 7,
    "cluster": None,
}


class Page(HTMLParser):
    """What a page shows: cells of its tables, and what it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.bars: list[dict[str, str | None]] = []
        self.tags = set[str]()
        self.text = ""
        self._in_cell = False
        self.feed(text)
        assert not self.tags & {"script", "link", "img", "iframe", "form", "object", "a"}
        assert not any(each in text for each in ("src=", "href=", "url(", "@import", "://"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "progress":
            self.bars.append(dict(attrs))
        self._in_cell = tag in ("td", "th", "code", "span", "progress")

    def handle_data(self, data: str) -> None:
        self.text += data
        if (self.rows and self._in_cell) or (self.rows and data.strip() and self.rows[-1]):
            self.rows[-1][-1] += data.strip()

    def facts(self) -> dict[str, str]:
        return {row[0]: row[1] for row in self.rows if len(row) == 2}

    def datasets(self) -> dict[str, list[str]]:
        return {row[0]: row[1:] for row in self.rows if len(row) == 6}


def revision(name: str, digest: str, size: int = 2_000_000_000) -> dict[str, Any]:
    return {
        "dataset": name,
        "digest": digest * 32,
        "num_files": 1200,
        "num_bytes": size,
        "added": 1_764_132_000.0,
        "is_found": False,
    }


def goal(name: str, digest: str, missing: int, **more: Any) -> dict[str, Any]:
    usual = {"pinned": False, "bytes": 1_000_000_000, "short": 0, "trouble": ""}
    return usual | {"want": f"{name}@latest", "revision": digest * 32, "missing": missing} | more


def told(revisions: list[dict[str, Any]], goals: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "revisions": revisions,
        "goals": goals,
        "capacity": 4_000_000_000,
        "trouble": "",
        "listed": {},
    }


def test_one_machine_without_datasets() -> None:
    page = Page(format_page(STATUS, None))
    assert page.facts()["held"] == "1.500 GB of 1,234 files"
    assert not page.datasets()
    assert EVIL in page.text
    assert "a service, since 2025-11-26 04:40 UTC" in page.text


def test_what_is_in_trouble_comes_first() -> None:
    names = ["held", "missing", "short", "gone", "unwanted", "pinned"]
    revisions = [revision(name, str(i)) for i, name in enumerate(names)]
    goals = [
        goal("held", "0", 0),
        goal("missing", "1", 250_000_000),
        goal("short", "2", 10**9, short=300_000_000),
        goal("gone", "3", 5, trouble=f"s3://b/{EVIL}: is gone"),
        goal("pinned", "5", 0, pinned=True, bytes=0),
    ]
    page = Page(format_page(STATUS, told(revisions, goals)).replace("s3://", "s3:"))
    rows = page.datasets()
    assert [name.partition("@")[0] for name in rows] == [
        "dataset",
        "gone",
        "short",
        "missing",
        "held",
        "pinned",
        "unwanted",
    ]
    by_name = {name.partition("@")[0]: row for name, row in rows.items()}
    assert by_name["missing"] == [
        "1,200",
        "2.000 GB",
        "2025-11-26 04:40 UTC",
        "0.750 GB of 1.000 GB",
        "",
    ]
    assert by_name["short"][4] == "does not fit: 0.300 GB too large"
    assert by_name["gone"][4].endswith(f"{EVIL}: is gone")
    assert by_name["pinned"][4] == "pinned"
    assert by_name["unwanted"][3:] == ["", "not wanted"]
    bars = [(bar["value"], bar["max"]) for bar in page.bars]
    assert bars[2] == ("750000000", "1000000000")
    assert bars[4] == ("1", "1")


def test_sources_that_changed_nothing_and_revisions_that_were_found() -> None:
    one = [revision("corpus", "0") | {"is_found": True}]
    listed = {
        "corpus": {
            "by": "node1:7171",
            "at": 1.0,
            "trouble": f"2 files no longer exist, such as {EVIL}",
        },
        "well": {"by": "node1:7171", "at": 1.0, "trouble": ""},
    }
    page = Page(format_page(STATUS, told(one, []) | {"listed": listed}))
    facts = page.facts()
    assert facts["source of corpus"] == f"2 files no longer exist, such as {EVIL}"
    assert "source of well" not in facts
    (row,) = [row for name, row in page.datasets().items() if name.startswith("corpus@")]
    assert row[2] == "2025-11-26 04:40 UTC, found by listing again"


def many(count: int) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """1,000 nodes and some datasets, of which some are in trouble."""
    cluster = {
        "own": "node0001:7171",
        "nodes": 1000,
        "view": 12,
        "away_nodes": [f"node{i:04}:7171" for i in range(2, 500)],
        "formed": False,
        "trouble": f"498 of 1000 nodes are missing: {EVIL}",
        "bytes_to_copy": 17_000_000_000,
    }
    revisions = [revision(f"dataset-{i:04}", f"{i % 10}") for i in range(count)]
    goals = [
        goal(
            f"dataset-{i:04}",
            f"{i % 10}",
            (i % 7) * 140_000_000,
            short=10**8 if i % 199 == 5 else 0,
            trouble="s3: does not answer" if i % 311 == 3 else "",
            pinned=i % 13 == 0,
        )
        for i in range(0, count, 2)
    ]
    return STATUS | {"cluster": cluster}, told(revisions, goals)


def test_a_thousand_nodes_and_datasets() -> None:
    status, known = many(1000)
    begin = time.process_time()
    text = format_page(status, known)
    assert time.process_time() - begin < 1
    assert len(text) < 400_000
    page = Page(text)
    assert len(page.datasets()) == 1001
    facts = page.facts()
    assert facts["nodes"] == "1,000, view 12"
    assert facts["away"].startswith("498 nodes: node0002:7171, ")
    assert facts["away"].endswith("node0051:7171 and 448 more")
    assert facts["copies yet to be fetched"] == "17.000 GB"
    assert EVIL in facts["nodes do not work together"]
    page = Page(format_page(*many(5000)))
    assert len(page.datasets()) == 1001
    assert "and 4,000 more: megablend datasets list" in page.text


@pytest.mark.usefixtures("obstore", "keys")
def test_a_node_s_own_page(tmp_path: Path) -> None:
    files = make_files("d", {**MIXED, "more.bin": 6 * MB})
    with web(tmp_path, files) as served:
        assert not served.node.ask("list")["revisions"]
        assert len(Page(served.get("/").decode()).datasets()) == 1
        served.node.add("<b>&\u00e9", "d")
        status, headers, body = served.ask("/")
        assert status == 200
        assert headers["Content-Type"] == "text/html; charset=utf-8"
        assert headers["Content-Security-Policy"].startswith("default-src 'none'")
        ((_, row),) = list(Page(body.decode()).datasets().items())[1:]
        assert row[4] == "not wanted"
        served.node.ask("want", "<b>&\u00e9", "--wait")
        page = Page(served.get("/").decode())
        ((name, row),) = list(page.datasets().items())[1:]
        assert name.startswith("<b>&\u00e9@")
        assert row[3:] == ["0.009 GB of 0.009 GB", ""]
        assert page.facts()["read from the source"] == "0.009 GB"
        assert served.ask("/", token=False)[0] == 401
