import os
from pathlib import Path

import numpy as np
import pytest

from megablend.kernels.new_files import AVAILABLE, contains_any, rename_files, write_new_files

FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
pytestmark = pytest.mark.skipif(not AVAILABLE, reason="another libc")


def write(folder: Path, contents: dict[str, bytes]) -> int:
    """Lay the contents apart from each other in a buffer, and write them."""
    names = b"".join(name.encode() + b"\0" for name in contents)
    name_ends = np.cumsum([len(name) + 1 for name in contents])
    data = b"".join(content + b"--" for content in contents.values())
    sizes = np.array([len(content) for content in contents.values()])
    starts = np.cumsum(sizes + 2) - sizes - 2
    fd = os.open(folder, os.O_RDONLY)
    name_starts = name_ends - [len(name) + 1 for name in contents]
    try:
        return write_new_files(
            fd,
            FLAGS,
            np.frombuffer(names, np.uint8),
            name_starts,
            np.frombuffer(data, np.uint8),
            starts,
            sizes,
        )
    finally:
        os.close(fd)


def test_contents(tmp_path: Path) -> None:
    contents = {"a": b"one", "empty": b"", "c" * 200: bytes(range(256)) * 4000}
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert write(tmp_path, contents) == 3
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == contents
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert all(path.stat().st_mode & 0o777 == 0o666 & ~umask() for path in tmp_path.iterdir())


def umask() -> int:
    found = os.umask(0o22)
    os.umask(found)
    return found


def test_it_stops_at_what_the_system_refuses(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    assert write(tmp_path, {"a": b"one", "link": b"two", "c": b"three"}) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"a", "link"}
    assert write(tmp_path, {"n" * 300: b"too long a name"}) == 0


def test_a_full_device_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "full").symlink_to("/dev/full")
    fd = os.open(tmp_path, os.O_RDONLY)
    zero = np.zeros(1, np.int64)
    try:
        found = write_new_files(
            fd,
            os.O_WRONLY,
            np.frombuffer(b"full\0", np.uint8),
            zero,
            np.zeros(9, np.uint8),
            zero,
            zero + 9,
        )
    finally:
        os.close(fd)
    assert found == 0


def test_names(tmp_path: Path) -> None:
    """Files are moved in order, up to the one that the system refuses; a name there already is replaced."""
    source = tmp_path / "source"
    target = tmp_path / "target"
    source.mkdir()
    target.mkdir()
    write(source, {"a": b"one", "b": b"two", "c": b"three"})
    (target / "a").write_bytes(b"before")
    names = np.frombuffer(b"b\0a\0missing\0c\0", np.uint8)
    starts = np.array([0, 2, 4, 12])
    first, second = (os.open(folder, os.O_RDONLY) for folder in (source, target))
    try:
        assert contains_any(second, names, starts)
        assert not contains_any(second, names, starts[:1])
        assert rename_files(first, second, names, starts) == 2
        assert rename_files(first, second, names, starts[3:]) == 1
    finally:
        os.close(first)
        os.close(second)
    assert list(source.iterdir()) == []
    assert {path.name: path.read_bytes() for path in target.iterdir()} == {
        "a": b"one",
        "b": b"two",
        "c": b"three",
    }
