"""The packages of docs/adding, as they are printed: they install, megablend finds them, and they pass their contract suites."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import site
import subprocess
import sysconfig
import venv
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent.parent
BLOCK = re.compile(r"^```\w+ title=\"([^\"]+)\"\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DOCUMENTS = [[i % 50, *range(i % 7)] for i in range(40)]


def write_package(page: str, folder: Path) -> None:
    """The files that a page prints."""
    for title, text in BLOCK.findall((ROOT / "docs" / "adding" / page).read_text(encoding="utf-8")):
        (folder / title).parent.mkdir(parents=True, exist_ok=True)
        (folder / title).write_text(text, encoding="utf-8")


def run(command: list[str], folder: Path, **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": "", **environment},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


PAGES = ("format", "storage")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the packages, each in one by the name of its page."""
    folder = tmp_path_factory.mktemp("packages")
    for page in PAGES:
        write_package(f"{page}.md", folder / page)
    return folder


@pytest.fixture(scope="module")
def python(folder: Path) -> str:
    """Install the packages into an environment of their own, which also sees what this one has; its Python."""
    if not {"setuptools", "pip"} <= {each.name for each in importlib.metadata.distributions()}:
        pytest.skip("pip and setuptools are needed to install a package")
    # Python 3.10 has no scheme of that name, and lays out environments by the other
    scheme = "venv" if "venv" in sysconfig.get_scheme_names() else "posix_prefix"
    venv.create(folder / "env", with_pip=False, symlinks=True)
    python = str(folder / "env" / "bin" / "python")
    paths = sysconfig.get_paths(
        scheme, {"base": str(folder / "env"), "platbase": str(folder / "env")}
    )
    megablend = importlib.util.find_spec("megablend")
    assert megablend is not None
    assert megablend.origin is not None
    seen = {*site.getsitepackages(), sysconfig.get_path("purelib")}
    lines = [
        *(f"import site; site.addsitedir({each!r})" for each in sorted(seen)),
        str(Path(megablend.origin).parent.parent),
    ]
    Path(paths["purelib"], "outer.pth").write_text("\n".join(lines))
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    run([python, "-m", "pip", "install", *options, *(f"./{page}" for page in PAGES)], folder)
    return python


@pytest.fixture(scope="module")
def passed(python: str, folder: Path) -> Counter[str]:
    """Of each page, how many tests of its suite passed."""
    folders = [f"{page}/tests" for page in PAGES]
    shown = run(
        [python, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--rootdir=.", *folders], folder
    )
    return Counter(re.findall(r"^(\w+)/tests/.* PASSED", shown, re.MULTILINE))


SCRIPT = """
import json, sys, megablend
for config in json.loads(sys.argv[1]):
    megablend.build(config)
    data = megablend.open(config)
    assert megablend.verify(config["cache"], data=True).problems == ()
    print(json.dumps([data[k]["tokens"].tolist() for k in range(8)]))
"""


Samples = list[list[int]]


@pytest.fixture(scope="module")
def samples(python: str, folder: Path) -> list[Samples]:
    """The samples of runs over a file of the format, over a plain file, and over the same in the storage."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    (folder / "x.jsonl").write_text(
        "".join(json.dumps({"ids": document}) + "\n" for document in DOCUMENTS)
    )
    (folder / "data" / "corpus").mkdir(parents=True)
    np.save(folder / "data" / "corpus" / "x.npy", np.arange(300, dtype=np.int32))
    sources: list[dict[str, str]] = [
        {"path": "x.jsonl", "column": "ids"},
        {"path": str(folder / "data" / "corpus" / "x.npy")},
        {"path": "team://corpus/*.npy"},
    ]
    configs = [
        {
            "cache": str(folder / f"cache{number}"),
            "sequence_length": 16,
            "samples": 8,
            "seed": 1,
            "sources": [{"name": "a", "weight": 1, **source}],
        }
        for number, source in enumerate(sources)
    ]
    shown = run([python, "-c", SCRIPT, json.dumps(configs)], folder, TEAM_DATA=str(folder / "data"))
    return [json.loads(line) for line in shown.splitlines()]


def test_a_format(passed: Counter[str], samples: list[Samples]) -> None:
    assert passed["format"] >= 20
    text = json.dumps([token for document in DOCUMENTS for token in document] * 3)
    assert len(samples[0]) == 8
    assert all(json.dumps(each)[1:-1] in text for each in samples[0]), (
        "samples are consecutive tokens of the file"
    )


def test_a_storage(passed: Counter[str], samples: list[Samples]) -> None:
    assert passed["storage"] >= 15
    _, plain, team = samples
    assert plain == team
