"""Remedies of runs, states, loaders, memory and locks: each is done as its message says, and then it works."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

import megablend
from megablend.errors import MegablendError
from megablend.index.cache_folders import external_references_dir
from megablend.index.manifest import dump_with_checksum, read_manifest
from tests.api.test_repairs import Project, commands_in, flip, truncate

Remedy = Callable[..., Any]
"""Of the project, and of the message where it follows one."""


class Fault(NamedTuple):
    """A fault, what its message says, and the ways out that it names: each alone makes `works` pass."""

    make: Remedy
    fails: Remedy
    says: str
    remedies: list[Remedy]
    works: Remedy | None = None
    """`fails` where absent: it does not fail any more."""


def configure(**settings: Any) -> Remedy:
    """Change the config; None removes a key."""

    def change(project: Project, *_: str) -> None:
        given = {**json.loads(project.path.read_text()), **settings}
        project.path.write_text(json.dumps({key: value for key, value in given.items() if value is not None}))

    return change


def run_named(project: Project, message: str) -> None:
    """Run the commands that the message names."""
    assert commands_in(message)
    for command in commands_in(message):
        project.run(command)


def then(*steps: Remedy) -> Remedy:
    def remedy(project: Project, message: str) -> None:
        for step in steps:
            step(project, message)

    return remedy


def build(project: Project, *_: str) -> None:
    megablend.build(str(project.path))


def read(project: Project, *_: str) -> None:
    dataset = megablend.open(str(project.path))
    assert all(len(dataset[k]["tokens"]) for k in range(len(dataset)))


def damage_ledger(damage: Callable[[Path], None]) -> Remedy:
    """Damage the run's ledger, of which there is a backup."""

    def change(project: Project) -> None:
        shutil.copytree(project.cache, project.folder / "backup")
        damage(project.cache / "runs" / "default.json")

    return change


def restore_ledger(project: Project, *_: str) -> None:
    shutil.copy(project.folder / "backup" / "runs" / "default.json", project.cache / "runs" / "default.json")


def set_memory(project: Project, message: str) -> None:
    """Set `memory` to what the message says is enough."""
    value = re.search(r"expected ([0-9.]+ ?[kKMGT]?i?B?)", message)
    assert value, message
    configure(memory=value[1])(project, message)


def load(project: Project, **arguments: Any) -> None:
    batches = list(megablend.Loader(megablend.open(str(project.path)), micro_batch_size=2, **arguments))
    assert batches


def gc(project: Project, *_: str) -> None:
    megablend.gc(str(project.cache), older_than_days=0)


def remove_named(project: Project, message: str) -> None:
    """Remove the file that the message begins with."""
    Path(message.partition(":")[0]).unlink()


def write_reference(project: Project) -> None:
    folder = external_references_dir(project.cache)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "x.json").write_text("{")


def open_state(project: Project, change: dict[str, Any], **arguments: Any) -> Any:
    state = megablend.open(str(project.path)).state_dict()
    return megablend.open(str(project.path), **arguments).load_state_dict({**state, **change})


def newer_format(project: Project) -> None:
    manifest = {**read_manifest(project.kept), "format_version": 9}
    (project.kept / "manifest.json").write_bytes(dump_with_checksum(manifest))


def name_column(project: Project) -> None:
    """Let the config name the column, which the run's index was not asked for."""
    configure(sources=[{**project.given["sources"][0], "column": "ids"}])(project)


def check_and_restore(project: Project, message: str) -> None:
    for command in commands_in(message):
        assert "0.parquet" in project.run(command, code=3)
    shutil.move(project.folder / "0.parquet", project.folder / "data" / "0.parquet")


FAULTS: dict[str, Fault] = {
    "no index": Fault(
        lambda project: shutil.rmtree(project.cache),
        lambda project: megablend.check(str(project.path)),
        "holds no index; run `megablend build CONFIG` first",
        [run_named],
    ),
    "no run": Fault(
        configure(run="new"), read, "run 'new' was not built there; run `megablend build CONFIG` first", [run_named]
    ),
    "a longer run": Fault(
        configure(samples=160), read, "asks for 160; run `megablend build CONFIG` to lengthen it", [run_named]
    ),
    "a damaged ledger": Fault(
        damage_ledger(flip),
        build,
        r"default\.json: .*(damaged|cannot read the run's ledger).*; restore it from a backup, or reset the run",
        [restore_ledger, then(run_named, build)],
        read,
    ),
    "a cut ledger": Fault(
        damage_ledger(truncate),
        read,
        r"default\.json: the ledger's checksum is damaged; restore it from a backup, or reset the run",
        [restore_ledger, then(run_named, build)],
    ),
    "another column": Fault(
        name_column,
        read,
        r"run 'default' .* source 'a' has column None; the config has 'ids'; give the run another name",
        [then(configure(run="other"), build), lambda project, _: configure(**project.given)(project)],
    ),
    "a newer format": Fault(
        newer_format,
        read,
        "this megablend reads up to version 1: upgrade megablend, or build into another cache",
        [then(lambda project, _: configure(cache=str(project.folder / "other"))(project), build)],
    ),
    "a reference from elsewhere": Fault(
        write_reference, gc, r"x\.json: cannot be read .*; remove the file if it is damaged", [remove_named]
    ),
    "memory for a sample": Fault(
        configure(memory=100),
        read,
        r"memory: found 0\.1 KiB, expected 0\.3 KiB or more, the size of one sample of",
        [set_memory],
    ),
    "memory for a loader": Fault(
        configure(memory="4KiB"),
        load,
        r"memory: found 4.0 KiB, expected \S+ \S+ or more: each process reads",
        [set_memory],
    ),
    "a state of another split": Fault(
        lambda project: None,
        lambda project: open_state(project, {"split": "valid"}),
        "the state belongs to split 'valid', this dataset is split 'train'; open that split",
        [],
    ),
    "a file that is gone": Fault(
        lambda project: shutil.move(project.folder / "data" / "0.parquet", project.folder / "0.parquet"),
        read,
        r"0\.parquet: no such file.*restore the file and resume; `megablend check CONFIG` lists all files that are missing",
        [check_and_restore],
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_remedy(tmp_path: Path, name: str) -> None:
    fault = FAULTS[name]
    for number, remedy in enumerate(fault.remedies or [None]):
        folder = tmp_path / str(number)
        folder.mkdir()
        project = Project(folder)
        fault.make(project)
        with pytest.raises(MegablendError) as caught:
            fault.fails(project)
        assert re.search(fault.says, str(caught.value), re.DOTALL), str(caught.value)
        if remedy is not None:
            remedy(project, str(caught.value))
            (fault.works or fault.fails)(project)


@pytest.mark.parametrize("change", [{"sequence_length": 16}, {"lanes": 4}])
def test_a_change_during_a_run(tmp_path: Path, change: dict[str, int]) -> None:
    """Restore the config, add the stages that the message writes, and amend the run."""
    project = Project(tmp_path, lanes=2, shuffle_window=8)
    configure(**change)(project)
    with pytest.raises(MegablendError, match="to change it from where training is, restore it, add ") as caught:
        build(project)
    written = re.search(r"`stages: (\[.*?\])`", str(caught.value))
    (command,) = (each for each in commands_in(str(caught.value)) if each.startswith("amend"))
    assert written
    ((key, value),) = change.items()
    project.path.write_text(
        json.dumps({**project.given, "stages": yaml.safe_load(written[1].replace("NUMBER", f"{value}"))})
    )
    assert f"{key}: {project.given.get(key, 8)} -> {value}" in project.run(command.replace("SAMPLE", "50"))
    build(project)
    assert project.read()[:64] == project.tokens[:64]


def test_a_loader_without_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = Project(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(
        MegablendError, match="give data_parallel_rank= and data_parallel_size=, or data_parallel_group="
    ):
        load(project)
    load(project, data_parallel_rank=1, data_parallel_size=2)


def test_a_state_of_another_index(tmp_path: Path) -> None:
    project = Project(tmp_path)
    state = megablend.open(str(project.path)).state_dict()
    project.add(1)
    configure(run="other")(project)
    project.run("build CONFIG")
    with pytest.raises(MegablendError, match=r"open the state's index with megablend\.open\(config, state=state\)"):
        megablend.open(str(project.path)).load_state_dict(state)
    assert megablend.open(str(project.path), state=state)[0]["tokens"].tolist() == project.tokens[0]


def test_a_state_of_another_plan(tmp_path: Path) -> None:
    project = Project(tmp_path)
    state = megablend.open(str(project.path)).state_dict()
    configure(run="other", seed=5)(project)
    project.run("build CONFIG")
    says = r"with megablend\.open\(config, state=state\) and the config that the run was built with"
    with pytest.raises(MegablendError, match=says):
        megablend.open(str(project.path)).load_state_dict(state)
    with pytest.raises(MegablendError, match=says):
        megablend.open(str(project.path), state=state)
    assert megablend.open(project.given, state=state)[0]["tokens"].tolist() == project.tokens[0]


HOLD = """
import sys, time
from pathlib import Path
from megablend.fs.build_lock import build_lock
with build_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_cache_that_another_build_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = Project(tmp_path)
    monkeypatch.setattr("megablend.fs.build_lock.WAIT_SECONDS", 0.2)
    with subprocess.Popen([sys.executable, "-c", HOLD, project.cache], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        try:
            assert other.stdout.readline() == "held\n"
            says = r"another build has held .* \(host \S+, pid (\d+), since .*\): wait for it to finish, or stop it$"
            with pytest.raises(MegablendError, match=says) as caught:
                build(project)
            found = re.search(says, str(caught.value))
            assert found
            assert int(found[1]) == other.pid
            os.kill(int(found[1]), signal.SIGTERM)  # "stop it"
            other.wait(timeout=30)
        finally:
            other.kill()
    build(project)
