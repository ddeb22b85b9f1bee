"""verify --data finds data that was moved by the paths of the config; without a config it says what to do."""

from pathlib import Path
from typing import Any

import megablend
from tests.formats.writers import KINDS
from tests.runs import documents, make_config, write_source


def make(folder: Path, **settings: Any) -> dict[str, Any]:
    source = write_source(folder, 0, "parquet", documents(0, 20, 30, 1), num_files=1)
    return make_config(folder, [source], samples=20, **settings)


def file_of(config: dict[str, Any]) -> Path:
    """The only file of the config's source."""
    (path,) = Path(config["sources"][0]["path"]).parent.iterdir()
    return path


def move(config: dict[str, Any], to: str) -> dict[str, Any]:
    """Move the folder of the config's only source; the config with its new path."""
    (source,) = config["sources"]
    folder = Path(source["path"]).parent
    folder.rename(folder.with_name(to))
    return config | {
        "sources": [source | {"path": str(folder.with_name(to) / Path(source["path"]).name)}]
    }


def test_the_paths_of_the_config_decide(tmp_path: Path) -> None:
    config = make(tmp_path)
    megablend.build(config)
    before = file_of(config)
    moved = move(config, "moved")
    assert megablend.check(moved).problems == ()
    assert megablend.verify(moved, data=True).problems == ()
    (problem,) = megablend.verify(config["cache"], data=True).problems
    assert problem.startswith(f"{before}: no such file")
    assert (
        "if the data was moved, set the new `path` in the config of run 'default', build (`megablend build CONFIG`), and verify "
        "with that config (`megablend verify --data CONFIG`)"
    ) in problem
    megablend.build(moved)
    assert megablend.verify(config["cache"], data=True).problems == ()


def test_an_index_without_a_run(tmp_path: Path) -> None:
    config = make(tmp_path)
    megablend.build_index(config)
    assert megablend.verify(move(config, "moved"), data=True).problems == ()
    (problem,) = megablend.verify(config["cache"], data=True).problems
    assert "set the new `path` in the config, build" in problem


def test_files_of_an_older_index_that_were_renamed(tmp_path: Path) -> None:
    config = make(tmp_path)
    megablend.build(config)
    path = file_of(config)
    path.rename(path.with_name("renamed.parquet"))
    megablend.build_index(config)
    assert megablend.verify(move(config, "moved"), data=True).problems == ()


def test_files_that_are_gone(tmp_path: Path) -> None:
    config = make(tmp_path)
    megablend.build(config)
    file_of(config).unlink()
    (problem,) = megablend.verify(config, data=True).problems
    assert megablend.check(config).problems[0].endswith(problem.partition("; ")[2])


def test_another_config_has_no_say_about_a_run(tmp_path: Path) -> None:
    """Its source has the same name, and a file of the same name elsewhere."""
    for name in "ab":
        (tmp_path / name).mkdir()
    config = make(tmp_path / "a", run="a")
    other = make(tmp_path / "b", run="b")
    other["cache"] = config["cache"]
    megablend.build(config)
    KINDS["parquet"].write(file_of(other), documents(0, 20, 30, 2))
    megablend.build(other)
    assert (
        megablend.verify(other, data=True).problems
        == megablend.verify(config, data=True).problems
        == ()
    )
    before = file_of(config)
    move(config, "moved")
    (problem,) = megablend.verify(other, data=True).problems
    assert problem.startswith(f"{before}: no such file")
    assert "in the config of run 'a'" in problem


def test_files_that_only_an_unused_index_has(tmp_path: Path) -> None:
    config = make(tmp_path)
    megablend.build_index(config)
    path = file_of(config)
    path.unlink()
    KINDS["parquet"].write(path.with_name("other.parquet"), documents(0, 20, 40, 1))
    megablend.build(config)
    (problem,) = megablend.verify(config, data=True).problems
    assert problem.startswith(f"{path}: no such file; it is in index ")
    assert (
        f"no run uses this index: `megablend gc {config['cache']} --older-than 0` removes it, with all"
        in problem
    )
    megablend.gc(config, older_than_days=0)
    assert megablend.verify(config, data=True).problems == ()
