"""The patches of docs/adding apply to this tree, touch few files of the package, and pass their tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SUITES = {
    "order-reversed": ("tests/order/test_contract.py", "reversed"),
    "interleaving-round-robin": ("tests/blend/interleavings/test_contract.py", "round_robin"),
    "storage-zip": ("tests/storage/test_zip.py", ""),
    "source-key-reading": (
        "tests/operations/test_expected_tokens.py tests/tools/test_examples.py",
        "expected_tokens or every_key_of_a_source",
    ),
}
"""Of each patch, the files of tests, and the name under which they test what the patch adds."""
MAX_FILES = {"source-key-reading": 6}
"""Files of the package that a patch may touch, if these are not two."""


def test_every_patch_has_a_suite() -> None:
    assert {path.stem for path in (ROOT / "docs" / "adding").glob("*.patch")} == set(SUITES)


@pytest.mark.parametrize("patch", SUITES)
def test_it_touches_few_files_of_the_package(patch: str) -> None:
    text = (ROOT / "docs" / "adding" / f"{patch}.patch").read_text(encoding="utf-8")
    touched = re.findall(r"^\+\+\+ b/(\S+)", text, re.M)
    num_files = sum(path.startswith("megablend/") for path in touched)
    assert 1 <= num_files <= MAX_FILES.get(patch, 2)
    assert all(path.startswith(("megablend/", "tests/", "docs/")) for path in touched)


@pytest.mark.parametrize("patch", SUITES)
def test_it_passes_its_contract_suite(tmp_path: Path, patch: str) -> None:
    for folder in ("megablend", "tests", "tools", "docs", "configs"):
        # Not what is compiled, for files keep their times
        ignored = shutil.ignore_patterns("golden", "releases")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    applied = subprocess.run(
        ["git", "apply", str(ROOT / "docs" / "adding" / f"{patch}.patch")],
        cwd=tmp_path,
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert applied.returncode == 0, applied.stderr
    suite, name = SUITES[patch]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *suite.split(),
        "-k",
        name,
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout
    assert int(passed[1]) >= 6, done.stdout


def test_the_suite_fails_where_an_order_leaves_out_tokens() -> None:
    """So that the tests above can fail."""
    from megablend.order.base import Spans
    from megablend.order.registry import OrderKind
    from megablend.order.sequential import SequentialOrder
    from megablend.testing.orders import OrderContract

    class Forgetful(SequentialOrder):
        def spans(self, starts: object, length: object) -> Spans:
            found = super().spans(starts, length)  # type: ignore[arg-type]
            return Spans(*(column[found.blocks > 0] for column in found))

    suite = OrderContract()
    suite.kind = OrderKind(Forgetful)
    with pytest.raises(AssertionError):
        suite.test_every_token_of_each_epoch_once()
