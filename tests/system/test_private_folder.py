"""What lies in the folder is run as code: it is this user's alone, and nobody else can exchange it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megablend.errors import ResourceError
from megablend.system.private_folder import find_private_folder, private_kernel_folder, problem_with

NAME = Path("megablend") / "kernels"
OTHER = 65533
ROOT = Path(__file__).parent.parent.parent
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")


def found(*bases: Path) -> tuple[Path, list[str]]:
    return find_private_folder(bases, NAME, prefix="megablend-test-")


def test_a_folder_made_here_is_closed_to_others(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        folder, problems = found(tmp_path / "a" / "b")
    finally:
        os.umask(old)
    assert (folder, problems) == (tmp_path / "a" / "b" / NAME, [])
    for made in (folder, folder.parent, tmp_path / "a" / "b", tmp_path / "a"):
        assert made.stat().st_mode & 0o777 == 0o700
    assert found(tmp_path / "a" / "b") == (folder, [])


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o755, 0o777])
def test_a_folder_that_others_may_enter_is_not_taken(tmp_path: Path, mode: int) -> None:
    (tmp_path / "one" / NAME).mkdir(parents=True)
    (tmp_path / "one" / NAME).chmod(mode)
    folder, (problem,) = found(tmp_path / "one", tmp_path / "two")
    assert folder == tmp_path / "two" / NAME
    assert problem == f"{tmp_path}/one/megablend/kernels is open to other users (mode {mode:o})"


@pytest.mark.parametrize(
    ("mode", "is_taken"), [(0o755, True), (0o775, False), (0o757, False), (0o1777, True)]
)
def test_a_folder_above_that_others_may_write_to(tmp_path: Path, mode: int, is_taken: bool) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base").chmod(mode)
    folder, problems = found(tmp_path / "base", tmp_path / "next")
    assert folder == tmp_path / ("base" if is_taken else "next") / NAME
    assert problems == (
        [] if is_taken else [f"other users can write to {tmp_path}/base (mode {mode:o})"]
    )


def test_a_folder_of_ours_from_a_lenient_umask_is_closed(tmp_path: Path) -> None:
    (tmp_path / "megablend").mkdir()
    (tmp_path / "megablend").chmod(0o775)
    assert found(tmp_path) == (tmp_path / NAME, [])
    assert (tmp_path / "megablend").stat().st_mode & 0o777 == 0o755


def test_where_none_serves_a_new_one_is_made_and_removed_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code = (
        "from pathlib import Path; import os\n"
        "from megablend.system.private_folder import find_private_folder\n"
        f"folder, problems = find_private_folder([Path({str(tmp_path / 'file')!r})], Path('a'), prefix='megablend-test-')\n"
        "assert len(problems) == 1 and folder.stat().st_mode & 0o777 == 0o700\n"
        "if os.fork() == 0: raise SystemExit\n"
        "os.wait(); assert folder.is_dir(); print(folder)\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, check=True, cwd=ROOT
    )
    assert "megablend-test-" in done.stdout
    assert not Path(done.stdout.strip()).exists()


def test_a_circle_of_links_does_not_serve(tmp_path: Path) -> None:
    (tmp_path / "megablend").symlink_to(tmp_path / "megablend")
    folder, problems = found(tmp_path, tmp_path / "next")
    assert folder == tmp_path / "next" / NAME
    assert len(problems) == 1


@as_root
def test_a_folder_of_another_user(tmp_path: Path) -> None:
    (tmp_path / "theirs" / NAME).mkdir(parents=True, mode=0o700)
    os.chown(tmp_path / "theirs" / NAME, OTHER, OTHER)
    assert (
        problem_with(tmp_path / "theirs" / NAME)
        == f"{tmp_path}/theirs/megablend/kernels belongs to user {OTHER}"
    )
    (tmp_path / "inside").mkdir()
    os.chown(tmp_path / "inside", OTHER, OTHER)
    folder, problems = found(tmp_path / "theirs", tmp_path / "inside", tmp_path / "ours")
    assert folder == tmp_path / "ours" / NAME
    assert problems[1] == f"{tmp_path}/inside belongs to user {OTHER}"


@as_root
def test_a_link_by_another_user_leads_to_what_is_checked(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "megablend").symlink_to(tmp_path / "theirs")
    os.chown(tmp_path / "theirs", OTHER, OTHER)
    folder, problems = found(tmp_path / "base", tmp_path / "ours")
    assert folder == tmp_path / "ours" / NAME
    assert problems == [f"{tmp_path}/theirs belongs to user {OTHER}"]


def test_a_named_folder_that_does_not_serve_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv("MEGABLEND_KERNEL_CACHE", str(tmp_path / "open"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    with pytest.warns(
        RuntimeWarning,
        match=rf"MEGABLEND_KERNEL_CACHE={tmp_path}/open is not used: other users can write to .*open",
    ):
        folder = private_kernel_folder(Path("node"))
    assert folder == tmp_path / "xdg" / "megablend" / "private-kernels" / "node"
    monkeypatch.setenv("MEGABLEND_KERNEL_CACHE", str(tmp_path / "own"))
    assert (
        private_kernel_folder(Path("node"))
        == tmp_path / "own" / "megablend" / "private-kernels" / "node"
    )


def test_kernels_that_are_not_kept_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEGABLEND_KERNEL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    monkeypatch.setenv("HOME", "/proc")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "open"))
    says = r"not kept: each process compiles its own in .*/open/.*; set MEGABLEND_KERNEL_CACHE to a"
    with pytest.warns(RuntimeWarning, match=says):
        assert private_kernel_folder(Path("node")).parent == tmp_path / "open"
    monkeypatch.setattr(tempfile, "tempdir", "/proc")
    with pytest.raises(ResourceError, match=r"kernels cannot be stored.*; set MEGABLEND_KERNEL_C"):
        private_kernel_folder(Path("node"))


ATTACK = """
import os, sys
from pathlib import Path
os.setgid(65533); os.setuid(65533)
Path(sys.argv[1]).mkdir(parents=True)
"""
VICTIM = """
import os
import llvmlite.binding, numba
from megablend import jit
os.setgid(65532); os.setuid(65532)
print(jit.cache_dir(), flush=True)
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder as /tmp is, which users of all kinds reach."""
    folder = Path(tempfile.mkdtemp(prefix="megablend-test-"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def is_reached_by_all(folder: Path) -> bool:
    """Whether all users can enter a folder."""
    return all(each.stat().st_mode & 0o001 for each in (folder, *folder.parents))


@as_root
@pytest.mark.skipif(not is_reached_by_all(ROOT), reason="another user cannot reach this folder")
def test_a_folder_put_into_the_temporary_one_by_another_user_is_not_used(shared: Path) -> None:
    """Its name can be guessed; numba would load pickles from it."""
    planted = shared / "megablend-65532" / "megablend" / "private-kernels"
    environment = {
        **os.environ,
        "TMPDIR": str(shared),
        "HOME": "/nonexistent",
        "PYTHONPATH": str(ROOT),
    }
    environment = {
        k: v
        for k, v in environment.items()
        if k not in ("XDG_CACHE_HOME", "MEGABLEND_KERNEL_CACHE")
    }
    for code in (ATTACK, VICTIM):
        command = [sys.executable, "-c", code, str(planted)]
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
            cwd=ROOT,
        )
        assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{shared}/megablend-kernels-")
    assert list(planted.iterdir()) == []
