"""Whatever moment a build is killed at: what is there is whole, and the next build succeeds."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest

from megablend.config.read_spec import ReadSpec
from megablend.index.build.build import SourceSpec
from megablend.index.read.snapshot import open_snapshot
from megablend.index.tables.list_snapshots import list_snapshots
from megablend.index.verify.verify import verify
from tests.forks import forked
from tests.index.index_data import ROOT, build, driver, environment, spec, wait_for_end, write
from tests.storages import STORAGE

pytestmark = pytest.mark.long  # builds are started, killed and repeated
NUM_FILES = 24
CRASH = """
import os, signal, sys
from tests.index.index_data import build, spec
from pathlib import Path

calls, fsync = [], os.fsync

def crash(file):
    calls.append(file)
    if len(calls) == last:
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(file)

def work(write_number, data, cache):
    global last
    last, os.fsync = int(write_number), crash
    build(Path(cache), spec(Path(data)))
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for seed in range(NUM_FILES):
        write(folder / f"{seed:02}.arrow", seed)
    return folder


@pytest.fixture(scope="module")
def digest(data: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return build(tmp_path_factory.mktemp("whole"), spec(data)).digest


def check_after(data: Path, cache: Path, digest: str) -> None:
    if cache.exists():
        assert verify(str(cache), data=True, storage=STORAGE) == []
    assert build(cache, spec(data)).digest == digest
    assert verify(str(cache), data=True, storage=STORAGE) == []
    assert not list(cache.rglob(".tmp-*"))


def kill_a_rank(data: Path, cache: Path, seed: int) -> None:
    """Start a build and end one of its ranks, at a random moment of the time that a build takes."""
    chance = random.Random(seed)
    num_ranks = chance.choice([2, 3, 4])
    pids = cache.with_name("pids")
    pids.mkdir()
    command = driver(num_ranks, cache, f"source={data}/*.arrow")
    launcher = subprocess.Popen(
        command,
        env=environment(MEGABLEND_TEST_PIDS=pids, MEGABLEND_TEST_SLOW=0.01),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 500
    while (
        sum(path.name.isdigit() for path in pids.iterdir()) < num_ranks
        and time.monotonic() < deadline
    ):
        time.sleep(0.005)
    victim = int((pids / str(chance.randrange(num_ranks))).read_text())
    time.sleep(chance.uniform(0, 0.01 * NUM_FILES / num_ranks + 0.15))
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)
    launcher.wait(timeout=500)
    wait_for_end(pids)


@pytest.mark.parametrize(
    "seed", [seed if seed < 5 else pytest.param(seed, marks=pytest.mark.slow) for seed in range(50)]
)
def test_a_rank_killed_at_any_moment(data: Path, tmp_path: Path, digest: str, seed: int) -> None:
    kill_a_rank(data, tmp_path / "cache", seed)
    for name in list_snapshots(str(tmp_path / "cache")):
        assert name == digest
        assert len(open_snapshot(str(tmp_path / "cache"), name).sources[0].files) == NUM_FILES
    check_after(data, tmp_path / "cache", digest)


@pytest.mark.parametrize("again", [False, True], ids=["new", "there already"])
def test_a_build_killed_at_each_of_its_last_writes(
    data: Path, tmp_path: Path, digest: str, again: bool
) -> None:
    cache = tmp_path / "cache"
    build(cache, spec(data, "0*.arrow"))
    expected = {digest, *list_snapshots(str(cache))}
    if again:
        build(cache, spec(data))
    build(cache, spec(data, "0*.arrow"))
    with forked(CRASH, environment()) as call:
        for write_number in range(1, 40):
            code = call(write_number, data, cache)
            assert set(list_snapshots(str(cache))) <= expected
            assert verify(str(cache), data=False, storage=STORAGE) == []
            if code == 0:
                break
            assert code == -signal.SIGKILL
        else:
            pytest.fail("the build never finished")
    assert write_number > 6
    check_after(data, cache, digest)


def test_a_full_disk_leaves_nothing_half_written(data: Path, tmp_path: Path, digest: str) -> None:
    cache = tmp_path / "cache"
    messages = []
    for limit in (0, 300, 2000, 4000):

        def lower(limit: int = limit) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        command = driver(0, cache, f"source={data}/*.arrow")
        result = subprocess.run(
            command,
            env=environment(),
            preexec_fn=lower,
            capture_output=True,
            text=True,
            timeout=500,
            cwd=ROOT,
            check=False,
        )
        assert result.returncode != 0
        messages.append(result.stderr.splitlines()[-1])
        assert list_snapshots(str(cache)) == []
        assert not [path for path in (cache / "fragments").iterdir() if path.name.startswith(".")]
    assert all("cannot write the cache (File too large)" in message for message in messages)
    assert "fragments/" in messages[1]
    assert "/generations: " in messages[2]
    check_after(data, cache, digest)


@pytest.mark.parametrize(
    "number", [2, 3, *(pytest.param(number, marks=pytest.mark.slow) for number in (1, 4, 5, 6, 7))]
)
def test_a_build_of_many_files_killed_at_each_of_its_writes(
    data: Path, tmp_path: Path, number: int
) -> None:
    for seed in range(NUM_FILES, 2 * NUM_FILES):  # enough for a pack
        write(tmp_path / "data" / f"{seed}.arrow", seed)
    both = SourceSpec(
        name="both",
        patterns=(f"{data}/*.arrow", f"{tmp_path}/data/*.arrow"),
        read=ReadSpec(),
    )
    cache = tmp_path / "cache"
    script = CRASH.replace("spec(Path(data))", f"eval({repr(both)!r}, vars(sources))")
    with forked(
        f"from megablend.index.build import source_spec as sources\n{script}", environment()
    ) as call:
        assert call(number, data, cache) == -signal.SIGKILL
    assert verify(str(cache), data=False, storage=STORAGE) == []
    report = build(cache, both)
    assert report.read == (2 * NUM_FILES if number < 3 else 0)  # the second write is the pack's
    assert report.digest == build(tmp_path / "whole", both).digest
    assert verify(str(cache), data=True, storage=STORAGE) == []
    assert not list(cache.rglob(".tmp-*"))
