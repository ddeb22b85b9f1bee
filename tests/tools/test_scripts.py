"""The shell scripts say what is missing on a machine before they change anything."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parent.parent.parent / "tools"


def run_with_python(tmp_path: Path, script: str, refuses: str) -> subprocess.CompletedProcess[str]:
    """Run a copy of a script with a Python that fails where its arguments contain `refuses`."""
    python = tmp_path / "python3"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *{refuses}*) exit 1;; esac\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    (tmp_path / "tools").mkdir()
    for name in (script, "common.sh"):
        (tmp_path / "tools" / name).write_bytes((TOOLS / name).read_bytes())
    environment = {**os.environ, "PYTHON": str(python)}
    return subprocess.run(
        ["bash", str(tmp_path / "tools" / script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


@pytest.mark.parametrize("script", ["demo.sh", "test.sh", "soak.sh"])
def test_a_python_without_venv_is_refused_with_the_remedy(tmp_path: Path, script: str) -> None:
    result = run_with_python(tmp_path, script, "ensurepip")
    assert result.returncode == 1
    assert "apt install python3-venv" in result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"python3", "tools"}


def test_an_old_python_is_refused_with_the_remedy(tmp_path: Path) -> None:
    result = run_with_python(tmp_path, "demo.sh", "version_info")
    assert result.returncode == 1
    assert "is too old: 3.10 or newer is needed" in result.stderr


@pytest.mark.parametrize("script", sorted(TOOLS.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_valid_bash(script: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)], timeout=500, check=False).returncode == 0
