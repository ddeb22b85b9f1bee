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
from collections.abc import Mapping
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
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def install(folder: Path) -> str:
    """Install a package into an environment of its own, which also sees what this one has; its Python."""
    if not {"setuptools", "pip"} <= {each.name for each in importlib.metadata.distributions()}:
        pytest.skip("pip and setuptools are needed to install a package")
    venv.create(folder / "env", with_pip=False, symlinks=True)
    python = str(folder / "env" / "bin" / "python")
    paths = sysconfig.get_paths("venv", {"base": str(folder / "env"), "platbase": str(folder / "env")})
    megablend = importlib.util.find_spec("megablend")
    assert megablend is not None
    assert megablend.origin is not None
    seen = {*site.getsitepackages(), sysconfig.get_path("purelib")}
    lines = [
        *(f"import site; site.addsitedir({each!r})" for each in sorted(seen)),
        str(Path(megablend.origin).parent.parent),
    ]
    Path(paths["purelib"], "outer.pth").write_text("\n".join(lines))
    run(
        [python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", str(folder)],
        folder,
    )
    return python


SCRIPT = """
import json, sys, megablend
for config in json.loads(sys.argv[1]):
    megablend.build(config)
    data = megablend.open(config)
    assert megablend.verify(config["cache"], data=True).problems == ()
    print(json.dumps([data[k]["tokens"].tolist() for k in range(8)]))
"""


def list_samples(
    python: str, folder: Path, *sources: Mapping[str, object], **environment: str
) -> list[list[list[int]]]:
    """The samples of a run over each source, in a process of the environment."""
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
    return [
        json.loads(line)
        for line in run([python, "-c", SCRIPT, json.dumps(configs)], folder, **environment).splitlines()
    ]


def check_suite(python: str, folder: Path, least: int) -> None:
    passed = run([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"], folder)
    assert int(re.findall(r"(\d+) passed", passed)[0]) >= least


def test_a_format(tmp_path: Path) -> None:
    write_package("format.md", tmp_path)
    python = install(tmp_path)
    check_suite(python, tmp_path, 20)
    pytest.importorskip("torch")
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"ids": document}) + "\n" for document in DOCUMENTS))
    (samples,) = list_samples(python, tmp_path, {"path": "x.jsonl", "column": "ids"})
    text = json.dumps([token for document in DOCUMENTS for token in document] * 3)
    assert len(samples) == 8
    assert all(json.dumps(each)[1:-1] in text for each in samples), "samples are consecutive tokens of the file"


def test_a_storage(tmp_path: Path) -> None:
    write_package("storage.md", tmp_path)
    python = install(tmp_path)
    check_suite(python, tmp_path, 15)
    pytest.importorskip("torch")
    folder = tmp_path / "data" / "corpus"
    folder.mkdir(parents=True)
    np.save(folder / "x.npy", np.arange(300, dtype=np.int32))
    sources = {"path": str(folder / "x.npy")}, {"path": "team://corpus/*.npy"}
    plain, team = list_samples(python, tmp_path, *sources, TEAM_DATA=str(tmp_path / "data"))
    assert plain == team
