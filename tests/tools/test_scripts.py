"""The shell scripts say what is missing on a machine before they change anything."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parent.parent.parent / "tools"


def run_with_python(
    tmp_path: Path,
    script: str,
    *refuses: str,
    source: Path = TOOLS,
    environment: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a copy of a script with a Python that fails where its arguments contain one of `refuses`."""
    python = tmp_path / "python3"
    refused = "|".join(f'*"{text}"*' for text in refuses)
    python.write_text(
        f'#!/bin/sh\ncase "$*" in {refused}) exit 1;; esac\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    (tmp_path / "tools").mkdir()
    for name in (script, "common.sh"):
        (tmp_path / "tools" / name).write_bytes((source / name).read_bytes())
    return subprocess.run(
        ["bash", str(tmp_path / "tools" / script)],
        env={**os.environ, "PYTHON": str(python), **(environment or {})},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


@pytest.mark.parametrize("script", ["demo.sh", "test.sh", "soak.sh"])
def test_a_python_without_venv_is_refused_with_the_remedy(tmp_path: Path, script: str) -> None:
    result = run_with_python(tmp_path, script, "ensurepip", "import pip")
    assert result.returncode == 1
    assert "apt install python3-venv" in result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"python3", "tools"}


def test_an_environment_is_made_by_pip_where_ensurepip_is_a_package_of_its_own(
    tmp_path: Path,
) -> None:
    script = "make_environment.sh"
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / script).write_text(
        'set -euo pipefail\nsource "$(dirname "$0")/common.sh"\nmake_venv made\npip --version\n'
    )
    (tmp_path / "source" / "common.sh").write_bytes((TOOLS / "common.sh").read_bytes())
    ensurepip = pytest.importorskip("ensurepip")
    wheels = Path(ensurepip.__file__).parent / "_bundled"
    result = run_with_python(
        tmp_path,
        script,
        "import ensurepip",
        source=tmp_path / "source",
        environment={"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)},
    )
    assert result.returncode == 0, result.stderr
    assert f"from {tmp_path / 'made'}" in result.stdout


def test_an_old_python_is_refused_with_the_remedy(tmp_path: Path) -> None:
    result = run_with_python(tmp_path, "demo.sh", "version_info")
    assert result.returncode == 1
    assert "is too old: 3.10 or newer is needed" in result.stderr


@pytest.mark.parametrize("script", sorted(TOOLS.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_valid_bash(script: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)], timeout=500, check=False).returncode == 0
