"""Several processes and a cache in an object store: ranks without a common folder, builds that race, builds that are killed."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import megablend
from megablend.caches.objects import store
from megablend.storage.object_options import ObjectOptions
from megablend.storage.objects.prefix import ObjectPrefix
from tests.caches.test_remote_cache import configs, samples
from tests.index.index_data import environment
from tests.preloaded import python
from tests.runs import documents, write_source
from tests.storage.objects.conftest import S3Server

ROOT = Path(megablend.__file__).parent.parent
MPIRUN = str(Path(sys.executable).with_name("mpirun"))


def build_command(config: Path) -> list[str]:
    return [*python(), "-m", "megablend", "build", str(config), "--json"]


def on_node(folder: Path, name: str) -> dict[str, str]:
    """The environment of a node that shares no folder with others."""
    folders = {each: str(folder / name / each) for each in ("HOME", "TMPDIR", "XDG_CACHE_HOME")}
    for path in folders.values():
        Path(path).mkdir(parents=True, exist_ok=True)
    return folders | {"MEGABLEND_LOCAL_CACHE": str(folder / name / "copies")}


def test_ranks_without_a_common_folder_make_the_same_index(
    tmp_path: Path, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    local, config = configs(tmp_path, remote, order="document")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    for rank in range(4):
        on_node(tmp_path / "nodes", str(rank))
    here = tmp_path / "nodes"
    script = (
        f"export HOME={here}/$PMI_RANK/HOME TMPDIR={here}/$PMI_RANK/TMPDIR XDG_CACHE_HOME={here}/$PMI_RANK/XDG_CACHE_HOME "
        f'MEGABLEND_LOCAL_CACHE={here}/$PMI_RANK/copies; exec "$0" "$@"'
    )
    command = [MPIRUN, "-n", "4", "sh", "-c", script, *build_command(file)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=500,
        env=environment(MEGABLEND_KERNEL_CACHE=kernels(), PYTHONWARNINGS="default"),
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    expected = megablend.build(local)
    assert (report["ranks"], report["index"]["digest"], report["index"]["read"]) == (
        4,
        expected.index.digest,
        4,
    )
    copies = [
        sorted(path.name for path in (here / str(rank) / "copies").glob("*/fragments/*"))
        for rank in range(4)
    ]
    # Each has what it indexed itself
    assert all(len(copies[rank]) == 1 for rank in (1, 2, 3)), copies
    monkeypatch.setenv("MEGABLEND_LOCAL_CACHE", str(here / "another"))
    assert samples(config) == samples(local)


def kernels() -> str:
    """Where this process has its compiled kernels: code, not data."""
    return os.environ.get("MEGABLEND_KERNEL_CACHE") or str(Path("~/.cache").expanduser())


def test_of_two_builds_that_race_both_are_right(tmp_path: Path, each_remote: str) -> None:
    local, config = configs(tmp_path, each_remote)
    longer = config | {"samples": 60}
    processes = []
    for name, each in (("one", config), ("two", config), ("three", longer)):
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(each))
        env = environment(MEGABLEND_LOCAL_CACHE=tmp_path / name)
        command = build_command(file)
        processes.append(
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=env,
                cwd=ROOT,
            )
        )
    done = [process.communicate(timeout=500) for process in processes]
    digest = megablend.build(local).index.digest
    for number, (process, (output, errors)) in enumerate(zip(processes, done, strict=True)):
        report = json.loads(output)
        # The longer one was faster: the others ask for less than the run has
        if process.returncode:
            assert number < 2, errors
            assert "a run can only be extended" in report["error"]["message"]
        else:
            assert report["index"]["digest"] == digest
    stages = megablend.build(longer).ledger.ends
    # A run that begins with 60 samples is mixed in another way than one that is extended
    assert stages in ((60,), (40, 60))
    expected = local if stages == (40, 60) else local | {"samples": 60, "run": "longer"}
    megablend.build(expected)
    assert samples(longer)[:40] == samples(expected)[:40]
    assert megablend.verify(each_remote).problems == ()


class _Killed(BaseException):
    pass


class _Writes:
    """Counts the writes to the store; at number `last`, before it or after it, the process seems to die, or is interrupted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.last = 0
        self.is_done = False
        self.interrupt: Callable[[], None] | None = None
        for name in ("write_all", "create_each"):
            monkeypatch.setattr(ObjectPrefix, name, self._counted(getattr(ObjectPrefix, name)))

    def _counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def write(prefix: ObjectPrefix, *args: Any) -> Any:
            self.count += 1
            if self.count == self.last and self.interrupt is not None:
                self.last = 0
                self.interrupt()
            elif self.count == self.last and not self.is_done:
                raise _Killed
            found = original(prefix, *args)
            if self.count == self.last:
                raise _Killed
            return found

        return write


NUM_WRITES = 14
NUM_PROBES = 4
"""Of the build below, and how many of them try whether the store is fit for a cache, where there is none."""


@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "last",
    [
        pytest.param(n, marks=[] if n == NUM_WRITES else pytest.mark.slow)
        for n in range(1, NUM_WRITES + 1)
    ],
)
def test_a_build_that_ends_at_any_of_its_writes_leaves_nothing_invalid(
    tmp_path: Path, remote: str, monkeypatch: pytest.MonkeyPatch, last: int, is_done: bool
) -> None:
    local, config = configs(tmp_path, remote)
    expected = (megablend.build(local).index.digest, samples(local))
    writes = _Writes(monkeypatch)
    writes.last = last
    writes.is_done = is_done
    with pytest.raises(_Killed):
        megablend.build(config)
    writes.last = 0
    monkeypatch.setenv("MEGABLEND_LOCAL_CACHE", str(tmp_path / "other-node"))
    is_committed = False
    with contextlib.suppress(megablend.CacheError):  # before its first index, there is no cache
        is_committed = bool(megablend.list_runs(remote))
    assert is_committed == (last == NUM_WRITES and is_done)
    if is_committed:
        assert samples(config) == expected[1]
    else:
        with pytest.raises(megablend.CacheError, match="contains no run"):
            megablend.open(config)
    writes.count = 0
    assert megablend.build(config).index.digest == expected[0]
    assert writes.count <= NUM_WRITES
    assert samples(config) == expected[1]
    assert megablend.verify(remote).problems == ()


def test_a_store_whose_conditional_writes_race_is_refused(
    tmp_path: Path, swift: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    swift.admin.make_bucket("caches")
    monkeypatch.setenv("MEGABLEND_LOCAL_CACHE", str(tmp_path / "node"))
    monkeypatch.setattr(store, "_ROUNDS", 10)
    _, config = configs(tmp_path, "s3://caches/of/x")
    with pytest.raises(megablend.CacheError, match="this store ignores `If-None-Match"):
        megablend.build(config)
    assert ObjectPrefix("s3://caches/of/x", ObjectOptions()).list_objects() == []


@pytest.mark.parametrize("days", [0, 1])
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(n, marks=[] if n == 8 else pytest.mark.slow)
        for n in range(1, NUM_WRITES - NUM_PROBES + 1)
    ],
)
def test_another_build_and_gc_between_any_two_writes_of_a_build(
    tmp_path: Path, remote: str, monkeypatch: pytest.MonkeyPatch, number: int, days: int
) -> None:
    """With `older_than_days=1` neither build is disturbed; with 0, `gc` may remove what a build has just uploaded."""
    local, config = configs(tmp_path, remote)
    expected = (megablend.build(local).index.digest, samples(local))
    writes = _Writes(monkeypatch)

    def interrupt() -> None:
        with monkeypatch.context() as other:
            other.setenv("MEGABLEND_LOCAL_CACHE", str(tmp_path / "other-node"))
            if number % 2:
                megablend.build(config)
                megablend.remove_run(remote, "default")
            megablend.gc(remote, older_than_days=days)
            assert megablend.build(config).index.digest == expected[0]
            megablend.gc(remote, older_than_days=days)

    other = write_source(tmp_path / "other", 2, "parquet", documents(2, 40, 20, seed=1)) | {
        "weight": 1
    }
    # So that there is a cache
    megablend.build(config | {"run": "before", "samples": 10, "sources": [other]})
    writes.count = 0
    writes.last = number
    writes.interrupt = interrupt
    with contextlib.suppress(*[megablend.CacheError] * (days == 0)):
        assert megablend.build(config).index.digest == expected[0]
    assert not writes.last  # it was interrupted
    if days:
        assert samples(config) == expected[1]
        assert megablend.verify(remote).problems == ()
    assert megablend.build(config).index.digest == expected[0]
    monkeypatch.setenv("MEGABLEND_LOCAL_CACHE", str(tmp_path / "third-node"))
    assert samples(config) == expected[1]
    assert megablend.verify(remote).problems == ()


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_killed_builds_leave_nothing_invalid(tmp_path: Path, each_remote: str) -> None:
    _, config = configs(tmp_path, each_remote)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    count = os.environ.get("MEGABLEND_TEST_KILLS", "200")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.caches.kill_campaign",
            str(file),
            str(tmp_path / "campaign"),
            "1",
            count,
        ],
        capture_output=True,
        text=True,
        timeout=2900,
        env=environment(),
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["problems"] == []
    assert report["killed"] >= int(count)
