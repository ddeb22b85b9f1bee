"""The size of a file that may not exist: what `Path.is_file` and `Path.stat` say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megablend.system.safe_open import get_file_size


def test_only_regular_files_have_a_size(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"123")
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "dangling").symlink_to("nothing")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    expected = {"file": 3, "empty": 0, "link": 3}
    for name in (
        "file",
        "empty",
        "folder",
        "link",
        "dangling",
        "loop",
        "pipe",
        "absent",
        "file/below",
        "nul\0",
    ):
        assert get_file_size(f"{tmp_path}/{name}") == expected.get(name), name
        assert (tmp_path / name).is_file() == (name in expected), name


def test_other_errors_are_raised(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="File name too long"):
        get_file_size(f"{tmp_path}/{'x' * 300}")
