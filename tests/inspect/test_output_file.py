"""Files that `export` and `describe --html` would write are refused where a run needs what is there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.cli.commands import run
from tests.inspect.test_find import make_run

CONFIG = "found the config, expected a file that may be replaced; write to another file"
DATA = r"found a data file of source 's{}', expected a file that may be replaced; write to another file"
CACHE = "found a path inside the cache .*, expected one outside it; write to another folder"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    settings, _ = make_run(tmp_path)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def export(what: Path, target: Path) -> tuple[int, str]:
    return end("export", what, target, *(["--run", "demo"] if what.is_dir() else []))


def describe(what: Path, target: Path) -> tuple[int, str]:
    return end("describe", what, "--html", target)


def end(*arguments: object) -> tuple[int, str]:
    done = run(*arguments)
    return done.returncode, done.stderr


def link(folder: Path, to: Path) -> Path:
    """A link of another name; a hard one."""
    path = folder / "linked"
    path.hardlink_to(to)
    return path


@pytest.mark.parametrize("write", [export, describe])
def test_what_a_run_needs_is_not_replaced(
    tmp_path: Path, config: Path, write: Callable[[Path, Path], tuple[int, str]]
) -> None:
    (tmp_path / "here").symlink_to(tmp_path, target_is_directory=True)
    targets = [
        (config, CONFIG),
        (tmp_path / "source0" / ".." / "run.yaml", CONFIG),
        (tmp_path / "source0" / "0.parquet", DATA.format(0)),
        (tmp_path / "here" / "source2" / "1.arrow", DATA.format(2)),
        (tmp_path / "source1" / "0.bin", DATA.format(1)),
        (tmp_path / "source1" / "1.idx", DATA.format(1)),
        (link(tmp_path, tmp_path / "source0" / "1.parquet"), DATA.format(0)),
        (tmp_path / "cache" / "runs" / "demo.json", CACHE),
        (tmp_path / "here" / "cache" / "new", CACHE),
    ]
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for target, message in targets:
        code, said = write(config, target)
        assert (code, re.search(message, said) is not None) == (2, True), (target, said)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_the_ledger_alone_says_which_files_are_needed(tmp_path: Path, config: Path) -> None:
    code, said = export(tmp_path / "cache", tmp_path / "source0" / "0.parquet")
    assert (code, "found a data file of source 's0'" in said) == (2, True)
    assert export(tmp_path / "cache", config)[0] == 0  # a cache does not know its configs


def test_data_that_was_moved_is_not_replaced(tmp_path: Path, config: Path) -> None:
    (tmp_path / "source0").rename(tmp_path / "moved")
    config.write_text(config.read_text().replace("/source0/", "/moved/"))
    assert export(config, tmp_path / "moved" / "0.parquet")[0] == 2


def test_other_files_are_replaced(tmp_path: Path, config: Path) -> None:
    for name in ("order.parquet", "0.parquet", "data/s0/new.parquet"):
        target = tmp_path / "out" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("earlier")
        assert export(config, target) == (0, "")
        assert target.read_bytes()[:4] == b"PAR1"


def test_a_place_that_cannot_be_written_is_named(config: Path) -> None:
    code, said = describe(config, Path("/proc/page.html"))
    assert code == 3
    assert re.search(r"/proc/\S+: cannot write the page \(.*\); ", said)
