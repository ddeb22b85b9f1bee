"""Nothing is followed that another user may have put into a shared folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import megablend
from megablend.errors import CacheError
from megablend.system.atomic_write import open_part, write_flushed
from megablend.system.build_lock import build_lock
from megablend.system.safe_open import check_folder
from tests.runs import documents, make_config, write_source

OTHER = 65533
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make another user's link")


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    source = write_source(tmp_path, 0, "parquet", documents(0, 20, 30, 1)) | {"weight": 1}
    return make_config(tmp_path, [source], samples=20, run="demo")


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    (tmp_path / "precious").write_text("mine")
    return tmp_path / "precious"


@pytest.mark.parametrize("kind", ["symbolic", "hard", "dangling", "pipe", "folder"])
def test_a_lock_that_is_a_link_is_refused(tmp_path: Path, precious: Path, kind: str) -> None:
    lock = tmp_path / "cache" / ".lock"
    lock.parent.mkdir()
    if kind == "hard":
        lock.hardlink_to(precious)
    elif kind == "pipe":
        os.mkfifo(lock)
    elif kind == "folder":
        lock.mkdir()
    else:
        lock.symlink_to(precious if kind == "symbolic" else tmp_path / "new")
    with (
        pytest.raises(CacheError, match=rf"{lock}: cannot write the cache \("),
        build_lock(tmp_path / "cache"),
    ):
        pass
    assert precious.read_text() == "mine"
    assert not (tmp_path / "new").exists()


def test_a_build_and_a_collection_leave_the_target_of_a_lock_alone(
    config: dict[str, Any], precious: Path
) -> None:
    megablend.build(config)
    lock = Path(config["cache"]) / ".lock"
    lock.unlink()
    lock.symlink_to(precious)
    for attempt in (
        lambda: megablend.build(config),
        lambda: megablend.gc(config["cache"], older_than_days=0),
    ):
        with pytest.raises(
            CacheError,
            match=r"\.lock: cannot write the cache .*links are not followed for security reasons",
        ):
            attempt()
    assert precious.read_text() == "mine"


def test_new_files_and_parts_follow_no_link(tmp_path: Path, precious: Path) -> None:
    (tmp_path / "link").symlink_to(precious)
    with pytest.raises(FileExistsError):
        write_flushed(tmp_path / "link", [b"other"])
    with pytest.raises(OSError, match="symbolic link"):
        open_part(tmp_path / "link")
    assert precious.read_text() == "mine"


@pytest.mark.parametrize("folder", ["runs", "fragments", "generations", "splits"])
def test_final_names_that_are_links_are_replaced_not_followed(
    config: dict[str, Any], precious: Path, folder: str
) -> None:
    megablend.build(config)
    for path in (Path(config["cache"]) / folder).rglob("*"):
        if path.is_file() and path.parent.name == folder:
            path.unlink()
            path.symlink_to(precious)
    if folder == "runs":
        with pytest.raises(CacheError, match="cannot read the run's ledger"):
            megablend.build(config)
    else:
        megablend.build(config)
        assert megablend.verify(config["cache"]).problems == ()
    assert precious.read_text() == "mine"


@as_root
@pytest.mark.parametrize(
    "folder", ["fragments", "generations", "documents", "lengths", "splits", "runs"]
)
def test_a_folder_that_another_user_made_a_link_is_refused(
    config: dict[str, Any], tmp_path: Path, folder: str
) -> None:
    """A collection of garbage would remove what lies where it leads."""
    megablend.build(config)
    home = tmp_path / "home"
    home.mkdir()
    for name in ("letter", ".tmp-letter"):
        (home / name).write_text("mine")
        os.utime(home / name, (0, 0))
    link = Path(config["cache"]) / folder
    if link.exists():
        link.rename(tmp_path / "aside")
    link.symlink_to(home)
    os.chown(link, OTHER, OTHER, follow_symlinks=False)
    says = rf"{link}: cannot (write|read) the cache \(it is a symbolic link to {home}, created by user {OTHER}\)"
    for attempt in (
        lambda: megablend.build(config),
        lambda: megablend.gc(config["cache"], older_than_days=0),
    ):
        with pytest.raises(CacheError, match=says):
            attempt()
    assert sorted(path.name for path in home.iterdir()) == [".tmp-letter", "letter"]


def skip_sample(config: dict[str, Any]) -> None:
    megablend.skip(config, 0, 1, batch_size=1)


@as_root
@pytest.mark.parametrize("folder", ["runs", "runs/skips", "runs/reset", "runs/reset/demo"])
@pytest.mark.parametrize(
    "attempt",
    [
        lambda config: megablend.remove_run(config, "demo"),
        lambda config: megablend.reset_run(config, "demo"),
        lambda config: megablend.rename_run(config, "demo", "other"),
        skip_sample,
    ],
    ids=["remove", "reset", "rename", "skip"],
)
def test_runs_in_a_folder_that_another_user_made_a_link_are_left_alone(
    config: dict[str, Any], tmp_path: Path, folder: str, attempt: Callable[[dict[str, Any]], object]
) -> None:
    megablend.build(config)
    megablend.skip(config, 4, 5, batch_size=1)
    home = tmp_path / "home"
    link = Path(config["cache"]) / folder
    link.parent.mkdir(exist_ok=True)
    if link.exists():
        shutil.copytree(link, home)
        shutil.rmtree(link)
    for name in ("demo", "reset/demo", "skips"):
        (home / name).mkdir(parents=True, exist_ok=True)
        (home / name / "letter").write_text("mine")
    before = sorted(home.rglob("*"))
    link.symlink_to(home)
    os.chown(link, OTHER, OTHER, follow_symlinks=False)
    with pytest.raises(
        CacheError,
        match=rf"{link}: cannot (write|read) the cache \(it is a symbolic link to {home}, ",
    ):
        attempt(config)
    assert sorted(home.rglob("*")) == before


def test_a_link_of_ones_own_is_followed(config: dict[str, Any], tmp_path: Path) -> None:
    """As for a cache whose fragments lie on another disk."""
    (tmp_path / "other disk").mkdir()
    Path(config["cache"]).mkdir()
    (Path(config["cache"]) / "fragments").symlink_to(tmp_path / "other disk")
    megablend.build(config)
    assert list((tmp_path / "other disk").iterdir())
    check_folder(Path(config["cache"]) / "fragments")
    check_folder(tmp_path / "not there")
    assert megablend.verify(config["cache"], data=True).problems == ()


def test_what_a_link_in_a_folder_leads_to_is_not_removed(
    config: dict[str, Any], tmp_path: Path
) -> None:
    megablend.build(config)
    (tmp_path / "album").mkdir()
    (tmp_path / "album" / "photo").write_text("mine")
    link = Path(config["cache"]) / "documents" / "album"
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(tmp_path / "album")
    os.utime(link, (0, 0), follow_symlinks=False)
    megablend.gc(config["cache"], older_than_days=0)
    assert not link.is_symlink()
    assert (tmp_path / "album" / "photo").read_text() == "mine"
    assert json.loads((Path(config["cache"]) / "runs" / "demo.json").read_text())["run"] == "demo"
