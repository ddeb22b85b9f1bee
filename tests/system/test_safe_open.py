"""Files are read with no more memory than they need; the size of a file that may not exist is what
`Path.is_file` and `Path.stat` say."""

from __future__ import annotations

import mmap
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from megablend.system.safe_open import get_file_size, map_descriptor, read_regular


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


def test_a_small_file_is_read_where_memory_is_limited(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"123")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), limits[1]))
    try:
        assert read_regular(tmp_path / "file") == b"123"
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_a_file_above_the_limit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"123")
    assert read_regular(tmp_path / "file", 3) == b"123"
    with pytest.raises(OSError, match="it has 3 bytes, expected at most 2"):
        read_regular(tmp_path / "file", 2)


def test_a_file_is_mapped_where_mappings_cannot_be_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FUSE file systems with `direct_io` refuse those that are (ENODEV)."""
    asked: list[int] = []

    real = mmap.mmap

    def make(fd: int, size: int, flags: int = mmap.MAP_SHARED, **settings: Any) -> mmap.mmap:
        asked.append(flags)
        return real(fd, size, flags=flags, **settings)

    monkeypatch.setattr(mmap, "mmap", make)
    (tmp_path / "file").write_bytes(b"123")
    with (tmp_path / "file").open("rb") as file:
        mapped = map_descriptor(file.fileno())
        assert bytes(map_descriptor(file.fileno(), 2)) == b"12"
    assert bytes(mapped) == b"123"
    assert memoryview(mapped).readonly
    assert asked == [mmap.MAP_PRIVATE] * 2
