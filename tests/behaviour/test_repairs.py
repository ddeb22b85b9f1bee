"""A damaged cache is repaired by the command that the message names, whichever index a run keeps."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import megablend
from megablend.errors import CacheError, DataError, StateError
from megablend.index.tables.list_snapshots import list_snapshots
from megablend.operations.build import build
from tests.behaviour.project import Project, commands_in, flip, truncate

TABLES = [
    "blocks.arrow",
    "chunks.arrow",
    "blocks.check.arrow",
    "chunks.check.arrow",
    "roots.json",
    "seen",
    "token_ranges",
]
FILES = ["files.arrow", "manifest.json"]


@pytest.fixture(params=[flip, truncate], ids=["flip", "truncate"])
def damage(request: pytest.FixtureRequest) -> Callable[[Path], None]:
    damage: Callable[[Path], None] = request.param
    return damage


@pytest.mark.parametrize("name", TABLES + FILES)
def test_the_newest_index(tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    project = Project(tmp_path)
    damage(project.kept / name)
    message = project.symptom()
    assert str(project.kept / name) in message
    project.run(*commands_in(message))
    assert project.symptom() == ""
    assert project.read() == project.tokens


@pytest.mark.parametrize("name", TABLES)
def test_an_index_that_a_run_keeps(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    project = Project(tmp_path)
    kept = project.kept
    project.add(1)
    project.run("build CONFIG")
    newest = list_snapshots(project.cache)[-1]
    assert project.kept == kept != project.cache / "generations" / newest
    damage(kept / name)
    message = project.symptom()
    assert str(kept / name) in message
    project.run(*commands_in(message))
    assert project.symptom() == ""
    assert project.read() == project.tokens
    assert (project.kept, list_snapshots(project.cache)[-1]) == (kept, newest)


def follow(project: Project) -> list[str]:
    """Do what `verify` says, literally, until it finds nothing more; all that it said."""
    said = list[str]()
    while problems := megablend.verify(project.path).problems:
        assert len(said) < 2, said
        said.append("\n".join(problems))
        for path in set(re.findall(r"remove (/[^\s,;]+)", said[-1])):
            shutil.rmtree(path) if Path(path).is_dir() else Path(path).unlink()
        for path in set(re.findall(r"(?m)^(/[^\s:]+): .*; remove it and ", said[-1])):
            Path(path).unlink()
        for command in sorted(set(commands_in(said[-1]))):
            project.run(command)
    return said


@pytest.mark.parametrize("name", TABLES + FILES)
def test_an_index_that_no_run_uses(tmp_path: Path, name: str) -> None:
    project = Project(tmp_path)
    unused = project.kept
    project.run("runs remove CONFIG default")
    project.add(1)
    project.run("build CONFIG")
    tokens = project.read()
    flip(unused / name)
    assert megablend.verify(project.path) == megablend.verify(project.cache)
    said = follow(project)
    remedy = f"no run uses this index: `megablend gc {project.cache} --older-than 0` removes it, with all others"
    assert said[-1].startswith(str(unused / name))
    assert remedy in said[-1]
    assert len(said) == 1 + (name == "roots.json"), (
        "damaged now, it may be the newest until the next build"
    )
    assert not unused.exists()
    assert project.read() == tokens


def test_an_index_that_no_run_uses_of_a_cache_whose_name_has_spaces(tmp_path: Path) -> None:
    project = Project(tmp_path / "my project's")
    unused = project.kept
    project.run("runs remove CONFIG default")
    project.add(1)
    project.run("build CONFIG")
    flip(unused / "blocks.arrow")
    (command,) = commands_in(project.symptom())
    project.run(command)
    assert not unused.exists()
    assert project.symptom() == ""


def test_an_index_that_no_run_uses_without_a_manifest(tmp_path: Path) -> None:
    project = Project(tmp_path)
    unused = project.kept
    project.run("runs remove CONFIG default")
    project.add(1)
    project.run("build CONFIG")
    (unused / "manifest.json").unlink()
    assert len(follow(project)) == 1
    assert not unused.exists()


def test_an_index_that_another_run_uses(tmp_path: Path) -> None:
    project = Project(tmp_path)
    kept = project.kept
    project.add(1)
    other = {**project.given, "run": "other"}
    build(other)
    flip(kept / "blocks.arrow")
    (problem,) = megablend.verify(other).problems
    assert problem.endswith(
        "build again with the config of run 'default' to repair it (`megablend build CONFIG`)"
    )
    assert megablend.verify(project.cache).problems == (problem,)
    assert len(follow(project)) == 1
    assert project.read() == project.tokens


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        ("parquet", "fragments/*"),
        ("parquet", "documents/*/*"),
        ("parquet", "checksums/*/*"),
        ("bin", "idx/*"),
    ],
)
def test_what_a_cache_has_of_files_that_no_config_has(
    tmp_path: Path, kind: str, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("megablend.formats.megatron.reader", "megablend.formats.megatron.lengths"):
        monkeypatch.setattr(f"{module}.WHOLE_BYTES", 64)
    project = Project(tmp_path, kind, order="document")
    project.run("build CONFIG --checksums")
    project.run("runs remove CONFIG default")
    for path in (tmp_path / "data").iterdir():
        path.unlink()
    project.add(1)
    project.run("build CONFIG")
    paths = [path for path in project.cache.glob(pattern) if path.stat().st_size]
    assert paths
    for path in paths:
        flip(path)
    assert len(follow(project)) == 1


@pytest.mark.parametrize("name", FILES)
def test_an_index_that_cannot_be_made_again(tmp_path: Path, name: str) -> None:
    project = Project(tmp_path)
    project.add(1)
    project.run("build CONFIG")
    shutil.copytree(project.cache, tmp_path / "backup")
    flip(project.kept / name)
    assert str(project.kept / name) in project.symptom()

    def refused() -> str:
        with pytest.raises(
            CacheError,
            match=r"run 'default' needs index [0-9a-f]+, but the files and config have changed",
        ) as caught:
            build(str(project.path))
        return str(caught.value)

    message = refused()
    assert "build CONFIG" not in commands_in(message), "that is what was run"
    assert "restore the old index from a backup, or reset the run" in message
    build({**project.given, "run": "other"})  # "give the run another name (`run:`)"
    (tmp_path / "data" / "1.parquet").rename(tmp_path / "1.parquet")
    project.run("build CONFIG")  # "restore both"
    assert project.read() == project.tokens
    (tmp_path / "1.parquet").rename(tmp_path / "data" / "1.parquet")
    flip(project.kept / name)
    refused()
    shutil.rmtree(project.kept)
    # "the old index from a backup"
    shutil.copytree(tmp_path / "backup" / "generations" / project.kept.name, project.kept)
    project.run("build CONFIG")
    assert project.read() == project.tokens
    flip(project.kept / name)
    for command in commands_in(refused()):  # "reset the run (...), and build again"
        project.run(command)
    project.run("build CONFIG")
    assert len(project.read()) == 150


def test_files_that_changed_are_no_repair(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.add(1)
    project.run("build CONFIG")
    pq.write_table(pa.table({"ids": [[9] * 9] * 300}), tmp_path / "data" / "0.parquet")
    flip(project.kept / "blocks.arrow")
    with pytest.raises(
        CacheError, match=r"blocks\.arrow: damaged table: .*\nrun 'default' needs index"
    ):
        build(str(project.path))
    (tmp_path / "data" / "0.parquet").unlink()
    with pytest.raises(DataError, match=r"0\.parquet: no such file"):
        build(str(project.path))
    project.add(0)
    project.run("build CONFIG")
    assert project.read() == project.tokens


DERIVED = {
    # what the cache has besides: (settings, kind, pattern of its files)
    "fragments": ({}, "parquet", "fragments/*"),
    "packs": ({}, "parquet", "packs/*"),
    "documents": ({"order": "row"}, "parquet", "documents/*/*.arrow"),
    "documents' manifest": ({"order": "row"}, "parquet", "documents/*/manifest.json"),
    "splits": ({"split": "90,5,5"}, "parquet", "splits/*"),
    "idx": ({}, "bin", "idx/*"),
}


@pytest.mark.parametrize("case", DERIVED)
def test_what_a_cache_has_besides_its_indexes(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, kind, pattern = DERIVED[case]
    if case == "packs":
        monkeypatch.setattr("megablend.index.build.packs.PACK_MIN_FILES", 1)
    if case == "idx":
        for module in ("megablend.formats.megatron.reader", "megablend.formats.megatron.lengths"):
            monkeypatch.setattr(f"{module}.WHOLE_BYTES", 64)
    project = Project(tmp_path, kind, **settings)
    paths = list(project.cache.glob(pattern))
    assert paths
    for path in paths:
        flip(path)
    message = project.symptom()
    if case == "splits":  # is counted again without a word
        assert message == ""
    else:
        assert str(paths[0].parent) in message
        for command in set(commands_in(message)):
            project.run(command)
        assert project.symptom() == ""
    assert project.read() == project.tokens


def test_a_table_of_documents_of_another_source(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    project = Project(tmp_path / "a", order="row")
    other = Project(tmp_path / "b", order="row", samples=10)
    other.add(1)
    other.path.write_text(json.dumps({**other.given, "run": "more"}))
    other.run("build CONFIG")
    (mine,) = (project.cache / "documents").iterdir()
    (theirs,) = (path for path in (other.cache / "documents").iterdir() if path.name != mine.name)
    shutil.rmtree(mine)
    shutil.copytree(theirs, mine)
    with pytest.raises(CacheError, match="remove that folder, then rebuild the index") as caught:
        project.read()
    shutil.rmtree(str(caught.value).partition(":")[0])
    project.run(*commands_in(str(caught.value)))
    assert project.read() == project.tokens


def test_a_table_of_documents_that_is_missing(tmp_path: Path) -> None:
    project = Project(tmp_path, order="row")
    shutil.rmtree(project.cache / "documents")
    with pytest.raises(CacheError, match="has no document table; rebuild the index") as caught:
        project.read()
    project.run(*commands_in(str(caught.value)))
    assert project.read() == project.tokens


def test_a_state_whose_index_is_gone(tmp_path: Path) -> None:
    project = Project(tmp_path)
    state = megablend.open(str(project.path)).state_dict()
    shutil.rmtree(project.kept)
    with pytest.raises(StateError, match="build the same data again") as caught:
        megablend.open(str(project.path), state=state)
    project.run(*commands_in(str(caught.value)))
    assert np.array_equal(
        megablend.open(str(project.path), state=state)[0]["tokens"], project.tokens[0]
    )
