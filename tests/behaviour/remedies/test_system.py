"""Remedies of errors of the operating system: permission, open files, a full disk, links. Each is done as its message says."""

import json
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import megablend
from megablend.errors import MegablendError
from megablend.system.failures import remedy_of
from tests.behaviour.remedies.driver import Step, perform
from tests.behaviour.remedies.projects import Run
from tests.preloaded import python

ROOT = Path(__file__).parents[3]
STRACE = shutil.which("strace")
IS_ROOT = os.getuid() == 0
RUN_ALL = """
import json, sys
from click.testing import CliRunner
from megablend.cli.main import cli
for words in json.load(sys.stdin):
    done = CliRunner().invoke(cli, words)
    print(json.dumps([done.exit_code == 0, str(done.exception or "") + done.output]))
"""
"""Many commands in one process: each starts that much sooner."""
UNPRIVILEGED = """
import ctypes
version, sets, libc = (ctypes.c_uint32 * 2)(0x20080522), (ctypes.c_uint32 * 6)(), ctypes.CDLL(None)
assert libc.capget(version, sets) == 0
for held in range(2):  # the effective and the permitted ones lose CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
    sets[held] &= ~0b110
assert libc.capset(version, sets) == 0
"""
"""Takes from root what lets it read everything."""
TRACED = """
import ctypes, os
ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1))  # PR_SET_PTRACER: any process may trace this one
print(os.getpid(), flush=True)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(tmp_path, monkeypatch)


def start_all(*launcher: str, before: str = "") -> subprocess.Popen[str]:
    """A process that reads commands, and then runs them."""
    command = [*launcher, *python("torch"), "-c", before + RUN_ALL]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=ROOT)


def finish_all(process: subprocess.Popen[str], commands: list[list[str]]) -> list[tuple[bool, str]]:
    """Whether each command succeeds, and what it says."""
    out, err = process.communicate(json.dumps(commands), timeout=500)
    assert process.returncode == 0, err
    return [tuple(json.loads(line)) for line in out.splitlines()]


def run_all(commands: list[list[str]], *launcher: str, before: str = "") -> list[tuple[bool, str]]:
    return finish_all(start_all(*launcher, before=before), commands)


class Closed(NamedTuple):
    """A path without permission, the command that fails there, its message, and the other folder that it advises."""

    path: str
    command: str
    says: str
    elsewhere: Step | None
    """None where it advises permission alone."""
    prepare: Step | None = None


def copy_readable(source: str, target: str) -> None:
    Path(source).chmod(0o600)
    Path(target).write_bytes(Path(source).read_bytes())


def move_data(bench: Run) -> None:
    """Use another folder for the data."""
    other = bench.folder / "other"
    bench.folder.joinpath("data").chmod(0o700)
    shutil.copytree(bench.folder / "data", other, copy_function=copy_readable)
    bench.change(
        {"run": "other", "sources": [{**bench.given["sources"][0], "path": f"{other}/*.parquet"}]}
    )


def move_config(bench: Run) -> None:
    """Use another folder for the config."""
    other = bench.folder / "other" / "run.json"
    other.parent.mkdir()
    copy_readable(str(bench.path), str(other))
    bench.path = other


MOVE_CACHE: Step = {"cache": "{folder}/other"}
ADVICE = "Permission denied.*[:;] check the permissions of the path, or use another folder"
DATA_ADVICE = (
    r"data/0\.parquet: cannot be read: Permission denied; check the permissions of the path(?!,)"
)
CLOSED = {
    "a data file": Closed("data/0.parquet", "build", DATA_ADVICE, None),
    "a data file, when read": Closed("data/0.parquet", "show", DATA_ADVICE, None),
    "all data files, others skipped": Closed(
        "data/0.parquet",
        "build",
        r"none of its files can be read: .*data/0\.parquet: .*; make them readable",
        None,
        {"on_unreadable": "skip"},
    ),
    "the data's folder": Closed(
        "data",
        "build",
        "data: cannot be read: Permission denied.*; make them readable, or remove broken links",
        move_data,
    ),
    "the config": Closed(
        "run.json", "build", rf"run\.json: cannot read the config: {ADVICE}", move_config
    ),
    "the cache": Closed(
        "cache", "build", rf"cache/fragments: cannot write the cache \({ADVICE}", MOVE_CACHE
    ),
    "the cache, when read": Closed(
        "cache", "show", rf"runs/default\.json: cannot read .* \({ADVICE}", MOVE_CACHE
    ),
    "the indexes": Closed(
        "cache/generations", "build", rf"generations: cannot write the cache \({ADVICE}", MOVE_CACHE
    ),
    "the indexes, when read": Closed(
        "cache/generations",
        "show",
        rf"manifest\.json: cannot read the cache \({ADVICE}",
        MOVE_CACHE,
    ),
    "the fragments": Closed(
        "cache/fragments", "build", rf"fragments: cannot write the cache \({ADVICE}", MOVE_CACHE
    ),
    "the ledger": Closed(
        "cache/runs/default.json",
        "build",
        rf"default\.json: cannot read the run's ledger \({ADVICE}",
        MOVE_CACHE,
    ),
    "the lock": Closed(
        "cache/.lock", "build", rf"\.lock: cannot write the cache \({ADVICE}", MOVE_CACHE
    ),
}


def test_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    projects: list[tuple[Closed, Run, Step | None]] = []
    modes: list[int] = []
    for case in CLOSED.values():
        # A project for each; None: "check the permissions of the path"
        for remedy in (None, *([case.elsewhere] if case.elsewhere else [])):
            folder = tmp_path / str(len(projects))
            folder.mkdir()
            projects.append((case, Run(folder, monkeypatch), remedy))
            if case.prepare is not None:
                perform(projects[-1][1], case.prepare)
            modes.append((folder / case.path).stat().st_mode)
            (folder / case.path).chmod(0)

    def outcomes() -> list[tuple[bool, str]]:
        tail = {"build": [], "show": ["--sample", "0"]}
        commands = [
            [case.command, str(project.path), *tail[case.command]] for case, project, _ in projects
        ]
        return run_all(commands, before=UNPRIVILEGED)

    try:
        for (case, _, _), (ok, said) in zip(projects, outcomes(), strict=True):
            assert not ok, case
            assert re.search(case.says, said), said
        for (case, project, remedy), mode in zip(projects, modes, strict=True):
            if remedy is None:
                (project.folder / case.path).chmod(mode)
                continue
            perform(project, remedy)
            if case.command == "show":
                project.path.chmod(0o600)
                project.build()
        for (case, _, _), (ok, said) in zip(projects, outcomes(), strict=True):
            assert ok, (case, said)
    finally:
        for (case, project, _), mode in zip(projects, modes, strict=True):
            (project.folder / case.path).chmod(mode)


def test_too_few_open_files(project: Run) -> None:
    commands = [["build", str(project.path)], ["show", str(project.path), "--sample", "0"]]
    # Beside the standard streams, newer versions of libffi hold a file
    count = "import os; print(len(os.listdir('/proc/self/fd')))"
    limit = int(subprocess.check_output([*python("torch"), "-c", count], timeout=500))
    advised = set[str]()
    for ok, said in run_all(commands, "sh", "-c", f'ulimit -S -n {limit}; exec "$@"', "sh"):
        assert not ok
        found = re.search(
            rf"Too many open files\)?; raise the limit of {limit} open files \(`(ulimit -n \d+)`\)",
            said,
        )
        assert found, said
        advised.add(found[1])
    assert len(advised) == 1
    raised = f'ulimit -S -n {limit}; {advised.pop()}; exec "$@"'
    for ok, said in run_all(commands, "sh", "-c", raised, "sh"):
        assert ok, said


@pytest.mark.parametrize("limit", [5, 6])
def test_too_few_open_files_to_store_kernels(project: Run, limit: int) -> None:
    shutil.rmtree(project.cache)
    commands = [["build", str(project.path)]]
    ((ok, said),) = run_all(commands, "sh", "-c", f'ulimit -S -n {limit}; exec "$@"', "sh")
    assert not ok
    assert "Traceback" not in said
    found = re.search(rf"raise the limit of {limit} open files \(`(ulimit -n \d+)`\)", said)
    assert found, said
    ((ok, said),) = run_all(
        commands, "sh", "-c", f'ulimit -S -n {limit}; {found[1]}; exec "$@"', "sh"
    )
    assert ok, said


def test_a_hard_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, hard, says in [
        (100, resource.RLIM_INFINITY, "raise the limit of 100 open files (`ulimit -n 1024`)"),
        (1000, 2000, "raise the limit of 1000 open files (`ulimit -n 2000`)"),
        (
            500,
            500,
            "the limit is 500 open files, which only root or the job's settings can raise (`ulimit -Hn`)",
        ),
    ]:
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=(soft, hard): limits)
        assert remedy_of(24) == says


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)], check=False
    )
    if mounted.returncode:
        pytest.skip("this user cannot mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def refuse(project: Run, says: str) -> None:
    with pytest.raises(MegablendError) as caught:
        project.build()
    assert re.search(says, str(caught.value)), str(caught.value)


@pytest.mark.skipif(not IS_ROOT, reason="only root can mount a small disk")
@pytest.mark.parametrize("free", [0, 4096, 16384])
def test_a_full_disk(small_disk: Path, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """No file is left unfinished, and nothing unfinished is taken for finished, whichever file met the end of the disk."""
    project = Run(small_disk, monkeypatch)
    project.add(1)
    with (small_disk / "other.data").open("wb", buffering=0) as other:
        left = os.statvfs(small_disk)
        other.write(b"x" * (left.f_bavail * left.f_frsize - free))
    says = r"disk/cache/\S+: cannot write the cache \(.*No space left on device\); free disk space \(or inodes: `df -i`\)"
    refuse(project, says)
    assert project.read() == project.tokens
    # "or use another folder"
    project.change({"cache": str(small_disk.parent / "cache"), "run": "other"})
    project.build()
    project.change({"cache": str(project.cache), "run": "default"})
    refuse(project, says)
    (small_disk / "other.data").unlink()  # "free disk space there"
    project.build()
    assert project.read() == project.tokens
    assert megablend.verify(str(project.cache)).problems == ()


@pytest.mark.skipif(not IS_ROOT, reason="only root can mount a disk")
def test_a_read_only_disk(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = Run(small_disk, monkeypatch)
    project.add(1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    says = (
        r"cannot write the cache \(Read-only file system\); make it writable, or use another folder"
    )
    refuse(project, says)
    assert project.read() == project.tokens
    # "use another folder"
    megablend.build(project.given | {"cache": str(small_disk.parent / "cache")})
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)  # "make it writable"
    project.build()
    assert project.read() == project.tokens


class Injected(NamedTuple):
    """A system call that fails, on one path or on all, in a command; its message; other ways out than that it ends."""

    inject: str
    path: str | None
    command: str
    says: str
    elsewhere: Step | None = None


INJECTED = {
    "EIO of data": Injected(
        "pread64:error=EIO",
        "data/0.parquet",
        "show",
        r"0\.parquet: cannot be read: Input/output error; the disk or the file server is failing: check it, then try again",
    ),
    "EIO of the cache": Injected(
        "read:error=EIO",
        "cache/runs/default.json",
        "describe",
        r"default\.json.*Input/output error.*the disk or the file server is failing: check it, then try again",
    ),
    "ESTALE of the cache": Injected(
        "read:error=ESTALE",
        "cache/runs/default.json",
        "describe",
        r"default\.json.*Stale file handle.*: try again, and check the mount if it happens again",
    ),
    "ENOMEM": Injected(
        "read:error=ENOMEM",
        "cache/generations/*/blocks.arrow",
        "show",
        r"no memory left: stop other processes, or request more|out of memory",
    ),
    "EDQUOT": Injected(
        "fsync:error=EDQUOT",
        None,
        "build",
        r"cannot write the cache \(Disk quota exceeded.*; free space within your disk quota, or use another folder",
        MOVE_CACHE,
    ),
}


@pytest.mark.skipif(STRACE is None, reason="strace is not installed")
@pytest.mark.parametrize("name", INJECTED)
def test_a_call_that_fails(tmp_path: Path, project: Run, name: str) -> None:
    case = INJECTED[name]
    if case.command == "build":
        project.add(1)
    words = [
        case.command,
        str(project.path),
        *(["--sample", "0"] if case.command == "show" else []),
    ]
    kind = case.inject.partition(":")[0]
    trace = [
        str(STRACE),
        "-f",
        "-o",
        str(tmp_path / "trace"),
        "-e",
        f"trace={kind}",
        "-e",
        f"inject={case.inject}",
    ]
    for path in sorted(tmp_path.glob(case.path or "")) if case.path else []:
        trace += ["-P", str(path)]
    process = start_all(before=TRACED)
    assert process.stdout is not None
    with subprocess.Popen(
        [*trace, "-p", process.stdout.readline()], stderr=subprocess.PIPE, text=True
    ) as tracer:
        assert tracer.stderr is not None
        is_traced = "attached" in tracer.stderr.readline()
        ((ok, said),) = finish_all(process, [words])
        tracer.stderr.read()
    if not is_traced:
        pytest.skip("this machine does not let strace attach")
    assert not ok, said
    assert re.search(case.says, said), said
    if case.elsewhere is not None:
        perform(project, case.elsewhere)
    project.build()  # where it no longer fails: "try again"
    project.run(" ".join(["CONFIG" if word == str(project.path) else word for word in words]))
