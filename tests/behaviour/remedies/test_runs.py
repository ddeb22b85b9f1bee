"""Runs, states, ledgers and caches that are gone, damaged or changed: what a message says is done, and then the run is read."""

from __future__ import annotations

import importlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import megablend
from megablend.errors import CacheError, MegablendError
from megablend.index.tables.cache_folders import external_references_dir
from megablend.index.tables.manifest import dump_with_checksum, read_manifest, read_roots
from megablend.operations import manage_runs
from megablend.system import build_lock
from tests.behaviour.project import commands_in, flip, truncate
from tests.behaviour.remedies.driver import Step, fault, misuse, table
from tests.behaviour.remedies.projects import (
    Run,
    back_up,
    build_and_use,
    restore,
    restore_config,
    run_named,
)
from tests.formats.writers import write_megatron

LEDGER = "cache/runs/default.json"
CHANGED = [[7] * 50] * 30
ANOTHER_RUN: Step = ({"run": "other"}, Run.build)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(tmp_path, monkeypatch)


def damage(path: str, how: Callable[[Path], None]) -> Step:
    """Damage a file of which there is a backup."""
    return (back_up, lambda bench: how(bench.folder / path))


def remove(path: str) -> Step:
    return lambda bench: shutil.rmtree(bench.folder / path)


def without_index(bench: Run) -> None:
    back_up(bench)
    shutil.rmtree(bench.kept)


def write_data(kind: str, rows: list[list[int]]) -> Callable[[Run], None]:
    def write(bench: Run) -> None:
        path = bench.folder / "data" / f"0.{kind}"
        if kind == "bin":
            write_megatron(path.with_suffix(""), rows)
        elif kind == "parquet":
            pq.write_table(pa.table({"ids": rows}), path)
        else:
            table = pa.table({"ids": rows})
            with pa.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table)

    return write


def changed(kind: str) -> Step:
    """The file of a run, of which there is a backup, has other rows."""
    make: Step = (
        remove("data"),
        lambda bench: (bench.folder / "data").mkdir(),
        write_data(kind, [[5] * 30] * 90),
    )
    config = {"sources": [{"name": "a", "path": f"{{folder}}/data/0.{kind}"}], "run": kind}
    return (*make, config, Run.build, back_up, write_data(kind, CHANGED))


def load(**arguments: Any) -> Step:
    def call(bench: Run) -> None:
        assert list(
            megablend.Loader(megablend.open(str(bench.path)), micro_batch_size=2, **arguments)
        )

    return call


def open_state(bench: Run, **change: Any) -> Any:
    state = megablend.open(str(bench.path)).state_dict()
    return megablend.open(str(bench.path)).load_state_dict({**state, **change})


def newer_format(bench: Run) -> None:
    (bench.kept / "manifest.json").write_bytes(
        dump_with_checksum({**read_manifest(bench.kept), "format_version": 9})
    )


def of_another_source(bench: Run) -> None:
    """The index has another source than the run."""
    manifest = read_manifest(bench.kept)
    roots = read_roots(bench.kept)
    manifest["sources"][0]["name"] = "b"
    (bench.kept / "manifest.json").write_bytes(dump_with_checksum(manifest))
    (bench.kept / "roots.json").write_bytes(
        dump_with_checksum(roots | {"roots": {"b": roots["roots"]["a"]}})
    )


def write_reference(bench: Run) -> None:
    folder = external_references_dir(bench.cache)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "x.json").write_text("{")


def remove_named(bench: Run) -> None:
    """Remove the file that the message begins with."""
    Path(bench.said.string.partition(":")[0]).unlink()


def name_column(bench: Run) -> None:
    """Let the config name the column, which the run's index was not asked for."""
    bench.change({"sources": [{**bench.given["sources"][0], "column": "ids"}]})


def lose_data(bench: Run) -> None:
    (bench.folder / "data" / "0.parquet").rename(bench.folder / "0.parquet")


def check_and_restore(bench: Run) -> None:
    for command in commands_in(bench.said.string):
        if command.startswith("check"):
            assert "0.parquet" in bench.run(command, code=3)
    (bench.folder / "0.parquet").rename(bench.folder / "data" / "0.parquet")


def verify(bench: Run) -> str:
    return "\n".join(megablend.verify(str(bench.cache)).problems)


def gc(bench: Run) -> None:
    megablend.gc(str(bench.cache), older_than_days=0)


def note(bench: Run) -> str:
    return str(megablend.describe(str(bench.path)).to_dict()["note"])


def refuse_locks(bench: Run) -> None:
    """As file systems of which a mount option takes the locks."""
    try_lock = build_lock._try_lock

    def refuse(file: IO[str]) -> int:
        path = Path(f"/proc/self/fd/{file.fileno()}").readlink()
        return 38 if path.is_relative_to(bench.folder / "cache") else try_lock(file)

    bench.patch.setattr(build_lock, "_try_lock", refuse)


def build_without(bench: Run) -> None:
    """Build again without the folder that the message names."""
    shutil.rmtree(bench.said[1])
    assert megablend.build(str(bench.path)).index.read == 1
    assert bench.read() == bench.tokens


def use_copy(bench: Run) -> None:
    bench.cache = shutil.copytree(bench.cache, bench.folder / "copy")


def link_lock(bench: Run) -> None:
    (bench.cache / ".lock").unlink()
    (bench.folder / "target").write_text("kept")
    (bench.cache / ".lock").symlink_to(bench.folder / "target")


def unlink_lock(bench: Run) -> None:
    assert (bench.folder / "target").read_text() == "kept"
    (bench.cache / ".lock").unlink()


def limit_files(bench: Run) -> None:
    bench.add(1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def allow_files(bench: Run) -> None:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


@pytest.fixture(autouse=True)
def same_limits() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def launched_as(rank: int, size: int) -> Step:
    return lambda bench: (
        bench.patch.setenv("WORLD_SIZE", str(size)),
        bench.patch.setenv("RANK", str(rank)),
    )


def amended_during(bench: Run) -> None:
    """Another process amends the run before an amendment of it is planned."""
    module: Any = importlib.import_module("megablend.operations.amend")
    cut = module.cut_ledger

    def cut_while_another_amends(*arguments: Any) -> Any:
        bench.patch.setattr(module, "cut_ledger", cut)
        bench.change(second_stage(4))
        megablend.amend(bench.path, at=80)
        bench.change(second_stage(8))
        return cut(*arguments)

    def second_stage(window: int) -> dict[str, Any]:
        stages = [{"samples": 150}, {"samples": 300, "shuffle_window": window}]
        return {"samples": None, "stages": stages}

    bench.change(second_stage(8))
    bench.patch.setattr(module, "cut_ledger", cut_while_another_amends)


def removed_during(bench: Run) -> None:
    """Another process removes the run while it is shown."""
    check = manage_runs._check_exists

    def check_before_it_is_removed(*arguments: Any) -> None:
        check(*arguments)
        bench.patch.setattr(manage_runs, "_check_exists", check)
        megablend.remove_run(bench.config, "default")

    bench.patch.setattr(manage_runs, "_check_exists", check_before_it_is_removed)


def nothing_is_listed(bench: Run) -> None:
    assert megablend.list_runs(bench.config) == []


def export(name: str) -> Step:
    return lambda bench: megablend.export(str(bench.path), bench.folder / name)


KEEPS = r"restore the original file, or give the run another name \(`run:`\) and run `megablend build CONFIG`"
STAGES = {"samples": None, "stages": [{"samples": 150}, {"samples": 300, "shuffle_window": 8}]}

# fmt: off
test_runs = table(
    fault("no index", remove("cache"), "holds no index; run `megablend build CONFIG` first", run_named,
          fails=lambda bench: megablend.check(str(bench.path))),
    fault("no run", {"run": "new"}, "contains no run 'new'; run `megablend build CONFIG` first", run_named),
    fault("a longer run", {"samples": 160}, "requests 160; run `megablend build CONFIG` to extend it", run_named),
    fault("a damaged ledger", damage(LEDGER, flip),
          r"default\.json: .*(damaged|cannot read the run's ledger).*; restore it from a backup, or reset the run",
          restore(LEDGER), (run_named, Run.build), fails=Run.build, works=Run.use),
    fault("a cut ledger", damage(LEDGER, truncate),
          r"default\.json: the ledger's checksum is damaged; restore it from a backup, or reset the run",
          restore(LEDGER), (run_named, Run.build)),
    fault("another column", name_column,
          r"run 'default' .* source 'a' has column None; the config has 'ids'; give the run another name",
          ANOTHER_RUN, restore_config),
    fault("a newer format", newer_format, "this megablend reads up to version 1: upgrade megablend, or build into another cache",
          ({"cache": "{folder}/other"}, Run.build)),
    fault("a reference from elsewhere", write_reference, r"x\.json: cannot be read .*; remove the file if it is damaged",
          remove_named,
          fails=gc),
    fault("memory for a sample", {"memory": 100},
          r"memory: found 0\.1 KiB, expected ([0-9.]+ ?[kKMGT]?i?B?) or more, the size of one sample of", {"memory": "{1}"}),
    fault("memory for a loader", {"memory": "4KiB"},
          r"memory: found 4.0 KiB, expected ([0-9.]+ ?[kKMGT]?i?B?) or more \(blocks of", {"memory": "{1}"},
          fails=load()),
    fault("a state of another split", (), "the state belongs to split 'valid', but this dataset is split 'train'; open that",
          (),
          fails=lambda bench: open_state(bench, split="valid"), works=open_state),
    fault("a file that is gone", lose_data,
          r"0\.parquet: no such file.*restore the file and resume; `megablend check CONFIG` lists all files that are missing",
          check_and_restore),
    *(fault(f"a changed file of {kind}", changed(kind), KEEPS, ANOTHER_RUN, restore("data"), fails=build_and_use)
      for kind in ("parquet", "arrow", "bin")),
    *(fault(f"another {key}", {key: value},
            r"give the new run another name \(`run:`\).*plan this one again \(`megablend (runs reset)",
            ANOTHER_RUN, restore_config, "{1} CONFIG", fails=build_and_use) for key, value in (("samples", 10), ("seed", 2))),
    fault("an index that is gone", without_index,
          "this version of the index does not exist .*; run `megablend (build CONFIG)`; if the data has changed", "{1}"),
    fault("an index and the data that are gone", (without_index, write_data("parquet", CHANGED)),
          "this index does not exist\nrun 'default' needs index.*restore the old index from a backup, or reset the run .*, "
          "and build again", restore("data"), restore("cache/generations"), ANOTHER_RUN, fails=Run.build),
    fault("an index that verify misses", without_index,
          r"run 'default' uses index \w+, which does not exist; run `megablend (build CONFIG)`; if", "{1}", fails=verify),
    fault("the same, with other data", (without_index, lambda bench: bench.add(1)),
          r"does not exist; .* if the data has changed.*`megablend (runs reset)",
          lambda bench: [bench.run(command) for command in (commands_in(bench.said.string)[1], "build CONFIG")], fails=verify),
    fault("a run that is not committed", {"run": "next"}, "^run 'next' is not committed; `megablend build CONFIG` commits it$",
          run_named,
          fails=note),
    *(misuse(lambda bench, call=call: call(str(bench.folder / "other")),
             "other: there is no cache here: build one, or specify another location", lambda bench,
             call=call: call(str(bench.cache)),
             ({"cache": "{folder}/other"}, Run.build, lambda bench, call=call: call(str(bench.folder / "other"))),
             name=f"no cache for {name}")
      for name, call in (("gc", megablend.gc), ("verify", megablend.verify))),
    fault("a file system without locks", refuse_locks,
          r"copy the cache to one that has locks, or remove (\S+) while no build is running",
          use_copy, fails=gc),
    fault("a build without locks", refuse_locks,
          r"remove (\S+) while no build is running", build_without,
          fails=gc, works=()),
    fault("a cache whose lock is a link", link_lock, r"\.lock: .*links are not followed for security reasons: remove the link",
          unlink_lock,
          fails=Run.build),
    fault("a name that is too long", {"cache": "{folder}/" + "x" * 300}, r"File name too long\)?; use shorter names",
          {"cache": "{folder}/x"}, fails=Run.build),
    fault("a folder that is a file", (lambda bench: (bench.folder / "file").touch(), {"cache": "{folder}/file/cache"}),
          r"Not a directory\); check the path and the file system, or use another folder",
          lambda bench: (bench.folder / "file").unlink(), {"cache": "{folder}/another"}, fails=build_and_use),
    misuse(export("none/order.parquet"), "none/order.parquet: its folder does not exist; create it, or write to another folder",
           export("order.parquet"), (lambda bench: (bench.folder / "none").mkdir(), export("none/order.parquet")),
           name="no folder"),
    fault("a limit on the size of files", limit_files,
          r"\(.*File too large.*\); allow larger files \(`ulimit -f`\), or use another file system", allow_files,
          fails=Run.build),
    fault("a loader without ranks", launched_as(1, 2),
          "pass data_parallel_rank= and data_parallel_size=, or data_parallel_group=", (),
          fails=load(), works=load(data_parallel_rank=1, data_parallel_size=2)),
    fault("an amendment during another one", amended_during,
          r"another process changed run 'default' in the meantime; run the command again$", (),
          fails="amend CONFIG --at 40"),
    fault("a run that is removed while it is shown", removed_during, r"was just removed .*; choose another run$",
          (),
          fails=lambda bench: megablend.show_run(bench.config, "default"),
          works=nothing_is_listed),
    fault("an index without a source of its run", (back_up, of_another_source),
          r"lacks source 'a' of run 'default'; restore the cache from a backup$", restore("cache"),
          fails="show CACHE --run default --sample 0"),
    *(fault(f"a file that is not a state, {content}", (STAGES, lambda bench,
            content=content: (bench.folder / "state.json").write_text(content)),
            says, lambda bench: (bench.folder / "state.json").write_text(json.dumps(megablend.open(bench.given).state_dict(40))),
            fails="amend CONFIG --state {folder}/state.json")
      for content, says in (("{", r"state\.json: expected a state saved as JSON: .*"),
                            ("[]", r"state\.json: found list, expected a state from `loader\.state_dict\(\)`, saved as JSON$"))),
    fault("a stage shorter than its lanes",
          {"samples": None, "tokens": 8 * 640, "run": "lanes", "lanes": 16, "stages": [{"tokens": 8 * 15}, {"lanes": 8}]},
          "has 15 samples, fewer than its (16) lanes; let the stage end later, or lower `lanes`",
          {"stages": [{"tokens": 8 * 16}, {"lanes": 8}]}, {"lanes": 8}, fails=Run.build),
)
# fmt: on


@pytest.mark.parametrize("change", [{"sequence_length": 16}, {"lanes": 4}])
def test_a_change_during_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, int]
) -> None:
    """Restore the config, add the stages that the message writes, and amend the run."""
    bench = Run(tmp_path, monkeypatch, lanes=2, shuffle_window=8)
    bench.change(change)
    with pytest.raises(
        MegablendError,
        match="to change it during training, restore the config, add ",
    ) as caught:
        bench.build()
    written = re.search(r"`stages: (\[.*?\])`", str(caught.value))
    (command,) = (each for each in commands_in(str(caught.value)) if each.startswith("amend"))
    assert written
    ((key, value),) = change.items()
    restore_config(bench)
    bench.change({"stages": yaml.safe_load(written[1].replace("NUMBER", f"{value}"))})
    assert f"{key}: {bench.given.get(key, 8)} -> {value}" in bench.run(
        command.replace("SAMPLE", "50")
    )
    bench.build()
    assert bench.read()[:64] == bench.tokens[:64]


def test_a_state_of_another_run(bench: Run) -> None:
    """Of another index, and of another plan."""
    state = megablend.open(str(bench.path)).state_dict()
    restore_config(bench)
    bench.change({"run": "plan", "seed": 5})
    bench.build()
    says = r"with megablend\.open\(config, state=state\) and the config that the run was built with"
    with pytest.raises(MegablendError, match=says):
        megablend.open(str(bench.path)).load_state_dict(state)
    with pytest.raises(MegablendError, match=says):
        megablend.open(str(bench.path), state=state)
    assert megablend.open(bench.given, state=state)[0]["tokens"].tolist() == bench.tokens[0]
    bench.add(1)
    bench.change({"run": "index", "seed": None})
    bench.build()
    with pytest.raises(
        MegablendError,
        match=r"index .*; open the dataset with megablend\.open\(config, state=state\)",
    ):
        megablend.open(str(bench.path)).load_state_dict(state)
    assert megablend.open(str(bench.path), state=state)[0]["tokens"].tolist() == bench.tokens[0]


HOLD = """
import sys
from pathlib import Path
from megablend.system.build_lock import build_lock
with build_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_cache_that_another_build_holds(bench: Run) -> None:
    bench.patch.setattr("megablend.system.build_lock.WAIT_SECONDS", 0.2)
    command = [sys.executable, "-c", HOLD, str(bench.cache)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout is not None
        try:
            assert other.stdout.readline() == "held\n"
            says = r"another build has held .* \(host \S+, pid (\d+), since .*\); wait for that build to finish, or stop it$"
            with pytest.raises(CacheError, match=says) as caught:
                bench.build()
            found = re.search(says, str(caught.value))
            assert found
            assert int(found[1]) == other.pid
            os.kill(int(found[1]), signal.SIGTERM)  # "stop it"
            other.wait()
        finally:
            other.kill()
    bench.build()
