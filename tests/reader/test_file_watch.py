"""Checking files in the background: again after what was wrong was put right, and in forked children."""

from __future__ import annotations

import os
import pickle
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import megablend
from megablend.errors import MissingFileError
from megablend.index.verify.check_files import FileChecker
from megablend.reader import file_watch
from megablend.reader.file_watch import FileWatch
from megablend.run.run_files import RunFile
from tests.preloaded import python
from tests.reader.test_forks import run_in_child
from tests.runs import documents, make_config, write_source

SECONDS = 240


@pytest.fixture
def loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[megablend.Loader]:
    monkeypatch.setattr(file_watch, "ROUND_SECONDS", 0.01)
    source = write_source(tmp_path, 0, "arrow", documents(0, 60, 30, seed=4)) | {"weight": 1}
    config: dict[str, Any] = make_config(
        tmp_path, [source], samples=40, file_checks_per_second=1000
    )
    megablend.build(config)
    loader = megablend.Loader(megablend.open(config), micro_batch_size=4)
    yield loader
    loader.close()


def await_error(watch: FileWatch) -> None:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        watch.raise_found()
        time.sleep(0.01)


def test_training_resumes_once_the_file_is_restored(
    loader: megablend.Loader, tmp_path: Path
) -> None:
    path = tmp_path / "source0" / "1.arrow"
    aside = tmp_path / "aside"
    watch = loader._watch
    path.rename(aside)
    for _ in range(2):  # it is checked again, and found again
        watch.start()
        with pytest.raises(MissingFileError, match="restore the file and resume"):
            await_error(watch)
        watch.close()
    aside.rename(path)
    assert len(list(loader)) == 10
    watch.start()
    place = watch._progress.next_index
    deadline = time.monotonic() + SECONDS
    while watch._progress.next_index == place and time.monotonic() < deadline:
        time.sleep(0.001)
    assert watch._progress.next_index != place  # it goes on after the file
    watch.raise_found()


def test_files_that_were_touched_are_counted_once(loader: megablend.Loader, tmp_path: Path) -> None:
    """However often they are checked while training runs."""
    for path in (tmp_path / "source0").iterdir():
        os.utime(path)
    checker = loader._watch._checker
    files = [file.number for file in loader._watch._files]
    for _ in range(3):
        assert [checker.check(number) for number in files] == [None] * len(files)
    assert len(checker._touched) == len(files) > 1


def test_a_forked_child_checks_by_itself(loader: megablend.Loader) -> None:
    loader._watch.start()

    def check() -> bool:
        loader._watch.start()
        return any(
            thread.name == "megablend-watch" and thread.is_alive()
            for thread in threading.enumerate()
        )

    assert run_in_child(check) == 0


class SlowChecker:
    """Checks that take as long as a test says, and find the file missing."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)
        self.checks = 0

    def check(self, number: int) -> MissingFileError:
        self.checks += 1
        self.begun.release()
        assert self.may_end.acquire(timeout=SECONDS)
        return MissingFileError("a.arrow", "no such file")


@pytest.mark.parametrize("is_started_before", [False, True])
def test_what_a_check_finds_that_outlasts_an_epoch_is_raised_in_the_next_one(
    is_started_before: bool,
) -> None:
    checker = SlowChecker()
    watch = FileWatch(cast(FileChecker, checker), [RunFile(0)], per_second=1000)
    for number in (1, 2):  # once it is raised, the file is checked again
        watch.start()
        assert checker.begun.acquire(timeout=SECONDS)
        thread = watch._thread
        assert thread is not None
        watch.stop()  # the epoch ends
        if is_started_before:
            watch.start()
        checker.may_end.release()
        thread.join(SECONDS)
        watch.start()
        with pytest.raises(MissingFileError, match="restore the file and resume"):
            watch.raise_found()
        watch.raise_found()
        assert checker.checks == number
    watch.close()


def test_a_loader_in_another_process_continues_and_checks_files_itself(
    loader: megablend.Loader, tmp_path: Path
) -> None:
    batches = iter(loader)
    next(batches)
    again = pickle.loads(pickle.dumps(loader))
    found = [batch["tokens"] for batch in again]
    assert torch.equal(torch.cat(found), torch.cat([batch["tokens"] for batch in batches]))
    assert again.state_dict() == loader.state_dict()
    (tmp_path / "source0" / "1.arrow").unlink()
    again._watch.start()
    with pytest.raises(MissingFileError, match="restore the file and resume"):
        await_error(again._watch)


EXIT = """
import ctypes, sys, time, torch
from megablend.run.run_files import RunFile
from megablend.reader.file_watch import FileWatch

class Checker:
    def check(self, number):
        print("checking", flush=True)
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            torch.randn(300, 300) @ torch.randn(300, 300)  # a C++ library that gives up the GIL

watch = FileWatch(Checker(), [RunFile(0)], per_second=1000)
watch.start()
if sys.argv[1] == "collected":
    del watch
time.sleep(0.15)
sys.stdout.flush()
ctypes.pythonapi.Py_Exit(0)  # as Python itself ends, which a preloaded process does not
"""


@pytest.mark.parametrize("watch", ["collected", "in use"])
def test_a_process_that_exits_waits_for_the_check_in_progress(watch: str) -> None:
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        [*python("torch"), "-c", EXIT, watch],
        capture_output=True,
        text=True,
        timeout=500,
        env=os.environ | {"PYTHONPATH": str(root)},
        check=False,
    )
    assert (done.returncode, done.stdout.split("\n")[0], done.stderr) == (0, "checking", "")
