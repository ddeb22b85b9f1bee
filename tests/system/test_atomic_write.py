from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from megablend.system.atomic_write import open_part


def test_a_part_is_written_among_others_and_nothing_is_read(tmp_path: Path) -> None:
    path = tmp_path / "shared"
    path.write_bytes(bytes(range(10)))
    with open_part(path) as file:
        assert fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
        file.seek(3)
        file.write(b"abc")
    assert path.read_bytes() == b"\0\1\2abc\6\7\x08\x09"


def test_a_file_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_part(tmp_path / "shared")
    assert not (tmp_path / "shared").exists()
