"""The documentation is what it says: its links lead somewhere, its generated page is current, the README stays short."""

from __future__ import annotations

import ast
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


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("[a](missing.md)", encoding="utf-8")
    with pytest.raises(AssertionError, match=r"missing\.md"):
        test_links_lead_somewhere(page)


def test_the_page_of_commands_is_current() -> None:
    """In a process of its own: click's commands keep the names of the help option that they were first asked with."""
    command = [sys.executable, str(ROOT / "tools" / "make_cli_docs.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_the_first_ten_lines_run_twice_with_the_same_batches(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "first_lines.md").read_text(encoding="utf-8")
    code = page.partition("```python\n")[2].partition("```")[0]
    outputs = []
    for _ in range(2):
        command = [*python(), "-c", code]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
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


def definitions(path: Path) -> set[str]:
    """Functions, classes and constants at the top of a module, and methods as `Class.method`."""
    names = set[str]()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (each for each in node.body if isinstance(each, ast.FunctionDef))
            names.update(f"{node.name}.{method.name}" for method in methods)
    return names


def sections_of_names() -> list[str]:
    """Sections of the architecture whose tables name functions with their files."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    titles = "The walk of one sample", "The way of a page", "A key of a source"
    return [page.partition(f"\n## {title}\n")[2].partition("\n## ")[0] for title in titles]


def test_functions_of_the_architecture_are_where_it_says() -> None:
    found = 0
    for section in sections_of_names()[:2]:
        rows = [row.strip("|").split("|") for row in section.splitlines() if row.endswith("` |")]
        assert 10 <= len(rows) <= 25
        for *_, functions, files in rows:
            names = re.findall(r"`([\w.]+)`", functions)
            defined = [
                definitions(ROOT / "megablend" / file) for file in re.findall(r"`([\w/.]+)`", files)
            ]
            assert all(any(name in names for name in names_of) for names_of in defined), files
            missing = [name for name in names if not any(name in each for each in defined)]
            assert not missing, f"{missing} not in {files}"
            found += len(names)
    assert found > 40


def test_names_in_its_text_are_in_the_file_beside_them() -> None:
    pairs = [
        (name, file)
        for section in sections_of_names()
        for name, file in re.findall(r"`(\w+)`(?:, `\w+`)* (?:in |\()`([\w/]+\.py)`", section)
    ]
    assert len(pairs) >= 8
    for name, file in pairs:
        assert name in definitions(ROOT / "megablend" / file), f"{name} not in {file}"
