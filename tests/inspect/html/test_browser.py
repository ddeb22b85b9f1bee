"""The page in a browser, headless Chromium: its script runs under its own policy, tables are searched and sorted, text fits.

Skipped where there is no Chromium (`apt-get install chromium`) or no matplotlib.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from megablend.inspect.html import write_html
from tests.inspect.html.pages import run

CHROMIUM = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    None,
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")

PROBE = """
const visible = (each) => each.getClientRects().length > 0;
const section = document.querySelector("[data-table]"), input = section.querySelector("input");
const names = () => [...section.querySelectorAll("tbody tr")].filter(visible).map((row) => row.cells[0].textContent);
const found = {width: innerWidth, wider: document.documentElement.scrollWidth - innerWidth};
found.drawings = [...document.querySelectorAll("svg")].filter(visible).length;
found.texts = [...document.querySelectorAll("svg text")].filter(visible).map((text) => {
  const [box, all] = [text.getBoundingClientRect(), text.closest("svg").getBoundingClientRect()];
  const edges = [box.left - all.left, all.right - box.right, box.top - all.top, all.bottom - box.bottom];
  return [text.textContent, box.height, ...edges];
});
input.value = "SOURCE-1";
input.dispatchEvent(new Event("input"));
found.searched = [names().length, section.querySelector("[role=status]").textContent];
input.value = "";
input.dispatchEvent(new Event("input"));
const headers = [...section.querySelectorAll("thead th")], tokens = headers.find((each) => each.textContent === "tokens");
tokens.querySelector("button").click();
found.largest = [names()[0], tokens.getAttribute("aria-sort")];
tokens.querySelector("button").click();
found.smallest = [names()[0], tokens.getAttribute("aria-sort")];
const reachable = [...document.querySelectorAll("a, button, input, [tabindex]")].filter(visible);
found.unreachable = reachable.filter((each) => (each.focus(), document.activeElement !== each)).length;
found.reachable = reachable.length;
document.documentElement.setAttribute("data-found", JSON.stringify(found));
"""


def render(path: Path, width: int) -> str:
    """The page's elements once its scripts have run."""
    assert CHROMIUM is not None
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--window-size={width},1000",
    ]
    profile = f"--user-data-dir={path.parent / 'profile'}"
    done = subprocess.run(
        [CHROMIUM, *options, profile, "--dump-dom", path.as_uri()],
        capture_output=True,
        text=True,
        timeout=500,
        check=True,
    )
    return done.stdout


def probe(path: Path, width: int) -> dict[str, Any]:
    """What PROBE finds in a copy of the page in which it may run."""
    text = re.sub(r"<meta http-equiv[^>]*>", "", path.read_text(encoding="utf-8"))
    copy = path.with_name("probed.html")
    copy.write_text(text.replace("</body>", f"<script>{PROBE}</script></body>"), encoding="utf-8")
    found = re.search(r'data-found="([^"]*)"', render(copy, width))
    assert found is not None, "the script failed"
    values: dict[str, Any] = json.loads(unescape(found[1]))
    return values


@pytest.fixture
def page(tmp_path: Path) -> Path:
    pytest.importorskip("matplotlib")
    write_html(run(60), tmp_path / "run.html")
    return tmp_path / "run.html"


def test_its_policy_allows_its_own_script(page: Path) -> None:
    elements = render(page, 1280)
    assert '<div class="search">' in elements  # shown by the script
    assert elements.count('<button type="button">') == 15


@pytest.mark.parametrize("width", [400, 1280])
def test_it_is_legible_and_usable(page: Path, width: int) -> None:
    found = probe(page, width)
    assert found["width"] in (width, 500)  # some versions have a least width
    assert found["wider"] <= 0
    assert found["drawings"] == 6
    for text, height, *edges in found["texts"]:
        assert height >= 9, text
        assert min(edges) >= -1, (text, edges)  # not cut off
    assert found["searched"] == [10, "10 of 60 sources"]
    assert found["largest"] == ["source-59", "descending"]
    assert found["smallest"][1] == "ascending"
    assert found["smallest"][0].startswith("<b>")
    assert found["unreachable"] == 0
    assert found["reachable"] > 20
