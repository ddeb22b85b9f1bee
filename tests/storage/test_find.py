"""Files that match a pattern: as glob finds them, and nothing left out silently."""

import errno
import glob
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from megablend.errors import DataError
from megablend.storage.find import SPECIAL, find_files
from megablend.storage.local import LocalStorage

PATTERNS = (
    "*",
    "*.x",
    "**",
    "**/*",
    "**/*.x",
    "*/*.x",
    "?/**/*.x",
    "**/b/*",
    "**/b/**/*.x",
    "[ab]/*",
    ".*/*",
    "a/*",
    "*/a.x",
)


def make_tree(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    folders = [folder]
    for _ in range(12):
        name = rng.choice(["a", "b", "c", ".d", "e.x"])
        folders.append(rng.choice(folders) / name)
        folders[-1].mkdir(exist_ok=True)
    for _ in range(30):
        path = rng.choice(folders) / rng.choice(["a.x", "b.x", "c.y", ".d.x", "e", "[f].x"])
        if not path.exists():
            path.write_text("")


@pytest.mark.parametrize("seed", range(4))
def test_it_finds_what_glob_finds(tmp_path: Path, seed: int) -> None:
    make_tree(tmp_path, seed)
    for pattern in PATTERNS:
        found = find_files(f"{tmp_path}/{pattern}")
        expected = {
            path
            for path in glob.glob(f"{tmp_path}/{pattern}", recursive=True)
            if Path(path).is_file()
        }
        assert [match.path for match in found.files] == sorted(expected), pattern
        assert found.unreadable == {}
        assert [match.real for match in found.files] == [
            os.path.realpath(match.path) for match in found.files
        ]


def test_a_relative_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tree(tmp_path, 0)
    monkeypatch.chdir(tmp_path)
    names = [match.path for match in find_files("**/*.x").files]
    assert names == sorted(
        path for path in glob.glob("**/*.x", recursive=True) if Path(path).is_file()
    )


def test_a_loop_of_links_ends_and_files_keep_their_own_names(tmp_path: Path) -> None:
    (tmp_path / "z" / "deep").mkdir(parents=True)
    (tmp_path / "z" / "deep" / "f.x").write_text("")
    (tmp_path / "z" / "deep" / "loop").symlink_to(tmp_path)
    (tmp_path / "a").symlink_to(tmp_path / "z")
    (tmp_path / "z" / "again").symlink_to(tmp_path / "z" / "deep")
    found = find_files(f"{tmp_path}/**/*.x")
    assert [match.path for match in found.files] == [f"{tmp_path}/z/deep/f.x"]
    assert found.unreadable == {}


def test_a_folder_outside_is_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "1234").write_text("")
    (tmp_path / "snapshots" / "v1").mkdir(parents=True)
    (tmp_path / "snapshots" / "v1" / "f.x").symlink_to("../../blobs/1234")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "latest").symlink_to("../snapshots/v1")
    (match,) = find_files(f"{tmp_path}/data/**/*.x").files
    assert match == (2, f"{tmp_path}/data/latest/f.x", f"{tmp_path}/blobs/1234")


def test_pipes_and_devices_are_reported(tmp_path: Path) -> None:
    (tmp_path / "a.x").write_text("")
    os.mkfifo(tmp_path / "b.x")
    (tmp_path / "c.x").symlink_to("/dev/null")
    os.mkfifo(tmp_path / "other.y")
    found = find_files(f"{tmp_path}/*.x")
    assert [match.path for match in found.files] == [f"{tmp_path}/a.x"]
    assert found.unreadable == dict.fromkeys([f"{tmp_path}/b.x", f"{tmp_path}/c.x"], SPECIAL)
    assert find_files(f"{tmp_path}/b.x").unreadable == {f"{tmp_path}/b.x": SPECIAL}


def test_links_to_nothing_are_reported(tmp_path: Path) -> None:
    (tmp_path / "f.x").symlink_to("nowhere")
    (tmp_path / "g.x").symlink_to("g.x")
    (tmp_path / "other.y").symlink_to("nowhere")
    found = find_files(f"{tmp_path}/*.x")
    assert found.files == []
    assert found.unreadable == {
        f"{tmp_path}/f.x": "a broken symbolic link (to nowhere)",
        f"{tmp_path}/g.x": "Too many levels of symbolic links (to g.x)",
    }
    assert list(find_files(f"{tmp_path}/f.x").unreadable) == [f"{tmp_path}/f.x"]
    (tmp_path / "folder").symlink_to("nowhere")
    assert f"{tmp_path}/folder" in find_files(f"{tmp_path}/**/*.x").unreadable, (
        "it may have been a folder of files"
    )


@pytest.mark.skipif(os.getuid() != 0, reason="only root can try as another user")
def test_folders_without_permission_are_reported(tmp_path: Path) -> None:
    for name in ("open", "closed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "f.x").write_text("")
    (tmp_path / "closed").chmod(0o700)
    for parent in (tmp_path, *tmp_path.parents[:-2]):
        parent.chmod(parent.stat().st_mode | 0o055)
    code = (
        "import os, sys; from megablend.storage.find import find_files; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "for pattern in sys.argv[1:]: found = find_files(pattern); print([m.path for m in found.files], found.unreadable)"
    )
    patterns = ("**/*.x", "*/*.x", "closed/f.x", "*/f.x")
    done = subprocess.run(
        [sys.executable, "-c", code, *(f"{tmp_path}/{pattern}" for pattern in patterns)],
        capture_output=True,
        text=True,
        timeout=500,
        env={
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "PATH": "/usr/bin",
            "PYTHONDONTWRITEBYTECODE": "1",
        },
    )
    assert done.returncode == 0, done.stderr
    closed = f"{tmp_path}/closed"
    reason = "'Permission denied'"
    assert done.stdout.splitlines() == [
        f"['{tmp_path}/open/f.x'] {{'{closed}': {reason}}}",
        f"['{tmp_path}/open/f.x'] {{'{closed}': {reason}}}",
        f"[] {{'{closed}/f.x': {reason}}}",
        f"['{tmp_path}/open/f.x'] {{'{closed}/f.x': {reason}}}",
    ]


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOTCONN, errno.ESTALE, errno.ETIMEDOUT])
def test_what_a_failing_file_system_hides_is_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Else `on_unreadable: skip` would build an index without files that are there again soon."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/a.x").write_text("a")
    (tmp_path / "link.x").symlink_to("folder/a.x")

    def fail(path: object, *_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    def fail_to_follow(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        """`Path.lstat` also calls `Path.stat`, but does not follow links."""
        if follow_symlinks:
            fail(path)
        return os.lstat(path)

    storage = LocalStorage()
    for module, name, failure, pattern in (
        (os, "scandir", fail, "folder/*.x"),
        (Path, "lstat", fail, "folder/a.x"),
        (Path, "stat", fail_to_follow, "link.x"),
    ):
        with monkeypatch.context() as failing:
            failing.setattr(module, name, failure)
            with pytest.raises(DataError, match=f"{tmp_path}.*: {os.strerror(number)}; "):
                storage.find(f"{tmp_path}/{pattern}")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert storage.is_readable(f"{tmp_path}/folder/a.x"), "it failed for a moment"
    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(DataError, match=f"a.x: cannot be read: {os.strerror(number)}; "):
        storage.is_readable(f"{tmp_path}/folder/a.x")
