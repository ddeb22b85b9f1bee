"""The documentation is what it says: its links lead somewhere, its generated page is current, the README stays short."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.preloaded import python

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```", re.M | re.S)


def anchors(page: Path) -> set[str]:
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(_FENCE.sub("", page.read_text(encoding="utf-8"))):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


PLACE = re.compile(r"(?<![\w/.-])(?:megablend|tests|tools|configs)/[\w./-]*\w")


def test_files_and_folders_that_texts_name_are_there() -> None:
    """In the documentation, but for the changelog, which tells of earlier releases, and in scripts."""
    others = {"test_token_lines.py", "test_team_storage.py", "test_builder.py"}  # of other projects
    texts = [*PAGES, *(ROOT / "tools").rglob("*.py"), *(ROOT / "tools").glob("*.sh")]
    gone = [
        f"{path.relative_to(ROOT)}: {place}"
        for path in texts
        if path.name != "CHANGELOG.md"
        for place in PLACE.findall(path.read_text(encoding="utf-8"))
        if not (ROOT / place).exists() and Path(place).name not in others
    ]
    assert gone == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("[a](missing.md)", encoding="utf-8")
    with pytest.raises(AssertionError, match=r"missing\.md"):
        test_links_lead_somewhere(page)


def test_the_page_of_commands_is_current() -> None:
    """In a process of its own: click's commands keep the names of the help option that they were first asked with."""
    command = [sys.executable, str(ROOT / "tools" / "make_cli_docs.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_the_first_ten_lines_run_twice_with_the_same_batches(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "first_lines.md").read_text(encoding="utf-8")
    code = page.partition("```python\n")[2].partition("```")[0]
    outputs = []
    for _ in range(2):
        command = [*python(), "-c", code]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False
        )
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
    assert "torch.Size([8, 128])" in outputs[0]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 170


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in (ROOT / "docs").rglob("*.md"):
        assert str(page.relative_to(ROOT / "docs")) in navigation, page
