"""prepare and `megablend megatron-cache` on ranks of both launchers: right, or a clear error on every rank, soon."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.megatron.forked_ranks import serve_ranks
from tests.megatron.plugin_data import environment
from tests.pairs import contents, write_pair
from tests.preloaded import python

NUM_RANKS = 4
NUM_ARTEFACTS = 3 * 3 + 3
DRIVER = Path(__file__).with_name("prepare_driver.py")
SOON = 60.0
"""Seconds."""
slow = pytest.mark.slow
each_launcher = pytest.mark.parametrize(
    "launcher", [pytest.param("torchrun", marks=slow), "mpirun"]
)
forked_or_launched = pytest.mark.parametrize(
    "launcher", ["forked", *(pytest.param(name, marks=slow) for name in ("torchrun", "mpirun"))]
)
"""What does not depend on the launcher; `forked` is a job of torchrun without its processes' imports."""
RUN_FORKED = list[Callable[[str, int], list[int]]]()
"""Runs the driver on forked ranks; there while tests of this module run."""


@pytest.fixture(scope="module", autouse=True)
def forked() -> Iterator[None]:
    with serve_ranks("tests.megatron.cache_builder.prepare_driver", "torch") as run:
        RUN_FORKED.append(run)
        yield
    RUN_FORKED.clear()


def started_by(launcher: str, num_ranks: int = NUM_RANKS, *, killed: bool = False) -> list[str]:
    """What comes before the Python program's own words; `killed`: the launcher has to notice that one of its processes is."""
    if launcher == "torchrun":
        run = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        ranks = [] if killed else ["--no-python", *python("torch")]
        return [*([sys.executable] if killed else python("torch")), *run, *ranks]
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return [shutil.which("mpirun", path=beside) or "mpirun", "-n", str(num_ranks)] + (
        [sys.executable] if killed else python("torch")
    )


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    rng = np.random.default_rng(0)
    return [
        write_pair(tmp_path / "data" / f"{i}_text", rng.integers(0, 60, 3000)) for i in range(3)
    ]


def spec_of(folder: Path, prefixes: list[str], launcher: str, **options: Any) -> dict[str, Any]:
    (folder / "out").mkdir(exist_ok=True)
    common = {
        "prefixes": prefixes,
        "sizes": [9000, 300, 20],
        "cache": str(folder / "cache"),
        "out": str(folder / "out"),
    }
    return {**common, "meet": launcher != "mpirun", "launcher": launcher, **options}


def prepared(folder: Path, spec: dict[str, Any], num_ranks: int) -> list[Any]:
    """Run prepare; the ranks' results, None where one left none."""
    for path in (folder / "out").iterdir():
        path.unlink()
    (folder / "spec.json").write_text(json.dumps(spec))
    if spec["launcher"] == "forked":
        RUN_FORKED[0](str(folder / "spec.json"), num_ranks)
    else:
        killed = spec.get("victim") is not None
        command = [
            *started_by(spec["launcher"], num_ranks, killed=killed),
            str(DRIVER),
            str(folder / "spec.json"),
        ]
        subprocess.run(command, env=environment(), capture_output=True, timeout=500, check=False)
    paths = [folder / "out" / f"{rank}.json" for rank in range(num_ranks)]
    return [json.loads(path.read_text()) if path.exists() else None for path in paths]


def alone(folder: Path, spec: dict[str, Any]) -> dict[str, bytes]:
    """The bytes that one process writes."""
    whole = {
        **spec,
        "cache": str(folder / "alone"),
        "meet": False,
        "out": str(folder),
        "victim": None,
    }
    (folder / "alone.json").write_text(json.dumps(whole))
    assert RUN_FORKED[0](str(folder / "alone.json"), 1) == [0]
    return contents(folder / "alone")


@pytest.mark.parametrize("launcher", ["forked", "mpirun", pytest.param("torchrun", marks=slow)])
def test_each_artefact_is_built_once(launcher: str, prefixes: list[str], tmp_path: Path) -> None:
    spec = spec_of(tmp_path, prefixes, launcher)
    found = prepared(tmp_path, spec, NUM_RANKS)
    assert [each["error"] for each in found] == [None] * NUM_RANKS
    counts = Counter(base for each in found for base in each["built"])
    assert len(counts) == NUM_ARTEFACTS
    assert set(counts.values()) == {1}
    assert [each["missing"] for each in found] == [NUM_ARTEFACTS] * NUM_RANKS
    assert contents(tmp_path / "cache") == alone(tmp_path, spec)
    assert [each["missing"] for each in prepared(tmp_path, spec, 2)] == [0, 0]


@forked_or_launched
def test_nodes_with_folders_of_their_own(
    launcher: str, prefixes: list[str], tmp_path: Path
) -> None:
    spec = spec_of(tmp_path, prefixes, launcher, cache=str(tmp_path / "node{node}"))
    found = prepared(tmp_path, spec, NUM_RANKS)
    for node in (found[:2], found[2:]):
        assert [each["error"] for each in node] == [None, None]
        assert len({base for each in node for base in each["built"]}) == NUM_ARTEFACTS
        assert sum(len(each["built"]) for each in node) == NUM_ARTEFACTS
    assert contents(tmp_path / "node0") == contents(tmp_path / "node1") == alone(tmp_path, spec)


@each_launcher
def test_a_folder_that_cannot_be_written(
    launcher: str, prefixes: list[str], tmp_path: Path
) -> None:
    (tmp_path / "node1").write_text("a file where the folder should be")
    for cache in ("node1/cache", "node{node}"):
        spec = spec_of(tmp_path, prefixes, launcher, cache=str(tmp_path / cache))
        for each in prepared(tmp_path, spec, NUM_RANKS):
            assert "node1" in each["error"]
            assert "cannot write the cache (Not a directory)" in each["error"]
            assert each["seconds"] < SOON


@forked_or_launched
def test_a_disk_that_runs_full(launcher: str, prefixes: list[str], tmp_path: Path) -> None:
    spec = spec_of(tmp_path, prefixes, launcher)
    for each in prepared(tmp_path, spec | {"limit": 20_000}, NUM_RANKS):
        assert "cannot write the cache (File too large)" in each["error"]
        assert each["seconds"] < SOON
    assert not list((tmp_path / "cache" / ".megablend").glob(".tmp*"))
    found = prepared(tmp_path, spec, NUM_RANKS)
    assert [each["error"] for each in found] == [None] * NUM_RANKS
    assert contents(tmp_path / "cache") == alone(tmp_path, spec)


@forked_or_launched
@pytest.mark.parametrize("fault", ["File too large", "File exists"])
def test_one_nodes_fault_reaches_others_at_work(
    fault: str, launcher: str, prefixes: list[str], tmp_path: Path
) -> None:
    """The disk of one of two nodes runs full, or its folder cannot be written; the other's work takes some minutes."""
    spec = spec_of(
        tmp_path, prefixes, launcher, cache=str(tmp_path / "node{node}"), limited=1, patient=200
    )
    if fault == "File too large":
        spec["limit"] = 20_000
    else:
        (tmp_path / "node1").mkdir()
        (tmp_path / "node1" / ".megablend").write_text("a file where the folder should be")
    found = prepared(tmp_path, spec, NUM_RANKS)
    for each in found:
        assert "node1" in each["error"]
        assert f"cannot write the cache ({fault})" in each["error"]
        assert each["seconds"] < SOON
    assert [each["built"] for each in found[:2]] == [[], []]


@each_launcher
def test_a_rank_is_killed(launcher: str, prefixes: list[str], tmp_path: Path) -> None:
    """Launchers end the others; what was begun is no hit."""
    spec = spec_of(tmp_path, prefixes, launcher, victim=2)
    found = prepared(tmp_path, spec, NUM_RANKS)
    assert found[2] is None
    for each in found:
        assert each is None or ("a rank exited during" in each["error"] and each["seconds"] < SOON)
    expected = alone(tmp_path, spec)
    left = contents(tmp_path / "cache")
    for name in (name for name in left if name.endswith("description.txt")):
        base = name.removesuffix("description.txt")
        assert {each for each in expected if each.startswith(base)} <= set(left)
    again = prepared(tmp_path, spec | {"victim": None}, NUM_RANKS)
    assert [each["error"] for each in again] == [None] * NUM_RANKS
    assert 0 < again[0]["missing"] < NUM_ARTEFACTS
    assert contents(tmp_path / "cache") == expected


def test_processes_that_have_not_met_are_refused(prefixes: list[str], tmp_path: Path) -> None:
    spec = spec_of(tmp_path, prefixes, "torchrun", meet=False)
    for each in prepared(tmp_path, spec, 2):
        assert (
            "torchrun started 2 processes (WORLD_SIZE), but torch.distributed is not initialized"
            in each["error"]
        )


def command_words(prefixes: list[str], cache: str) -> list[str]:
    words = [word for i, prefix in enumerate(prefixes) for word in (str(i + 1), prefix)]
    sizes = [
        "--seq-length",
        "16",
        "--train-samples",
        "9000",
        "--valid-samples",
        "300",
        "--test-samples",
        "20",
    ]
    options = [
        "--split",
        "8,1,1",
        "--tokenizer-identifiers",
        '{"class": "T"}',
        "--mid-level-dataset-surplus",
        "0.05",
    ]
    return [
        "megatron-cache",
        "--data-path",
        *words,
        *sizes,
        *options,
        "--seed",
        "7",
        "--data-cache-path",
        cache,
    ]


def program(launcher: str) -> list[str]:
    return [*started_by(launcher), "-m", "megablend"]


@each_launcher
def test_the_command_builds_what_prepare_does(
    launcher: str, prefixes: list[str], tmp_path: Path
) -> None:
    words = command_words(prefixes, str(tmp_path / "cache"))
    done = subprocess.run(
        [*program(launcher), *words, "--json"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"built {NUM_ARTEFACTS} of {NUM_ARTEFACTS} files" in done.stderr
    assert json.loads(done.stdout)["ranks"] == NUM_RANKS
    assert contents(tmp_path / "cache") == alone(tmp_path, spec_of(tmp_path, prefixes, launcher))


@each_launcher
def test_the_commands_error_is_told_by_every_rank(
    launcher: str, prefixes: list[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    words = command_words(prefixes, str(tmp_path / "file" / "cache"))
    done = subprocess.run(
        [*program(launcher), *words],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == (3 if launcher == "mpirun" else 1)  # torchrun's own
    assert done.stderr.count("file/cache: cannot write the cache (Not a directory)") == NUM_RANKS


@slow
@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_a_killed_command_ends_and_is_taken_up(launcher: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    prefixes = [
        write_pair(tmp_path / "data" / f"{i}_text", rng.integers(0, 60, 30_000)) for i in range(3)
    ]
    words = [
        *started_by(launcher, killed=True),
        "-m",
        "megablend",
        *command_words(prefixes, str(tmp_path / "cache")),
    ]
    process = subprocess.Popen(words, env=environment(), stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 500
    while not list((tmp_path / "cache").glob("*.npy")) and time.monotonic() < deadline:
        time.sleep(0.001)
    victim = ranks_of(tmp_path / "cache")[-1]
    os.kill(victim, signal.SIGKILL)
    process.wait(timeout=SOON)
    done = subprocess.run(
        words, env=environment(), capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "cache") == alone(tmp_path, spec_of(tmp_path, prefixes, launcher))


def ranks_of(cache: Path) -> list[int]:
    """Processes that a launcher started with our command; it gives each its rank, and none to processes of its own."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words, given = (
                (path / name).read_bytes().split(b"\0") for name in ("cmdline", "environ")
            )
        except OSError:  # it has ended meanwhile, or is another user's
            continue
        if os.fsencode(cache) in words and any(
            word.startswith((b"RANK=", b"PMI_RANK=")) for word in given
        ):
            found.append(int(path.name))
    return found
