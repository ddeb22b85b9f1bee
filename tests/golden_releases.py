"""Data, caches, ledgers and states that releases wrote. Made by tools/make_golden_release.py, and never changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "releases"
RELEASES = sorted(path.name for path in FOLDER.glob("v*"))


def copy_release(name: str, folder: Path) -> Path:
    """A copy in which tests may write; nothing in it says where it is."""
    return Path(shutil.copytree(FOLDER / name, folder / name))


def load_expected(name: str) -> dict[str, Any]:
    """What the release read; see tools/make_golden_release.py."""
    found: dict[str, Any] = json.loads((FOLDER / name / "expected.json").read_text())
    return found
